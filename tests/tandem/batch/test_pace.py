"""The controller against models of servers that have a capacity; a turn is a look."""

import statistics
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.batch.pace import STANDING_LOOKS, START, Pace


@dataclass
class Model:
    """Serves `capacity` requests at once, each for some turns; the others wait in a line.

    `others` of the places are taken by somebody else, of whom `others_line` wait as well.
    """

    capacity: int
    turns: int
    others: int = 0
    others_line: int = 0
    running: list[int] = field(default_factory=list)
    line: int = 0
    done: int = 0
    busy: int = 0

    def turn(self, limit: int) -> tuple[int, int, int]:
        """Fill up to the limit, serve one turn; return in flight, peak and what waits."""
        self.running = [left - 1 for left in self.running]
        ended = self.running.count(0)
        self.done += ended
        self.running = [left for left in self.running if left]
        self.line += max(0, limit - len(self.running) - self.line)
        places = max(0, self.capacity - self.others - len(self.running))
        # Not all begin at once: they would for ever end at once.
        begin = min(places, self.line)
        self.running += [1 + (self.done + i) % (2 * self.turns - 1) for i in range(begin)]
        self.line -= begin
        self.busy += len(self.running)
        in_flight = len(self.running) + self.line
        return in_flight, in_flight, self.line + self.others_line


def run(pace: Pace, model: Model, num_turns: int) -> list[int]:
    """Let the pace follow the model; return what waited at each turn."""
    queues = []
    for _ in range(num_turns):
        in_flight, peak, queued = model.turn(pace.limit)
        pace.look(in_flight, peak, queued)
        queues.append(queued)
    return queues


def throughput(pace: Pace, model: Model, num_turns: int) -> float:
    """Return the share of what the model can do that it did."""
    before = model.busy
    run(pace, model, num_turns)
    return (model.busy - before) / (num_turns * model.capacity)


EVENTS = st.one_of(
    st.tuples(st.just("look"), st.integers(0, 500), st.none() | st.integers(0, 5000)),
    st.tuples(st.just("answer"), st.floats(1e-6, 1e3)),
    st.tuples(st.just("refuse"), st.integers(0, 500)),
    st.tuples(st.just("lose")),
)


@given(st.integers(1, 300), st.integers(1, 300), st.lists(EVENTS, max_size=100))
def test_whatever_happens_the_limit_stays_within_its_bounds(least, most, events):
    pace = Pace(least, most)
    for name, *values in events:
        match name:
            case "look":
                pace.look(min(values[0], pace.limit), pace.limit, values[1])
            case "answer":
                pace.answer(*values)
            case "refuse":
                pace.refuse(*values)
            case _:
                pace.lose()
        assert min(least, most) <= pace.limit <= most


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), st.integers(1, 12))
def test_it_finds_the_capacity_and_keeps_the_line_short(capacity, turns):
    pace, model = Pace(1, 1024), Model(capacity, turns)
    run(pace, model, 400)
    assert throughput(pace, model, 400) >= 0.9
    assert statistics.mean(run(pace, model, 400)) <= max(2, capacity / 10)
    assert capacity * 0.9 <= pace.limit <= capacity * 1.1 + 4


@settings(deadline=None, max_examples=25)
@given(st.integers(8, 120), st.integers(1, 8), st.sampled_from(["refuse", "lose", "shrink"]))
def test_it_recovers_from_whatever_made_it_small(capacity, turns, what):
    pace, model = Pace(1, 1024), Model(capacity, turns)
    run(pace, model, 300)
    if what == "shrink":
        model.capacity = max(1, capacity // 4)
        run(pace, model, 400)
        assert pace.limit <= model.capacity * 1.1 + 4
        model.capacity = capacity
    else:
        for _ in range(3):
            pace.refuse(pace.limit) if what == "refuse" else pace.lose()
            pace.look(1, 1, 0)
        assert pace.limit < capacity
    run(pace, model, 400)
    assert throughput(pace, model, 300) >= 0.9


def test_the_first_look_finds_few_requests_and_a_quiet_server_gets_more_by_doubling():
    pace, model = Pace(1, 1024), Model(10_000, 4)
    limits = {START}
    for _ in range(40):
        run(pace, model, 1)
        limits.add(pace.limit)
    assert limits == {8, 16, 32, 64, 128, 256, 512, 1024}


def test_a_line_that_comes_and_goes_costs_nothing():
    pace = Pace(1, 1024)
    for queued in [5, 3, 0, 7, 4, 0] * 20:
        pace.look(pace.limit, pace.limit, queued)
    assert pace.limit >= START


def test_a_line_that_stands_costs_half_as_many_places_as_waited_at_least():
    pace = Pace(1, 1024)
    for queued in [6, 3, 9, 4][:STANDING_LOOKS]:
        pace.look(8, 8, queued)
    assert pace.limit == 8 - 2
    pace.look(8, 8, 3)
    assert pace.limit == 6, "what was asked for less shows only after a while"


def test_it_makes_way_for_others_down_to_the_least():
    pace, model = Pace(2, 1024), Model(30, 3)
    run(pace, model, 200)
    model.others, model.others_line = 25, 6
    run(pace, model, 200)
    assert pace.limit == 2
    model.others = model.others_line = 0
    run(pace, model, 300)
    assert pace.limit >= 27


def test_who_does_not_use_its_places_gets_no_more():
    pace = Pace(1, 1024)
    for _ in range(50):
        pace.look(3, 3, 0)
    assert pace.limit == START


def test_refusals_between_two_looks_are_one():
    pace = Pace(1, 1024)
    for _ in range(10):
        pace.refuse(8)
    assert pace.limit == 4
    pace.look(4, 4, 0)
    pace.refuse(4)
    assert pace.limit == 2


@pytest.mark.parametrize("capacity", [1, 5, 40, 300])
def test_a_server_that_does_not_tell_its_line_is_judged_by_the_time_of_tokens(capacity):
    pace = Pace(1, 1024)
    limits = []
    for _ in range(3000):
        # Throughput is bounded: with twice as many requests each token takes twice as long.
        for _ in range(max(1, min(pace.limit, capacity))):
            pace.answer(0.01 * max(1.0, pace.limit / capacity))
        pace.look(pace.limit, pace.limit, None)
        limits.append(pace.limit)
    assert capacity * 0.9 <= statistics.mean(limits[-500:]) <= max(START, capacity * 2.5)
    assert max(limits[-500:]) <= max(START, 4 * capacity)
