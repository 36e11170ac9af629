import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.serving.progress import Progress, RequestTimeline
from tandem.wire.errors import PeerLost
from tandem.wire.generation import LogprobOptions, Phase
from tandem.wire.messages import StartColocated
from tests.patience import Clock
from tests.receivers import Receiver
from tests.router.fake_node import delta, logprobs, request

START = StartColocated(request=request())


def progress_of(generate_request, **fields) -> Progress:
    return Progress(generate_request, Receiver(), **fields)


def accept(progress, index, token_ids, reason=None, **fields):
    return progress.accept(delta(START, index, token_ids, reason, **fields))


def test_token_gap_raises_peer_lost_so_that_a_replay_fills_it():
    progress = progress_of(request())
    with pytest.raises(PeerLost, match="tokens 0 to 1 never arrived"):
        accept(progress, 2, [7])
    assert progress.next_index == 0


def test_finish_without_new_tokens_ends_the_request():
    progress = progress_of(request())
    accept(progress, 0, [5])
    assert accept(progress, 1, [], "stop").finish.reason == "stop"
    assert progress.is_finished
    assert accept(progress, 1, [6]) is None


def test_hand_off_finish_does_not_end_the_request():
    progress = progress_of(request())
    new = accept(progress, 0, [5], "handed_off")
    assert (new.token_ids, new.finish) == ([5], None)
    assert accept(progress, 1, [], "handed_off") is None
    assert not progress.is_finished


def test_late_finish_below_the_next_index_is_dropped():
    progress = progress_of(request())
    accept(progress, 0, [5, 6, 7])
    assert accept(progress, 1, [], "stop") is None
    assert not progress.is_finished


def test_abort_ends_the_request_at_any_index():
    progress = progress_of(request())
    accept(progress, 0, [5])
    new = accept(progress, 0, [], "abort")
    assert (new.index, new.finish.reason) == (1, "abort")
    assert progress.is_finished


def test_replay_prompt_includes_sent_tokens_and_the_index_continues():
    progress = progress_of(request(prompt_ids=[1, 2], group="g"))
    assert progress.remaining().group == "g"
    accept(progress, 0, [5, 6])
    remaining = progress.remaining()
    assert remaining.group == "", "with sent tokens it is no prompt of the group"
    assert remaining.prompt_ids == [1, 2, 5, 6]
    assert remaining.num_prior_tokens == 2
    assert remaining.session == ""
    assert remaining.sampling == request().sampling
    assert accept(progress, 2, [7]).index == 2


def test_request_with_prior_tokens_starts_at_their_count():
    progress = progress_of(request(prompt_ids=[1, 5, 6], num_prior_tokens=2))
    assert progress.next_index == 2
    assert accept(progress, 2, [7]).index == 2
    assert progress.remaining().num_prior_tokens == 3
    assert progress.remaining().prompt_ids == [1, 5, 6, 7]


def test_cached_tokens_are_taken_from_the_first_delta():
    progress = progress_of(request())
    first = accept(progress, 0, [5], cached_tokens=2, cached_by_tier={"host": 1})
    assert (first.cached_tokens, first.cached_by_tier) == (2, {"host": 1})
    second = accept(progress, 1, [6], cached_tokens=4, cached_by_tier={"host": 3})
    assert (second.cached_tokens, second.cached_by_tier) == (0, {})


def prompt_run(progress, first, end, **fields):
    return accept(
        progress, 0, [], prompt_index=first, prompt_logprobs=logprobs(first, end), **fields
    )


def wanting(start, num_tokens=6, **fields):
    wanted = LogprobOptions(num_top=1, prompt_start=start)
    return request(prompt_ids=range(num_tokens), logprobs=wanted, **fields)


def test_logprobs_of_duplicate_tokens_are_dropped_with_the_tokens():
    progress = progress_of(wanting(-1))
    accept(progress, 0, [5], logprobs=logprobs(0, 1))
    new = accept(progress, 0, [5, 6, 7], logprobs=logprobs(0, 3))
    assert (new.token_ids, new.logprobs) == ([6, 7], logprobs(1, 3))


def test_prompt_logprobs_are_returned_once_without_tokens():
    progress = progress_of(wanting(1))
    assert prompt_run(progress, 1, 3).prompt_logprobs == logprobs(1, 3)
    assert prompt_run(progress, 1, 3) is None
    new = prompt_run(progress, 2, 5)
    assert (new.prompt_index, new.prompt_logprobs) == (3, logprobs(3, 5))
    assert progress.awaits_prompt_logprobs
    prompt_run(progress, 5, 6)
    assert not progress.awaits_prompt_logprobs


def test_unrequested_prompt_logprobs_are_dropped():
    assert prompt_run(progress_of(request()), 0, 3) is None
    assert prompt_run(progress_of(wanting(-1)), 0, 3) is None


def test_prompt_logprob_gap_raises_peer_lost_so_that_a_replay_fills_it():
    progress = progress_of(wanting(0))
    with pytest.raises(PeerLost, match="positions 0 to 1 never arrived"):
        prompt_run(progress, 2, 4)
    assert progress.remaining().logprobs.prompt_start == 0


def test_replay_requests_only_missing_prompt_positions():
    progress = progress_of(wanting(1, group="g"))
    prompt_run(progress, 1, 4)
    assert progress.remaining() == wanting(4, group="g")
    prompt_run(progress, 4, 6)
    assert progress.remaining() == wanting(-1, group="g")


def test_sent_tokens_get_no_prompt_logprobs():
    progress = progress_of(wanting(0))
    accept(progress, 0, [9], logprobs=logprobs(6, 7))
    assert progress.remaining().logprobs.prompt_start == 0
    new = accept(progress, 1, [], prompt_logprobs=logprobs(0, 7))
    assert new.prompt_logprobs == logprobs(0, 6)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30), st.integers(0, 9))
def test_overlapping_prompt_logprob_runs_return_each_position_once(windows, start):
    progress = progress_of(wanting(start, num_tokens=10))
    told = []
    for first, size in [*windows, (start, 10)]:
        try:
            new = prompt_run(progress, first, first + size)
        except PeerLost:
            continue
        if new is not None:
            assert new.prompt_index == start + len(told)
            told += new.prompt_logprobs
    assert told == logprobs(start, 10)


@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=60),
    st.integers(0, 3),
)
def test_overlapping_deltas_return_each_token_once_and_in_order(num_tokens, windows, num_prior):
    progress = progress_of(request(num_prior_tokens=num_prior))
    tokens = list(range(100, 100 + num_tokens))
    given_tokens = []
    for first, size in [*windows, (0, num_tokens)]:
        part = tokens[first : first + size]
        try:
            new = accept(progress, num_prior + first, part)
        except PeerLost:
            continue  # a gap: nothing of it was taken
        if new is not None:
            assert new.index == num_prior + len(given_tokens)
            given_tokens += new.token_ids
    assert given_tokens == tokens == progress.sent_ids


def test_each_attempt_gets_the_remaining_deadline_until_the_first_token():
    clock = Clock(100.0)
    progress = progress_of(request(deadline_s=5.0), clock=clock)
    seen = []
    for clock.now_s in (100.0, 102.0, 109.0):
        seen.append(progress.remaining().deadline_s)
    assert seen == [5.0, 3.0, 0.0]
    accept(progress, 0, [7])
    assert progress.remaining().deadline_s is None


def timeline_at(clock, *ends):
    timeline = RequestTimeline(clock)
    for name, at in ends:
        clock.now_s = 10.0 + at
        timeline.end(name, "d" if name == "pair" else "")
    return timeline


def test_lost_attempt_is_reported_as_one_phase():
    clock = Clock(10.0)
    timeline = timeline_at(clock, ("queue", 1.0), ("pair", 2.0))
    timeline.add([Phase("reserve", 0.0, 0.5)], "p")
    clock.now_s = 15.0
    timeline.lose_attempt()
    clock.now_s = 15.5
    timeline.end("pair", "d2")
    timeline.add([Phase("reserve", 0.0, 0.25)], "p2")
    assert [(each.name, each.start_s, each.duration_s) for each in timeline.take()] == [
        ("queue", 0.0, 1.0),
        ("pair", 1.0, 1.0),
        ("lost_attempt", 2.0, 3.0),
        ("pair", 5.0, 0.5),
        ("reserve", 5.5, 0.25),
    ]
    assert timeline.take() == []
