"""`cuda_ipc` between two processes with pools on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import DeviceRegion
from tandem.kvtransfer.transports.cuda_ipc import CudaIpcTransport, CudaMemory
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer
from tests.gpu.cuda_far_end import NUM_PAGES, PAGE_BYTES

pytestmark = pytest.mark.gpu

FAR_END = Path(__file__).with_name("cuda_far_end.py")
ROOM = Room(1)


class Rig:
    def __init__(self):
        self.child = subprocess.Popen(
            [sys.executable, FAR_END],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": "src:."},
        )
        offer = msgspec.json.decode(self.child.stdout.readline(), type=TransportOffer)
        self.source = torch.randint(
            0, 256, (NUM_PAGES, PAGE_BYTES), dtype=torch.uint8, device="cuda:0"
        )
        torch.cuda.synchronize()
        region = DeviceRegion(self.source)
        self.connection = CudaIpcTransport().connect(offer, region)

    def ask(self, question):
        self.child.stdin.write(question + "\n")
        self.child.stdin.flush()
        return self.child.stdout.readline().strip()

    def pages(self):
        return np.frombuffer(bytes.fromhex(self.ask("read")), np.uint8).reshape(NUM_PAGES, -1)


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.connection.close()
    made.child.communicate()


def pages(source, destination):
    begin, to = (np.array(side, np.int64) * PAGE_BYTES for side in (source, destination))
    return CopyPlan(begin, to, np.full(len(source), PAGE_BYTES, np.int64))


def test_pages_land_where_the_plan_says_and_nowhere_else(rig):
    rig.connection.write(ROOM, pages([9, 2, 15], [1, 7, 4]))
    landed, sent = rig.pages(), rig.source.cpu().numpy()
    assert (landed[[1, 7, 4]] == sent[[9, 2, 15]]).all()
    assert not landed[[page for page in range(NUM_PAGES) if page not in {1, 7, 4}]].any()


def test_many_short_runs_land_in_their_places(rig):
    begin = np.arange(0, 4 * PAGE_BYTES, 64)
    rig.connection.write(ROOM, CopyPlan(begin, begin[::-1], np.full_like(begin, 64)))
    landed, sent = rig.pages(), rig.source.cpu().numpy()
    assert (landed[:4].reshape(-1, 64) == sent[:4].reshape(-1, 64)[::-1]).all()
    assert not landed[4:].any()


def test_a_write_outside_the_grant_is_refused(rig):
    with pytest.raises(TransferRefused):
        rig.connection.write(ROOM, pages([0], [NUM_PAGES - 1]))
    assert not rig.pages().any()


def test_nothing_is_written_after_the_fence(rig):
    rig.connection.write(ROOM, pages([0], [0]))
    assert rig.ask("fence") == "fenced"
    with pytest.raises(PeerLost):
        rig.connection.write(ROOM, pages([0], [0]))
    assert (rig.pages() == 7).all()


def test_a_handle_of_nothing_is_refused():
    region = DeviceRegion(torch.zeros(4096, dtype=torch.uint8, device="cuda:0"))
    with pytest.raises(TransferRefused):
        CudaMemory().open(bytes(72), 4096, region)
