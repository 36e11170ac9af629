"""The clocks of requests: their deadlines, at nodes that have no pages for them yet, and their phases."""

import weakref

import pytest

from tandem.node.role import MAX_CHUNKS, Deadlines, Timeline
from tandem.wire.errors import DeadlinePassed
from tests.hand_off_rig import Pair, prompt_of
from tests.patience import Clock

# Of the 480 tokens that a pool of the rig holds: two do not fit.
PROMPT, NEXT_PROMPT = prompt_of(300), prompt_of(290)[::-1]


class Item(str):
    """A name that can be let go of."""


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def pair(tiny_model, clock):
    made = Pair(tiny_model("llama"), "shm")
    made.prefill._deadlines, made.decode._deadlines = Deadlines(clock), Deadlines(clock)
    yield made
    made.close()


def test_items_pass_in_the_order_of_their_deadlines_and_once(clock):
    deadlines = Deadlines(clock)
    left_s = {Item("c"): 3.0, Item("a"): 1.0, Item("never"): None, Item("b"): 1.0}
    for item, seconds in left_s.items():
        deadlines.note(item, seconds)
    assert list(deadlines.passed()) == []
    clock.now_s += 2
    assert list(deadlines.passed()) == ["a", "b"]
    clock.now_s += 2
    assert list(deadlines.passed()) == ["c"]


def test_what_has_ended_is_not_kept_until_its_client_would_have_stopped_waiting(pair):
    """A client that waits for 10 minutes, and is answered in a moment, costs no memory meanwhile."""
    pair.start("a", PROMPT, max_new_tokens=3, deadline_s=600.0)
    halves = [
        weakref.ref(role._by_ticket[pair.ticket("a")]) for role in (pair.prefill, pair.decode)
    ]
    pair.run_until(lambda: pair.decode_answers.finishes["a"] == ["length"])
    pair.run_until(pair.all_pages_are_back)
    assert [half() for half in halves] == [None, None]


def test_a_decode_does_not_start_what_nobody_waits_for(pair, clock):
    pair.start("a", PROMPT, max_new_tokens=20, deadline_s=5.0)
    pair.start("b", NEXT_PROMPT, max_new_tokens=20, deadline_s=5.0)
    pair.run_until(lambda: pair.decode.load().num_running == 1)
    assert pair.decode.load().num_waiting == 1
    clock.now_s += 5.0
    pair.run_until(lambda: pair.decode_answers.errors)
    error = pair.decode_answers.errors["b"]
    assert isinstance(error, DeadlinePassed)
    assert (error.status, error.is_retryable) == (504, False)
    assert pair.decode.load().num_waiting == 0
    pair.prefill.cancel(pair.ticket("b"))
    # What was started is the edge's to end.
    pair.run_until(lambda: pair.decode_answers.finishes["a"] == ["length"])
    pair.run_until(pair.all_pages_are_back)


def test_a_prefill_does_not_start_what_nobody_waits_for(pair, clock):
    pair.start("a", PROMPT, max_new_tokens=20)
    pair.start("b", NEXT_PROMPT, max_new_tokens=20, deadline_s=5.0)
    clock.now_s += 5.0
    pair.run_until(lambda: pair.prefill_answers.errors)
    assert isinstance(pair.prefill_answers.errors["b"], DeadlinePassed)
    pair.decode.cancel(pair.ticket("b"))
    pair.run_until(lambda: pair.decode_answers.finishes["a"] == ["length"])
    pair.run_until(pair.all_pages_are_back)


def test_a_prompt_that_is_being_computed_is_not_dropped(pair, clock):
    pair.start("a", PROMPT, max_new_tokens=3, deadline_s=5.0)
    pair.run_until(lambda: pair.prefill_engine.num_prompt_tokens > 0)
    clock.now_s += 5.0
    pair.run_until(lambda: pair.decode_answers.finishes["a"] == ["length"])
    assert not pair.prefill_answers.errors
    pair.run_until(pair.all_pages_are_back)


# ── phases ───────────────────────────────────────────────────────────────────────────────────────


def shown(timeline):
    return [(each.name, each.start_s, each.duration_s) for each in timeline.take()]


def test_phases_of_a_prompt_follow_each_other_without_a_gap(clock):
    timeline = Timeline(clock)
    clock.now_s = 101.0
    timeline.end("reserve")
    clock.now_s = 104.0  # two steps of others pass first
    timeline.computed(began=103.0)
    clock.now_s = 105.0
    timeline.computed(began=104.0)
    timeline.end("prefill")
    assert shown(timeline) == [
        ("reserve", 0.0, 1.0),
        ("prefill_queue", 1.0, 2.0),
        ("prefill", 3.0, 2.0),
        ("prefill_chunk", 3.0, 1.0),
        ("prefill_chunk", 4.0, 1.0),
    ]


def test_a_step_that_began_before_the_grant_counts_from_the_grant(clock):
    timeline = Timeline(clock)
    clock.now_s = 102.0
    timeline.end("reserve")
    clock.now_s = 103.0
    timeline.computed(began=101.0)
    assert [each[1:] for each in shown(timeline)] == [(0.0, 2.0), (2.0, 0.0), (2.0, 1.0)]


def test_a_prompt_computed_again_after_its_first_token_waited_for_nothing(clock):
    timeline = Timeline(clock)
    clock.now_s = 102.0
    timeline.computed(began=101.0)
    timeline.end("prefill")
    timeline.take()
    clock.now_s = 110.0  # retracted meanwhile
    timeline.computed(began=109.0)
    assert shown(timeline) == [("prefill_chunk", 9.0, 1.0)]


def test_the_chunks_of_a_long_prompt_are_bounded_and_lose_no_time(clock):
    timeline = Timeline(clock)
    for _ in range(3 * MAX_CHUNKS):
        clock.now_s += 1
        timeline.computed(began=clock.now_s - 1)
    chunks = [each for each in timeline.take() if each.name == "prefill_chunk"]
    assert len(chunks) == MAX_CHUNKS
    assert sum(each.duration_s for each in chunks) == 3 * MAX_CHUNKS
