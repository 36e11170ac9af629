"""Tests specific to `cuda_ipc`, over memory files instead of a GPU."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import SHM_DIR, MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.kvtransfer.transports.cuda_ipc import (
    HANDLE_BYTES,
    CudaDevice,
    CudaIpcTransport,
    CudaMemory,
    CudaPool,
)
from tandem.kvtransfer.transports.registry import transports
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer
from tests.kvtransfer.host_device import HostDevice
from tests.kvtransfer.host_driver import Driver, OldDriver
from tests.patience import PATIENCE_S

PAGE_BYTES, NUM_PAGES = 4096, 8
ROOM = Room(1)


def one_page():
    return CopyPlan(*(np.array([number], np.int64) for number in (0, 0, PAGE_BYTES)))


class Rig:
    def __init__(self):
        self.transport = CudaIpcTransport(memory=HostDevice())
        self.source = MemoryRegion.private(PAGE_BYTES * NUM_PAGES)
        self.destination = MemoryRegion.shared(PAGE_BYTES * NUM_PAGES, "rig")
        self.listener = self.transport.listen(Pool.packed(self.destination, PAGE_BYTES, NUM_PAGES))
        self.admission = self.listener.admit("")
        self.peer = self.admission.peer
        self.listener.permit(self.peer, ROOM, range(NUM_PAGES))

    def connect(self, **changes):
        facts = {**self.admission.offer.descriptor, **changes}
        return self.transport.connect(
            TransportOffer(name="cuda_ipc", descriptor=facts), self.source
        )

    def close(self):
        self.listener.close()
        self.destination.close()


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.close()
    made.listener.close()
    stem = made.admission.offer.descriptor["pool"].removesuffix(".pool")
    assert not list(SHM_DIR.glob(f"{stem}.*"))


@pytest.mark.parametrize(
    "changes",
    [
        {"pid_namespace": 1},
        {"handle": "00"},
        {"handle": "xyz"},
        {"handle": ""},
        {"handle": "ab" * 257},
        {"nonce": "00" * 16},
        {"pool": "../../etc/passwd"},
        {"num_pages": NUM_PAGES * 2},
        {"num_pages": 2**62},
        {"page_bytes": 2**62},
        {"page_bytes": 0},
    ],
)
def test_wrong_offer_is_refused_and_leaves_nothing_open(rig, changes):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransferRefused):
        rig.connect(**changes)
    # Threads of earlier tests may close the last of theirs meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= before


def test_closing_unmaps_the_pool(rig):
    connection = rig.connect()
    connection.close()
    assert connection._pool.is_closed
    with pytest.raises(PeerLost):
        connection.write(ROOM, one_page())


def test_a_fence_waits_for_the_process_of_a_writer_that_died_in_a_copy(rig):
    """The kernel gives the lock up at death; the device's driver may clear up a moment later."""
    control = rig.listener._controls[rig.peer]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as writer:
        control._writer[0] = writer.pid
        fence = threading.Thread(target=rig.listener.fence, args=(rig.peer,))
        fence.start()
        fence.join(0.05)
        assert fence.is_alive()
        writer.kill()
    fence.join(PATIENCE_S)
    assert not fence.is_alive()


def test_a_fence_does_not_wait_for_a_process_that_is_gone(rig):
    with subprocess.Popen([sys.executable, "-c", ""]) as writer:
        pass
    rig.listener._controls[rig.peer]._writer[0] = writer.pid
    rig.listener.fence(rig.peer)
    assert rig.peer not in rig.listener._controls


@pytest.mark.parametrize("number", [-1, -(2**31)])
def test_fence_ignores_an_invalid_process_id(rig, number):
    rig.listener._controls[rig.peer]._writer[0] = number
    rig.listener.fence(rig.peer)
    assert rig.peer not in rig.listener._controls


def test_process_id_is_cleared_after_a_copy(rig):
    connection = rig.connect()
    connection.write(ROOM, one_page())
    assert rig.listener._controls[rig.peer]._writer[0] == 0
    connection.close()


def test_failed_copy_ends_the_connection_and_keeps_the_process_id(rig):
    connection = rig.connect()

    def fail(_plan):
        raise PeerLost("the device fell off the bus")

    connection._pool.copy = fail
    with pytest.raises(PeerLost, match="bus"):
        connection.write(ROOM, one_page())
    del connection._pool.copy
    with pytest.raises(PeerLost, match="earlier"):
        connection.write(ROOM, one_page())
    control = rig.listener._controls[rig.peer]
    assert control._writer[0] == os.getpid()
    control._writer[0] = 0  # else the fence waits for this process to end
    connection.close()


def test_cpu_pool_is_refused_before_the_driver_is_loaded():
    [transport] = transports("cuda_ipc", TransportConfig())
    with MemoryRegion.shared(PAGE_BYTES) as region:
        with pytest.raises(ConfigInvalid, match="GPU memory"):
            transport.listen(Pool.packed(region, PAGE_BYTES, 1))
        with pytest.raises(TransferRefused, match="not in GPU memory"):
            CudaMemory().open(bytes(72), PAGE_BYTES, region)


@pytest.mark.parametrize(
    ("driver", "num_copies", "calls"),
    [
        (Driver, 3, {"cuMemcpyBatchAsync": 1}),
        (Driver, 1, {"cuMemcpyAsync": 1}),
        (OldDriver, 3, {"cuMemcpyAsync": 3}),
    ],
)
def test_copies_of_a_write_are_one_call_if_the_driver_supports_it(driver, num_copies, calls):
    offset, theirs = 16, np.zeros(PAGE_BYTES, np.uint8)
    plan = CopyPlan(
        np.array([0, 300, 100])[:num_copies],
        np.array([500, 0, 1000])[:num_copies],
        np.array([10, 200, 50])[:num_copies],
    )
    with MemoryRegion.private(PAGE_BYTES) as source:
        own = source.array()
        own[:] = np.random.default_rng(0).integers(1, 256, PAGE_BYTES)
        made = driver(theirs)
        pool = CudaPool(
            CudaDevice(0, made), source, bytes(HANDLE_BYTES), offset, PAGE_BYTES - offset
        )
        pool.copy(plan)
        pool.close()
        expected = np.zeros(PAGE_BYTES, np.uint8)
        for begin, to, size in plan.copies():
            expected[offset + to : offset + to + size] = own[begin : begin + size]
    assert made.num_calls == calls
    assert np.array_equal(theirs, expected)
