"""Tests specific to Mooncake; `tests/kvtransfer` has the shared ones."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tandem_mooncake import MAX_PIECES_IN_FLIGHT, PIECE_BYTES, MooncakeTransport

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer
from tests.patience import PATIENCE_S

ROOM = Room(1)
PAGE_BYTES, NUM_PAGES = 4096, 2 * MAX_PIECES_IN_FLIGHT


@pytest.fixture
def region():
    with MemoryRegion.private(PAGE_BYTES * NUM_PAGES) as region:
        yield region


@pytest.fixture
def listener(region):
    listener = MooncakeTransport().listen(Pool.packed(region, PAGE_BYTES, NUM_PAGES))
    yield listener
    listener.close()


def test_more_copies_than_may_be_in_flight_all_land(listener, region):
    admission = listener.admit("127.0.0.1")
    listener.permit(admission.peer, ROOM, range(NUM_PAGES))
    with MemoryRegion.private(region.size_bytes) as source:
        source.array()[:] = np.random.default_rng(0).integers(0, 256, region.size_bytes, np.uint8)
        connection = MooncakeTransport().connect(admission.offer, source)
        at = np.arange(NUM_PAGES, dtype=np.int64) * PAGE_BYTES
        connection.write(ROOM, CopyPlan(at, at[::-1], np.full(NUM_PAGES, PAGE_BYTES, np.int64)))
        pages = source.array().reshape(NUM_PAGES, -1)
        assert (region.array().reshape(NUM_PAGES, -1) == pages[::-1]).all()
        connection.close()


def test_write_outside_the_registered_memory_is_refused_by_the_engine(listener, region):
    admission = listener.admit("127.0.0.1")
    with MemoryRegion.private(PIECE_BYTES) as elsewhere:
        lies = {**admission.offer.descriptor, "pool_address": elsewhere.address}
        listener.permit(admission.peer, ROOM, [0])
        region.array()[:] = 1
        connection = MooncakeTransport().connect(
            TransportOffer(name="mooncake", descriptor=lies), region
        )
        zero = np.zeros(1, np.int64)
        with pytest.raises(PeerLost):
            connection.write(ROOM, CopyPlan(zero, zero, np.array([PAGE_BYTES], np.int64)))
        assert not elsewhere.array().any()
        connection.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", ""),
        ("host", "x" * 300),
        ("port", 0),
        ("port", 1 << 16),
        ("protocol", "carrier_pigeon"),
        ("pool_bytes", 1 << 60),
        ("token_address", 8),
    ],
)
def test_offer_with_an_invalid_size_is_refused(listener, region, name, value):
    descriptor = {**listener.admit("127.0.0.1").offer.descriptor, name: value}
    with pytest.raises(TransferRefused):
        MooncakeTransport().connect(TransportOffer(name="mooncake", descriptor=descriptor), region)


def test_engines_are_destroyed_one_at_a_time(region):
    transport = MooncakeTransport()
    listener = transport.listen(Pool.packed(region, PAGE_BYTES, NUM_PAGES))
    peer = listener.admit("127.0.0.1").peer
    with ThreadPoolExecutor(1) as thread:
        with transport._turn:  # as if another one was being destroyed
            fence = thread.submit(listener.fence, peer)
            assert not fence.done()
            assert listener._ends[peer]._engine is not None
        fence.result(PATIENCE_S)
    listener.close()
