"""A node is put aside for failing several requests in a row, and comes back."""

import pytest

from tandem.router.node import Standing
from tandem.wire.errors import (
    Aborted,
    EngineFailed,
    InvalidRequest,
    KVCorrupted,
    NodeDraining,
    Overloaded,
    PeerLost,
    TransferFailed,
)


def fail(standing: Standing, now_s: float = 0.0, error=EngineFailed) -> bool:
    """Have a request begin and fail."""
    return standing.failed(error("a fault"), standing.num_failed, now_s)


def failing(times: int = 3, now_s: float = 0.0) -> Standing:
    standing = Standing()
    for _ in range(times):
        fail(standing, now_s)
    return standing


def test_a_node_that_fails_three_requests_in_a_row_is_put_aside_and_tried_again():
    standing = Standing()
    assert [fail(standing) for _ in range(3)] == [False, False, True]
    assert standing.is_aside(4.9)
    assert not standing.is_aside(5.0)


def test_a_node_that_serves_now_and_then_is_not_put_aside():
    standing = Standing()
    for _ in range(20):
        assert not fail(standing)
        assert not fail(standing)
        standing.served()


def test_requests_that_fail_in_one_step_count_once():
    standing = Standing()
    began_with = standing.num_failed
    assert not any(standing.failed(EngineFailed("a bug"), began_with, 0.0) for _ in range(100))
    assert standing.num_in_a_row == 1


def test_one_that_fails_again_is_put_aside_for_longer_up_to_a_minute():
    standing, now_s, pauses = failing(), 0.0, []
    for _ in range(6):
        pauses.append(standing.pause_s)
        now_s += standing.pause_s
        assert not standing.is_aside(now_s)
        assert fail(standing, now_s)
        assert standing.is_aside(now_s)
    assert pauses == [5, 10, 20, 40, 60, 60]


def test_a_request_that_ends_well_brings_a_node_back_at_once():
    standing = failing()
    standing.served()
    assert not standing.is_aside(0.0)
    assert [fail(standing) for _ in range(3)] == [False, False, True]
    assert standing.pause_s == 5


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        *[(TransferFailed, True), (KVCorrupted, True), (InvalidRequest, False)],
        *[(Overloaded, False), (NodeDraining, False), (PeerLost, False), (Aborted, False)],
    ],
)
def test_what_a_client_asked_or_a_link_lost_is_no_fault_of_the_node(error, is_fault):
    standing = Standing()
    assert any(fail(standing, error=error) for _ in range(3)) == is_fault
