"""What holds for every two-sided transport; each one's test file takes these with a `rig` of its own."""

import threading

import numpy as np
import pytest

from tandem.kvtransfer.transports import tcp_stream as frames
from tandem.wire.errors import PeerLost
from tests.kvtransfer.transports.lane_rig import (
    LIES,
    NUM_PAGES,
    PAGE_BYTES,
    POOL_BYTES,
    ROOM,
    copies,
)
from tests.patience import PATIENCE_S


@pytest.mark.parametrize("num_copies", [-1, 0, frames.MAX_COPIES + 1, 2**62])
def test_a_table_of_a_senseless_length_is_refused_unread_and_counted(rig, num_copies):
    assert rig.answer(frames.HEADER.pack(ROOM, num_copies)) == frames.REFUSED
    assert rig.listener.num_violations == 1


@pytest.mark.parametrize("lie", LIES)
def test_a_copy_that_leaves_the_pool_is_refused_unread_and_counted(rig, lie):
    assert rig.answer(frames.table_of(ROOM, copies((0, *LIES[lie])))) == frames.REFUSED
    assert rig.listener.num_violations == 1


def test_copies_that_together_pass_the_pool_are_refused_unread_and_counted(rig):
    twice = copies(*[(0, page * PAGE_BYTES, PAGE_BYTES) for page in range(NUM_PAGES)] * 2)
    assert rig.answer(frames.table_of(ROOM, twice)) == frames.REFUSED
    assert rig.listener.num_violations == 1


def test_a_room_without_a_grant_is_refused_unread_and_counted(rig):
    assert rig.answer(frames.table_of(2, copies((0, 0, PAGE_BYTES)))) == frames.REFUSED
    assert rig.listener.num_violations == 1


@pytest.mark.parametrize("size_bytes", [1, 100, 4097])
def test_small_and_odd_copies_land_where_the_plan_says_and_nowhere_else(rig, size_bytes):
    rng = np.random.default_rng(size_bytes)
    begin, to = (rng.permutation(POOL_BYTES // 5000)[:200] * 5000 for _ in range(2))
    connection = rig.connect()
    connection.write(ROOM, copies(*zip(begin, to, [size_bytes] * 200, strict=True)))
    expected = np.zeros(POOL_BYTES, np.uint8)
    for at, there in zip(begin, to, strict=True):
        expected[there : there + size_bytes] = rig.source.array()[at : at + size_bytes]
    assert (rig.pool.array() == expected).all()
    connection.close()


def test_closing_from_another_thread_ends_a_write_that_hangs(rig):
    connection = rig.connect()
    errors = []

    def write():
        try:
            connection.write(ROOM, copies((0, 0, POOL_BYTES)))
        except PeerLost as error:
            errors.append(error)

    # The listener cannot open pages while its lock is held: the write has begun and cannot end.
    with rig.listener._changed:
        writer = threading.Thread(target=write)
        writer.start()
        connection.close()
        writer.join(PATIENCE_S)
    assert not writer.is_alive()
    assert errors


def test_a_fence_ends_a_batch_whose_bytes_do_not_come(rig):
    stream, lane = rig.stream()
    with stream:
        stream.sendall(frames.table_of(ROOM, copies((0, 0, POOL_BYTES))))
        assert frames.receive_exactly(stream, 1) != frames.REFUSED
        fence = threading.Thread(target=rig.listener.fence, args=(rig.admission.peer,))
        fence.start()
        fence.join(PATIENCE_S)
        assert not fence.is_alive()
        with pytest.raises(PeerLost):
            frames.receive_exactly(stream, 1)
        lane.close()
    assert rig.listener.num_violations == 0
