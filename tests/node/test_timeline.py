import pytest

from tandem.node.timeline import MAX_CHUNKS, Timeline


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def shown(timeline):
    return [(each.name, each.start_s, each.duration_s) for each in timeline.take()]


def test_phases_of_a_prompt_follow_each_other_without_a_gap(clock):
    timeline = Timeline(clock)
    clock.now = 101.0
    timeline.end("reserve")
    clock.now = 104.0  # two steps of others pass first
    timeline.computed(began=103.0)
    clock.now = 105.0
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
    clock.now = 102.0
    timeline.end("reserve")
    clock.now = 103.0
    timeline.computed(began=101.0)
    assert [each[1:] for each in shown(timeline)] == [(0.0, 2.0), (2.0, 0.0), (2.0, 1.0)]


def test_what_was_told_is_not_told_again(clock):
    timeline = Timeline(clock)
    timeline.end("reserve")
    timeline.take()
    clock.now = 102.0
    timeline.beside("push", 0.5)
    assert shown(timeline) == [("push", 0.5, 1.5)]
    assert shown(timeline) == []


def test_a_prompt_computed_again_after_its_first_token_waited_for_nothing(clock):
    timeline = Timeline(clock)
    clock.now = 102.0
    timeline.computed(began=101.0)
    timeline.end("prefill")
    timeline.take()
    clock.now = 110.0  # retracted meanwhile
    timeline.computed(began=109.0)
    assert shown(timeline) == [("prefill_chunk", 9.0, 1.0)]


def test_the_chunks_of_a_long_prompt_are_bounded_and_lose_no_time(clock):
    timeline = Timeline(clock)
    for _ in range(3 * MAX_CHUNKS):
        clock.now += 1
        timeline.computed(began=clock.now - 1)
    chunks = [each for each in timeline.take() if each.name == "prefill_chunk"]
    assert len(chunks) == MAX_CHUNKS
    assert sum(each.duration_s for each in chunks) == 3 * MAX_CHUNKS
