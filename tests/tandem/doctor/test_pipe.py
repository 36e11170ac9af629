"""Messages of a probe arrive as they were, until one end is gone."""

import contextlib
import os

import pytest

from tandem.doctor.pipe import RankPipe
from tandem.wire.errors import PeerLost
from tandem.wire.messages import Cancel, ToEngine


@pytest.fixture
def ends():
    """Two ends, each reading what the other writes."""
    (read_a, write_b), (read_b, write_a) = os.pipe(), os.pipe()
    files = [os.fdopen(fd, mode) for fd, mode in ((read_a, "rb"), (write_a, "wb"))]
    files += [os.fdopen(fd, mode) for fd, mode in ((read_b, "rb"), (write_b, "wb"))]
    yield RankPipe(*files[:2], ToEngine), RankPipe(*files[2:], ToEngine), files
    for file in files:
        with contextlib.suppress(BrokenPipeError):  # what was written for nobody
            file.close()


def test_messages_arrive_in_order(ends):
    one, other, _ = ends
    for room in range(3):
        one.send(Cancel(request_id="a", attempt=room))
    assert [other.receive().attempt for _ in range(3)] == [0, 1, 2]


def test_the_end_of_the_far_side_ends_what_is_received(ends):
    one, other, _ = ends
    one.hang_up()
    one.hang_up()
    assert other.receive() is None


def test_a_message_cut_short_is_none(ends):
    one, other, files = ends
    files[1].write(b"\x09\0\0\0abc")
    one.hang_up()
    assert other.receive() is None


def test_a_far_side_that_does_not_read_any_more_is_lost(ends):
    one, _, files = ends
    files[2].close()
    with pytest.raises(PeerLost):
        one.send(Cancel(request_id="a", attempt=0))
