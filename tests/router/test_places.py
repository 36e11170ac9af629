import random
from collections import deque

import pytest
from msgspec.structs import replace

from tandem.router.admission import INITIAL_PREFILL_QUEUE, Capacity, FinishRate, Places
from tandem.router.nodes.state import RosterEntry
from tandem.wire.messages import NodeLoad


def node(role="decode", *, own=0, own_tokens=0, **load) -> RosterEntry:
    return RosterEntry(
        url="u",
        role=role,
        is_up=True,
        load=NodeLoad(**load),
        in_flight_requests=own,
        in_flight_tokens=own_tokens,
    )


def at_decode(own=0, own_tokens=0, max_in_flight=0, **load):
    return Capacity(max_in_flight).at_decode(node(own=own, own_tokens=own_tokens, **load))


def test_decode_room_is_its_batch_limit_minus_running_requests():
    assert at_decode(max_running=16) == 16
    assert at_decode(max_running=16, own=5) == 11
    assert at_decode(max_running=16, num_running=10, num_edges=1, num_own=10, own=10) == 6
    # Of another's ten, and three of our own that the report does not know yet.
    assert at_decode(max_running=20, num_running=10, num_edges=1, num_own=0, own=3) >= 2


def test_max_in_flight_applies_when_below_the_node_limit():
    assert at_decode(max_running=16, max_in_flight=4) == 4
    assert at_decode(max_running=16, max_in_flight=40) == 16


def test_requests_finished_since_the_report_free_room_immediately():
    told = {"max_running": 16, "num_running": 16, "num_edges": 1, "num_own": 16}
    assert at_decode(own=16, **told) == 0
    assert at_decode(own=13, **told) == 3


def test_decode_room_is_limited_by_free_pages():
    pages = {"page_size": 16, "num_pages": 100, "max_running": 64}
    assert at_decode(pages_free=1, num_running=8, num_edges=1, num_own=8, own=8, **pages) == 56
    assert at_decode(pages_free=0, num_running=8, num_edges=1, **pages) == 0
    assert at_decode(pages_free=60, num_running=8, num_waiting=2, num_edges=1, **pages) == 0


def num_started(places: Places, *lengths: int) -> int:
    """Return how many prompts of these lengths start, in order, before the places are used up."""
    for number, length in enumerate(lengths):
        if not places:
            return number
        places = places.without(1, length)
    return len(lengths)


def test_prompts_start_while_pages_are_free_for_their_own_lengths():
    decode = node(page_size=16, num_pages=100, pages_free=20, max_running=64)
    partner = node("prefill")
    places = Capacity().count([partner], [decode], 0.0)
    assert places.num_requests == INITIAL_PREFILL_QUEUE
    assert num_started(places, *[8] * 9) == 8
    assert num_started(places, *[64] * 9) == 4  # 20 pages for 5 each
    assert num_started(places, 300, 8, 8) == 1
    assert num_started(places, 5000, 8) == 1  # the node rejects it, or lets it wait


def test_long_request_on_a_decode_does_not_block_short_ones():
    busy = node(
        own=1, own_tokens=12_800, num_own=1, num_running=1, num_edges=1,
        page_size=16, num_pages=1000, pages_free=150, pages_held=850, max_running=64,
    )  # fmt: skip
    places = Capacity().count([node("prefill")], [busy], 0.0)
    assert num_started(places, *[64] * 9) == 8


def test_full_decode_adds_no_room_to_that_of_others():
    pages = {"page_size": 16, "num_pages": 100, "max_running": 64}
    full, empty = node(pages_free=0, **pages), node(pages_free=10, **pages)
    empty = replace(empty, url="other")
    assert not Capacity().count([node("prefill")], [full], 0.0)
    assert Capacity().count([node("prefill")], [full, empty], 0.0).num_tokens == 160


def test_decode_replacing_prefill_is_counted_once():
    busy = node(own=10, num_running=10, num_own=10, num_edges=1, max_running=64)
    assert Capacity().count([busy], [busy], 0.0).num_requests == 54


def test_prefill_room_is_half_a_second_of_its_finish_rate():
    places, ended = Capacity(), 0
    assert places.at_prefill(node("prefill"), 0.0) == INITIAL_PREFILL_QUEUE
    for step in range(1, 40):
        ended += 20  # in 0.2 s
        busy = node("prefill", generated_tokens=ended, num_running=8, num_edges=1, num_own=8, own=8)
        free = places.at_prefill(busy, 0.2 * step)
    assert free + 8 == pytest.approx(50, abs=2)


def test_finish_rate_restarts_when_the_node_restarts():
    pace = FinishRate()
    pace.observe(5000, 0.0, is_busy=True)
    pace.observe(10, 1.0, is_busy=True)
    pace.observe(60, 2.0, is_busy=True)
    assert pace.per_s == 50


class Worker:
    """An edge worker that always has more to start."""

    def __init__(self, starts_at=0.0, num_workers=1) -> None:
        self.places = Capacity(num_workers=num_workers)
        self.starts_at, self.own, self.load = starts_at, 0, NodeLoad(max_running=SLOTS)

    def start(self, now) -> int:
        if now < self.starts_at:
            return 0
        seen = RosterEntry(
            url="u", role="decode", is_up=True, load=self.load, in_flight_requests=self.own
        )
        count = max(0, self.places.at_decode(seen))
        self.own += count
        return count


SLOTS, STEP_S, REPORTS_S = 32, 0.01, 0.2


def run_workers(workers, seconds, seed=0):
    """Run a decode node with slots and a line; yield its line and running once a report."""
    rng = random.Random(seed)
    line, running = deque(), []
    for step in range(int(seconds / STEP_S)):
        now = step * STEP_S
        for worker in rng.sample(workers, len(workers)):
            line += [worker] * worker.start(now)
        for ends_at, worker in running:
            if ends_at <= now:
                worker.own -= 1
        running = [each for each in running if each[0] > now]
        while line and len(running) < SLOTS:
            running.append((now + rng.uniform(0.5, 1.5), line.popleft()))
        if step % int(REPORTS_S / STEP_S) == 0:
            there = [*line, *(worker for _, worker in running)]
            for worker in workers:
                worker.load = NodeLoad(
                    max_running=SLOTS,
                    num_running=len(running),
                    num_waiting=len(line),
                    num_edges=len(set(there)),
                    num_own=there.count(worker),
                )
            yield now, len(line), len(running)


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_edge_workers_sharing_a_node_keep_it_busy_with_a_short_queue(num_workers):
    workers = [Worker(num_workers=num_workers) for _ in range(num_workers)]
    settled = [(line, running) for now, line, running in run_workers(workers, 30.0) if now > 5]
    assert sum(running for _, running in settled) / len(settled) > 0.93 * SLOTS
    assert max(line for line, _ in settled) <= SLOTS // 4
    assert max(worker.own for worker in workers) <= 2 * SLOTS / num_workers


def test_late_edge_worker_gets_its_share_of_a_node():
    early, late = Worker(), Worker(starts_at=5.0)
    shares = [(early.own, late.own) for now, *_ in run_workers([early, late], 15.0) if now > 10]
    assert min(late for _, late in shares) >= 0.35 * SLOTS
    assert min(early for early, _ in shares) >= 0.35 * SLOTS


def test_single_busy_edge_worker_uses_the_whole_node():
    busy = Worker(num_workers=8)
    idle = [Worker(starts_at=1e9) for _ in range(7)]
    runs = [running for now, _, running in run_workers([busy, *idle], 10.0) if now > 2]
    assert sum(runs) / len(runs) > 0.93 * SLOTS
