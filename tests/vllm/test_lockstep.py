"""Data-parallel ranks in threads, whose collectives fail if the ranks do not call the same one."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.vllm.node.lockstep import Lockstep

INTERVAL = 4


class Collectives:
    """What the ranks of a group call together: sums and forwards."""

    def __init__(self, num_ranks):
        self._calls, self._turn = [None] * num_ranks, threading.Barrier(num_ranks, timeout=10)

    def call(self, rank, kind, values=()):
        """Return the sums of `values`; fail unless every rank calls the same kind."""
        self._calls[rank] = kind, values
        self._turn.wait()
        kinds, rows = zip(*self._calls, strict=True)
        self._turn.wait()
        assert len(set(kinds)) == 1, kinds
        return [sum(column) for column in zip(*rows, strict=True)]


class Rank:
    """One rank. `work`: passes of its loop at which it has requests."""

    def __init__(self, number, collectives, num_ranks, work):
        self._call = lambda *what: collectives.call(number, *what)
        self.lockstep = Lockstep(lambda values: self._call("sum", values), num_ranks, INTERVAL)
        self.work, self.num_forwards, self.num_passes = work, 0, 0

    def run_pass(self):
        """Run a pass as the node does. Return whether the group runs after it."""
        has_requests = self.num_passes in self.work
        self.num_passes += 1
        self.lockstep.meet(has_requests=has_requests)
        if self.lockstep.is_running:
            self._call("forward")
            self.num_forwards += 1
            self.lockstep.on_step(has_requests=has_requests)
        return self.lockstep.is_running


def run(*works, num_passes=40, then=lambda rank: None):
    """Run ranks with the given work, each in a thread; return them."""
    collectives = Collectives(len(works))
    ranks = [Rank(i, collectives, len(works), set(work)) for i, work in enumerate(works)]

    def loop(rank):
        for _ in range(num_passes):
            rank.run_pass()
        then(rank)
        return rank

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(loop, ranks))


def test_idle_group_runs_no_forward():
    assert [rank.num_forwards for rank in run((), (), ())] == [0, 0, 0]


def test_request_of_one_rank_runs_all_ranks():
    first, second = run((), range(5, 12))
    # The group stops at the first sum after the last request.
    assert first.num_forwards == second.num_forwards == 8
    assert not first.lockstep.is_running


def test_request_of_an_idle_group_runs_in_the_same_pass():
    ranks = run((), [7], num_passes=8)
    assert [rank.num_forwards for rank in ranks] == [1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_ranks_never_wait_in_different_collectives(seed):
    rng = random.Random(seed)
    works = [[each for each in range(200) if rng.random() < 0.1] for _ in range(3)]
    ranks = run(*works, num_passes=200)
    assert len({rank.num_forwards for rank in ranks}) == 1
    assert ranks[0].num_forwards < 200


def test_rank_leaves_only_when_all_ranks_leave():
    def leave(rank):
        is_first = 39 not in rank.work
        rank.lockstep.is_leaving = is_first
        while rank.run_pass():  # the first rank leaves while the other has requests
            assert not rank.lockstep.can_leave
        assert not rank.lockstep.can_leave
        rank.lockstep.is_leaving = True
        rank.run_pass()

    assert all(rank.lockstep.can_leave for rank in run((), range(45), then=leave))
