"""A node is put aside for failing several requests in a row, and comes back."""

import pytest

from tandem.router.nodes.node import FailureCount, Node
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


def fail(failures: FailureCount, now_s: float = 0.0, error=EngineFailed) -> bool:
    """Have a request begin and fail."""
    return failures.record_failure(error("a fault"), failures.num_failed, now_s)


def failing(times: int = 3, now_s: float = 0.0) -> FailureCount:
    failures = FailureCount()
    for _ in range(times):
        fail(failures, now_s)
    return failures


def test_node_is_put_aside_for_five_seconds_after_three_consecutive_failures():
    failures = FailureCount()
    assert [fail(failures) for _ in range(3)] == [False, False, True]
    assert failures.is_aside(4.9)
    assert not failures.is_aside(5.0)


def test_success_resets_the_count_of_consecutive_failures():
    failures = FailureCount()
    for _ in range(20):
        assert not fail(failures)
        assert not fail(failures)
        failures.record_success()


def test_requests_that_fail_together_count_as_one_failure():
    failures = FailureCount()
    began_with = failures.num_failed
    assert not any(
        failures.record_failure(EngineFailed("a bug"), began_with, 0.0) for _ in range(100)
    )
    assert failures.num_in_a_row == 1


def test_pause_of_a_failing_node_doubles_up_to_a_minute():
    failures, now_s, pauses = failing(), 0.0, []
    for _ in range(6):
        pauses.append(failures.pause_s)
        now_s += failures.pause_s
        assert not failures.is_aside(now_s)
        assert fail(failures, now_s)
        assert failures.is_aside(now_s)
    assert pauses == [5, 10, 20, 40, 60, 60]


def test_success_brings_a_node_back_immediately():
    failures = failing()
    failures.record_success()
    assert not failures.is_aside(0.0)
    assert [fail(failures) for _ in range(3)] == [False, False, True]
    assert failures.pause_s == 5


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        *[(TransferFailed, True), (KVCorrupted, True), (InvalidRequest, False)],
        *[(Overloaded, False), (NodeDraining, False), (PeerLost, False), (Aborted, False)],
    ],
)
def test_client_errors_and_lost_links_are_not_node_faults(error, is_fault):
    failures = FailureCount()
    assert any(fail(failures, error=error) for _ in range(3)) == is_fault


async def test_count_of_a_node_that_failed_requests_rereads_all_of_it():
    changes = []
    node = Node(
        "http://d", "decode", on_change=lambda _node, only_counts: changes.append(only_counts)
    )
    node.count(1, 10)
    node.failures.num_in_a_row = 3
    node.count(-1, -10)
    assert changes == [True, False]
