"""Tests specific to NIXL; test_transports.py and test_one_sided.py have the shared ones."""

import gc
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import nixl
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.nixl import LINKS, NixlTransport
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer
from tests.patience import until

ROOM = Room(1)
POOL_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def loopback_alone(monkeypatch):
    """Keep UCX from the interfaces that tests of networks make and remove meanwhile."""
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


@pytest.fixture
def region():
    with MemoryRegion.private(POOL_BYTES) as region:
        yield region


@pytest.fixture
def listener(region):
    listener = NixlTransport().listen(Pool.packed(region, 4096, POOL_BYTES // 4096))
    yield listener
    listener.close()


def whole_pool():
    zero = np.zeros(1, np.int64)
    return CopyPlan(zero, zero, np.array([POOL_BYTES], np.int64))


def test_links_between_hosts_may_be_named(region, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "rc_x,tcp")
    NixlTransport().listen(Pool.packed(region, 4096, 1)).close()


MAKE = """
import os, sys
from tandem.kvtransfer.transports.nixl_agent import make_agent
before = dict(os.environ)
make_agent({"UCX_TLS": sys.argv[1]})
assert os.environ == before
"""


@pytest.mark.parametrize(
    ("links", "excluded"), [(LINKS, {"posix", "sysv", "cma", "cuda_ipc"}), ("^sm,self", {"self"})]
)
def test_agent_has_none_of_the_links_that_a_list_excludes(tmp_path, links, excluded):
    log = tmp_path / "ucx.log"
    environment = {**os.environ, "UCX_LOG_LEVEL": "debug", "UCX_LOG_FILE": str(log)}
    environment.pop("UCX_TLS", None)
    subprocess.run([sys.executable, "-c", MAKE, links], env=environment, check=True)
    used = set(re.findall(r"created interface\[\d+\]=\S+ using (\w+)/", log.read_text()))
    assert "tcp" in used
    assert used & excluded == set()


def test_bytes_land_only_when_this_process_reads_them(listener, region):
    admission = listener.admit("127.0.0.1")
    listener.permit(admission.peer, ROOM, range(POOL_BYTES // 4096))
    with MemoryRegion.private(POOL_BYTES) as source:
        source.array()[:] = 1
        connection = NixlTransport().connect(admission.offer, source)
        errors = []

        def write():
            try:
                connection.write(ROOM, whole_pool())
            except PeerLost as error:
                errors.append(error)

        writing = threading.Thread(target=write)
        with listener._ends[admission.peer]._lock:
            writing.start()
            writing.join(0.05)
            assert writing.is_alive()
            assert not region.array().any()
            connection.close()
        writing.join()
        assert errors


def test_pool_is_read_behind_a_write_as_on_a_gpu(listener, region, monkeypatch):
    monkeypatch.setattr(nixl, "NO_GPU", -2)  # so that the pool's number, -1, is that of a GPU
    admission = listener.admit("127.0.0.1")
    listener.permit(admission.peer, ROOM, range(POOL_BYTES // 4096))
    with MemoryRegion.private(POOL_BYTES) as source:
        source.array()[:] = 1
        connection = NixlTransport().connect(admission.offer, source)
        connection.write(ROOM, whole_pool())
        assert connection._token.tobytes() == bytes([1] * 8)
        assert region.array().all()
        connection.close()


def test_fence_closes_the_sockets_of_the_agent(listener):
    gc.collect()  # files that earlier tests left to it
    before = len(list(Path("/proc/self/fd").iterdir()))
    peers = [listener.admit("127.0.0.1").peer for _ in range(3)]
    assert len(list(Path("/proc/self/fd").iterdir())) > before
    for peer in peers:
        listener.fence(peer)
    # Its library has threads that close some.
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before, what="sockets stay open")


@pytest.mark.parametrize("cut", [0, 1, 40, -20])
def test_truncated_metadata_is_refused(listener, region, cut):
    descriptor = dict(listener.admit("127.0.0.1").offer.descriptor)
    descriptor["metadata"] = descriptor["metadata"][:cut]
    with pytest.raises(TransferRefused):
        NixlTransport().connect(TransportOffer(name="nixl", descriptor=descriptor), region)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metadata", "A" * (1 << 17)),
        ("pool_bytes", 1 << 60),
        ("pool_bytes", 0),
        ("pool_address", -1),
        ("pool_address", (1 << 57) - 1),
        ("token_address", 1 << 60),
    ],
)
def test_offer_with_an_invalid_size_is_refused(listener, region, name, value):
    descriptor = {**listener.admit("127.0.0.1").offer.descriptor, name: value}
    with pytest.raises(TransferRefused):
        NixlTransport().connect(TransportOffer(name="nixl", descriptor=descriptor), region)


def test_restarted_peer_is_a_new_agent(listener, region):
    offers = [listener.admit("127.0.0.1").offer for _ in range(2)]
    assert offers[0].descriptor["metadata"] != offers[1].descriptor["metadata"]
    for offer in offers:
        NixlTransport().connect(offer, region).close()
