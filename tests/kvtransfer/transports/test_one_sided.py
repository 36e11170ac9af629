"""The code shared by one-sided transports, over a fake library that copies within the process."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.one_sided import (
    LONGEST_PAUSE_S,
    SHORTEST_PAUSE_S,
    OneSidedConnection,
    OneSidedListener,
    PollInterval,
    PoolAddresses,
)
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.generation import Room
from tests.patience import PATIENCE_S

ROOM = Room(1)
PAGE_BYTES, NUM_PAGES = 4096, 8


class Library:
    """A sending end that writes nowhere: while it hangs no transfer is done."""

    def __init__(self, token, copy):
        self.token, self.copy = token, copy
        self.num_begun = self.num_open = self.most_open = 0
        self.hangs, self.reads = False, []
        self.looked = Event()
        self.is_closed = False

    def read(self, address, into, *, is_in_pool=False):
        if is_in_pool:
            self.reads.append((address, self.num_open))
        else:
            assert address == self.token.ctypes.data
            into[:] = self.token
        return self._begin()

    def writes(self, plan):
        for _ in range(len(plan)):
            yield self._begin()

    def _begin(self):
        self.num_begun += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        return self.num_begun

    def is_done(self, transfer):
        self.looked.set()
        if not self.hangs:
            self.num_open -= 1
        return not self.hangs

    def close(self):
        self.is_closed = True


@pytest.fixture
def made():
    with MemoryRegion.private(PAGE_BYTES * NUM_PAGES) as region:
        connection, library = connect(region, token=7)
        yield connection, library
        connection.close()


def connect(region, token, **options):
    """Connect to an owner whose token is 7, by an offer that names this one."""
    own, libraries = np.array([7], np.int64), []
    places = PoolAddresses(
        pool_address=PAGE_BYTES,
        pool_bytes=PAGE_BYTES * NUM_PAGES,
        token_address=own.ctypes.data,
        token=token,
    )

    def open_end(copy):
        libraries.append(Library(own, copy))
        return libraries[0]

    return OneSidedConnection(places, region, open_end, 3, **options), libraries[0]


def pages(*numbers):
    at = np.array(numbers, np.int64) * PAGE_BYTES
    return CopyPlan(at, at, np.full(len(numbers), PAGE_BYTES, np.int64))


def test_an_offer_of_another_process_at_the_same_address_is_refused():
    with (
        MemoryRegion.private(PAGE_BYTES) as region,
        pytest.raises(TransferRefused, match="other than the owner"),
    ):
        connect(region, token=8)


def test_each_peer_has_its_own_token():
    end = SimpleNamespace(facts={}, close=lambda: None)
    with MemoryRegion.private(PAGE_BYTES) as region:
        listener = OneSidedListener(Pool.packed(region, PAGE_BYTES, 1), "one", lambda *_: end)
        tokens = {listener.admit("").offer.descriptor["token"] for _ in range(10)}
    assert len(tokens) == 10


def test_transfers_in_flight_stay_within_the_limit(made):
    connection, library = made
    connection.write(ROOM, pages(*range(NUM_PAGES)))
    assert library.most_open == 3
    assert library.num_open == 0


def test_write_that_is_read_back_is_complete_after_a_read_of_its_last_bytes(stack):
    region = stack.enter_context(MemoryRegion.private(PAGE_BYTES * NUM_PAGES))
    connection, library = connect(region, token=7, reads_back=True)
    stack.callback(connection.close)
    look = connection.post(ROOM, pages(0, 1, 2, 3, 4))
    assert library.reads == []
    assert look() is None
    # The pool begins at PAGE_BYTES; no write was in flight any more.
    assert library.reads == [(6 * PAGE_BYTES - 8, 0)]
    assert library.num_open == 0
    look = connection.post(ROOM, pages(2))
    library.hangs = True
    assert look() is not None
    assert len(library.reads) == 1


def test_writes_overlap_until_a_poll_finds_them_complete(made):
    connection, library = made
    looks = [connection.post(ROOM, pages(number)) for number in range(4)]
    assert library.num_open == 4
    library.hangs = True
    assert 0 < looks[0]() <= LONGEST_PAUSE_S
    library.hangs = False
    for number, look in enumerate(looks):
        assert look() is None
        assert library.num_open == 3 - number


def test_closing_a_connection_cancels_its_transfers_in_flight(made):
    connection, library = made
    look = connection.post(ROOM, pages(1))
    connection.close()
    assert library.is_closed
    with pytest.raises(PeerLost):
        look()
    with pytest.raises(PeerLost):
        connection.post(ROOM, pages(1))


def test_a_write_that_hangs_ends_when_the_connection_is_closed(made):
    connection, library = made
    library.hangs = True
    library.looked.clear()
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(connection.write, ROOM, pages(1))
        assert library.looked.wait(PATIENCE_S)
        connection.close()
        assert isinstance(writing.exception(PATIENCE_S), PeerLost)
    assert library.is_closed


def test_poll_pauses_grow_while_idle_and_shrink_after_work():
    pace = PollInterval()
    idle = [pace.next_pause_s(0) for _ in range(100)]
    assert idle == sorted(idle)
    assert idle[-1] == LONGEST_PAUSE_S
    assert pace.next_pause_s(1e-3) == SHORTEST_PAUSE_S
