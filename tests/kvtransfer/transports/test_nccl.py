"""Tests specific to torch.distributed groups; test_transports.py has those of every transport."""

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tandem.kvtransfer.transports import nccl
from tandem.kvtransfer.transports.nccl import (
    ASYNC_ERRORS,
    SENDER,
    GlooGroup,
    GroupLane,
    NcclGroup,
    NcclTransport,
)
from tests.kvtransfer.transports.lane_cases import *  # noqa: F403
from tests.kvtransfer.transports.lane_cases import POOL_BYTES, ROOM, LaneRig, copies


@pytest.fixture
def rig():
    made = LaneRig(
        NcclTransport(),
        lambda stream, region: GroupLane(stream, torch.from_numpy(region.array()), SENDER),
    )
    yield made
    made.close()


def test_the_global_group_of_the_process_is_not_used(rig):
    rig.connect().close()
    assert not torch.distributed.is_initialized()


# ── NCCL's own groups, with the parts of torch that need a GPU replaced ──────────────────────────


class StandIn:
    """In the place of `ProcessGroupNCCL`, which this build of torch may lack."""

    class Options:
        pass

    def __init__(self, store, rank, num_ranks, options):
        self.async_errors = [os.environ.get(ASYNC_ERRORS) for _ in range(10)]
        if store == "broken":
            raise RuntimeError("no group")


class Stream:
    def __init__(self, device, waited):
        self.device, self.waited = device, waited

    def synchronize(self):
        self.waited.append(self.device)


class Work:
    def wait(self):
        pass


@pytest.fixture
def waited(monkeypatch):
    """Returns the devices whose stream was waited for."""
    waited = []
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", StandIn, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(device, waited))
    return waited


def test_work_of_a_group_is_in_its_own_stream(rig, monkeypatch):
    here, outside = threading.local(), set()

    class Watched(GlooGroup):
        @contextlib.contextmanager
        def working(self):
            here.is_working = True
            yield
            here.is_working = False

    def watch(place, name):
        call = getattr(place, name)

        def watched(*args):
            if not getattr(here, "is_working", False):
                outside.add(name)
            return call(*args)

        monkeypatch.setattr(place, name, watched, raising=False)

    for name in ("send", "receive", "finish", "settle"):
        watch(Watched, name)
    for name in ("_gather", "_scatter"):
        watch(nccl, name)
    monkeypatch.setattr(nccl, "GlooGroup", Watched)
    with contextlib.closing(rig.connect()) as connection:
        connection.write(ROOM, copies((0, 0, POOL_BYTES)))
    assert (rig.pool.array() == rig.source.array()).all()
    assert outside == set()


def test_group_waits_for_its_device_in_a_thread_without_a_current_one(waited):
    group = NcclGroup(None, SENDER, torch.device("cuda:1"))
    group.finish(Work())
    group.settle()
    assert waited == [torch.device("cuda:1")] * 2


@pytest.fixture
def switches_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("waited", "switches_often")
@pytest.mark.parametrize("asked", [None, "3"])
def test_concurrent_groups_have_no_watchdog_and_restore_the_environment(monkeypatch, asked):
    if asked is None:
        monkeypatch.delenv(ASYNC_ERRORS, raising=False)
    else:
        monkeypatch.setenv(ASYNC_ERRORS, asked)

    def make(_):
        return NcclGroup(None, SENDER, torch.device("cuda:1"))._group.async_errors

    with ThreadPoolExecutor(4) as threads:
        seen = {each for errors in threads.map(make, range(1000)) for each in errors}
    assert seen == {"0"}
    assert os.environ.get(ASYNC_ERRORS) == asked


@pytest.mark.usefixtures("waited")
def test_failed_group_restores_the_environment(monkeypatch):
    monkeypatch.setenv(ASYNC_ERRORS, "3")
    with pytest.raises(RuntimeError):
        NcclGroup("broken", SENDER, torch.device("cuda:1"))
    assert os.environ[ASYNC_ERRORS] == "3"
