"""What one-sided transports share, with a library that copies within the process."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.one_sided import (
    LONGEST_PAUSE_S,
    SHORTEST_PAUSE_S,
    Destroyer,
    OneSidedConnection,
    OneSidedListener,
    Pace,
    Places,
)
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.ids import Room
from tests.patience import PATIENCE_S

ROOM, OTHER = Room(1), Room(2)
PAGE_BYTES, NUM_PAGES = 4096, 8


class Library:
    """A sending end that writes nowhere: transfers of `hangs` are never done."""

    def __init__(self, table, copy):
        self.table, self.copy = table, copy
        self.num_begun = self.num_open = self.most_open = 0
        self.reads = []
        self.hangs = False
        self.looked = Event()
        self.is_closed = False

    def read(self, address, into):
        first = (address - self.table.ctypes.data) // 8
        self.reads.append((first, len(into)))
        into[:] = self.table[first : first + len(into)]
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
    table = np.full(NUM_PAGES, int(ROOM), np.int64)
    places = Places(
        pool_address=PAGE_BYTES,
        table_address=table.ctypes.data,
        page_bytes=PAGE_BYTES,
        num_pages=NUM_PAGES,
    )
    libraries = []

    def open_end(copy):
        libraries.append(Library(table, copy))
        return libraries[0]

    with MemoryRegion.private(PAGE_BYTES * NUM_PAGES) as region:
        connection = OneSidedConnection(places, region, open_end, 3, Destroyer())
        yield connection, libraries[0]
        connection.close()


def pages(*numbers):
    at = np.array(numbers, np.int64) * PAGE_BYTES
    return CopyPlan(at, at, np.full(len(numbers), PAGE_BYTES, np.int64))


def test_a_write_reads_the_rooms_of_its_own_pages_only(made):
    connection, library = made
    connection.write(ROOM, pages(3, 2, 5))
    assert library.reads == [(0, NUM_PAGES), (2, 4)]


def test_a_page_of_another_room_is_refused_before_anything_is_written(made):
    connection, library = made
    library.table[4] = OTHER
    with pytest.raises(TransferRefused, match="page 4"):
        connection.write(ROOM, pages(3, 4))
    assert library.num_begun == 2  # the two reads


def test_no_more_transfers_are_under_way_than_allowed(made):
    connection, library = made
    connection.write(ROOM, pages(*range(NUM_PAGES)))
    assert library.most_open == 3
    assert library.num_open == 0


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


def test_pauses_grow_while_nothing_happens_and_are_short_again_after_work():
    pace = Pace()
    idle = [pace.next_pause_s(0) for _ in range(100)]
    assert idle == sorted(idle)
    assert idle[-1] == LONGEST_PAUSE_S
    assert pace.next_pause_s(1e-3) == SHORTEST_PAUSE_S


class SlowEnd:
    """A receiving end that is destroyed only when the test says so."""

    def __init__(self):
        self.facts = {}
        self.is_begun, self.may_end = Event(), Event()

    def expect_writes(self, *, are_expected):
        pass

    def close(self):
        self.is_begun.set()
        assert self.may_end.wait(PATIENCE_S)


def test_ends_are_destroyed_one_at_a_time():
    ends = []

    def open_end(_host, _rooms):
        ends.append(SlowEnd())
        return ends[-1]

    with MemoryRegion.private(PAGE_BYTES * NUM_PAGES) as region, ThreadPoolExecutor(2) as threads:
        pool = Pool(region, PAGE_BYTES, NUM_PAGES)
        listener = OneSidedListener(pool, "library", open_end, Destroyer())
        peers = [listener.admit("127.0.0.1").peer for _ in range(2)]
        fences = [threads.submit(listener.fence, peers[0])]
        assert ends[0].is_begun.wait(PATIENCE_S)
        fences.append(threads.submit(listener.fence, peers[1]))
        ends[1].may_end.set()
        assert not ends[1].is_begun.wait(0.1)  # although nothing else holds it up
        ends[0].may_end.set()
        for fence in fences:
            fence.result(PATIENCE_S)
        assert ends[1].is_begun.is_set()
