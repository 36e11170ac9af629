"""Deadlines and phases of requests."""

import weakref

import pytest

from tandem.node.role import MAX_CHUNKS, Deadlines, Timeline
from tandem.wire.errors import DeadlinePassed
from tests.hand_off_rig import Pair, prompt_of
from tests.patience import Clock

# Tokens of a prompt. The rig's pool holds 480, so two prompts do not fit.
PROMPT, NEXT_PROMPT = prompt_of(300), prompt_of(290)[::-1]


class Item(str):
    """A name that can be weakly referenced."""


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def pair(tiny_model, clock):
    made = Pair(tiny_model("llama"), "shm")
    made.prefill._deadlines, made.decode._deadlines = Deadlines(clock), Deadlines(clock)
    yield made
    made.close()


def test_items_pass_once_in_deadline_order(clock):
    deadlines = Deadlines(clock)
    left_s = {Item("c"): 3.0, Item("a"): 1.0, Item("never"): None, Item("b"): 1.0}
    for item, seconds in left_s.items():
        deadlines.note(item, seconds)
    assert list(deadlines.passed()) == []
    clock.now_s += 2
    assert list(deadlines.passed()) == ["a", "b"]
    clock.now_s += 2
    assert list(deadlines.passed()) == ["c"]


def test_finished_request_is_released_before_its_deadline(pair):
    """A quickly answered request with a deadline of 10 minutes does not hold memory until then."""
    pair.start("a", PROMPT, max_new_tokens=3, deadline_s=600.0)
    halves = [
        weakref.ref(role._by_ticket[pair.ticket("a")]) for role in (pair.prefill, pair.decode)
    ]
    pair.run_until(lambda: pair.decode_answers.finishes["a"] == ["length"])
    pair.run_until(pair.all_pages_are_back)
    assert [half() for half in halves] == [None, None]


def test_decode_does_not_start_expired_requests(pair, clock):
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
    # Only the edge worker ends a started request.
    pair.run_until(lambda: pair.decode_answers.finishes["a"] == ["length"])
    pair.run_until(pair.all_pages_are_back)


def test_prefill_does_not_start_expired_requests(pair, clock):
    pair.start("a", PROMPT, max_new_tokens=20)
    pair.start("b", NEXT_PROMPT, max_new_tokens=20, deadline_s=5.0)
    clock.now_s += 5.0
    pair.run_until(lambda: pair.prefill_answers.errors)
    assert isinstance(pair.prefill_answers.errors["b"], DeadlinePassed)
    pair.decode.cancel(pair.ticket("b"))
    pair.run_until(lambda: pair.decode_answers.finishes["a"] == ["length"])
    pair.run_until(pair.all_pages_are_back)


def test_prompt_being_computed_is_not_dropped_at_its_deadline(pair, clock):
    pair.start("a", PROMPT, max_new_tokens=3, deadline_s=5.0)
    pair.run_until(lambda: pair.prefill_engine.num_prompt_tokens > 0)
    clock.now_s += 5.0
    pair.run_until(lambda: pair.decode_answers.finishes["a"] == ["length"])
    assert not pair.prefill_answers.errors
    pair.run_until(pair.all_pages_are_back)


# ── phases ───────────────────────────────────────────────────────────────────────────────────────


def shown(timeline):
    return [(each.name, each.start_s, each.duration_s) for each in timeline.take()]


def test_phases_of_a_prompt_have_no_gaps(clock):
    timeline = Timeline(clock)
    clock.now_s = 101.0
    timeline.end("reserve")
    clock.now_s = 104.0  # after two steps of other requests
    timeline.add_chunk(began=103.0)
    clock.now_s = 105.0
    timeline.add_chunk(began=104.0)
    timeline.end("prefill")
    assert shown(timeline) == [
        ("reserve", 0.0, 1.0),
        ("prefill_queue", 1.0, 2.0),
        ("prefill", 3.0, 2.0),
        ("prefill_chunk", 3.0, 1.0),
        ("prefill_chunk", 4.0, 1.0),
    ]


def test_step_started_before_the_grant_counts_from_the_grant(clock):
    timeline = Timeline(clock)
    clock.now_s = 102.0
    timeline.end("reserve")
    clock.now_s = 103.0
    timeline.add_chunk(began=101.0)
    assert [each[1:] for each in shown(timeline)] == [(0.0, 2.0), (2.0, 0.0), (2.0, 1.0)]


def test_recomputed_prompt_has_no_second_queue_phase(clock):
    timeline = Timeline(clock)
    clock.now_s = 102.0
    timeline.add_chunk(began=101.0)
    timeline.end("prefill")
    timeline.take()
    clock.now_s = 110.0  # retracted in the meantime
    timeline.add_chunk(began=109.0)
    assert shown(timeline) == [("prefill_chunk", 9.0, 1.0)]


def test_chunk_phases_are_bounded_and_cover_the_whole_time(clock):
    timeline = Timeline(clock)
    for _ in range(3 * MAX_CHUNKS):
        clock.now_s += 1
        timeline.add_chunk(began=clock.now_s - 1)
    chunks = [each for each in timeline.take() if each.name == "prefill_chunk"]
    assert len(chunks) == MAX_CHUNKS
    assert sum(each.duration_s for each in chunks) == 3 * MAX_CHUNKS
