import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.attempt import Progress
from tests.router.fake_node import delta, request
from wire.errors import PeerLost
from wire.messages import StartColocated

START = StartColocated(request=request())


def accept(progress, index, token_ids, reason=None, **fields):
    return progress.accept(delta(START, index, token_ids, reason, **fields))


def test_the_first_copy_of_an_index_is_taken_and_any_other_dropped():
    progress = Progress(request())
    assert accept(progress, 0, [5]).token_ids == [5]  # from prefill
    assert accept(progress, 0, [5]) is None  # decode's copy
    assert accept(progress, 1, [6]).token_ids == [6]
    assert progress.sent_ids == [5, 6]


def test_of_a_delta_that_overlaps_only_the_new_part_is_given():
    progress = Progress(request())
    accept(progress, 0, [5])
    new = accept(progress, 0, [5, 6, 7])
    assert (new.index, new.token_ids) == (1, [6, 7])


def test_a_gap_is_an_error_that_a_replay_can_mend():
    progress = Progress(request())
    with pytest.raises(PeerLost, match="tokens 0 to 1 never arrived"):
        accept(progress, 2, [7])
    assert progress.next_index == 0


def test_a_finish_ends_the_request_even_without_new_tokens():
    progress = Progress(request())
    accept(progress, 0, [5])
    assert accept(progress, 1, [], "stop").finish.reason == "stop"
    assert progress.is_finished
    assert accept(progress, 1, [6]) is None


def test_a_hand_off_ends_prefills_part_and_not_the_request():
    progress = Progress(request())
    new = accept(progress, 0, [5], "handed_off")
    assert (new.token_ids, new.finish) == ([5], None)
    assert accept(progress, 1, [], "handed_off") is None
    assert not progress.is_finished


def test_a_late_finish_of_something_shorter_is_dropped():
    progress = Progress(request())
    accept(progress, 0, [5, 6, 7])
    assert accept(progress, 1, [], "stop") is None
    assert not progress.is_finished


def test_a_replay_has_the_sent_tokens_in_its_prompt_and_its_index_continues():
    progress = Progress(request(prompt_ids=[1, 2]))
    accept(progress, 0, [5, 6])
    remaining = progress.remaining()
    assert remaining.prompt_ids == [1, 2, 5, 6]
    assert remaining.num_prior_tokens == 2
    assert remaining.sampling == request().sampling
    assert accept(progress, 2, [7]).index == 2


def test_a_request_that_was_continued_already_counts_from_there():
    progress = Progress(request(prompt_ids=[1, 5, 6], num_prior_tokens=2))
    assert progress.next_index == 2
    assert accept(progress, 2, [7]).index == 2
    assert progress.remaining().num_prior_tokens == 3
    assert progress.remaining().prompt_ids == [1, 5, 6, 7]


def test_cached_tokens_are_those_of_the_first_delta():
    progress = Progress(request())
    assert accept(progress, 0, [5], cached_tokens=2).cached_tokens == 2
    assert accept(progress, 1, [6], cached_tokens=4).cached_tokens == 0


@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=60),
    st.integers(0, 3),
)
def test_however_copies_repeat_and_overlap_each_index_is_given_once_and_in_order(
    num_tokens, windows, num_prior
):
    progress = Progress(request(num_prior_tokens=num_prior))
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
