"""The fan-in of one room: whatever order the ranks speak in, the role hears what is true of all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtransfer.fan_in import TRANSITIONS, GroupAction, GroupEvent, GroupState, RoomFanIn
from tandem.wire.errors import PeerLost

A = GroupAction
LAST = {A.TELL_DONE, A.TELL_ENDED}

# What one rank may say, in order; `give up` is the role's. What a rank says after it was told to end
# is its choice too: the news may have crossed with the order.
RANK_STORIES = [
    ["granted", "ended"],
    ["granted", "failed"],
    ["granted", "lost", "ended"],
    ["failed"],
    ["lost", "ended"],
]


def play(fan_in: RoomFanIn, who: int | str, word: str) -> list[GroupAction]:
    if word == "give up":
        return fan_in.give_up()
    if word == "granted":
        return fan_in.granted(who)
    if word == "ended":
        return fan_in.ended(who)
    if word == "failed":
        return fan_in.failed(who, PeerLost(f"of rank {who}"))
    return fan_in.lost(PeerLost(f"of rank {who}"))


@st.composite
def transcripts(draw):
    """Return (number of ranks, words of ranks and role in some order, each rank's in its own)."""
    num_ranks = draw(st.integers(1, 3))
    left = {rank: list(draw(st.sampled_from(RANK_STORIES))) for rank in range(num_ranks)}
    if draw(st.booleans()):
        left["role"] = ["give up"]
    words = []
    while any(left.values()):
        who = draw(st.sampled_from([name for name, story in left.items() if story]))
        words.append((who, left[who].pop(0)))
    return num_ranks, words


@given(transcripts())
def test_the_last_word_comes_once_when_every_rank_has_ended_and_is_the_worst_of_theirs(transcript):
    num_ranks, words = transcript
    fan_in = RoomFanIn(num_ranks)
    said: list[GroupAction] = []
    ended: set[object] = set()
    ordered_to_end: list[int] = []
    granted: set[object] = set()
    is_good = True
    for who, word in words:
        if fan_in.state is GroupState.OVER:
            assert word == "give up"  # the driver drops it: the room is forgotten
            continue
        is_good = is_good and word not in ("failed", "lost", "give up")
        ended |= {who} if word in ("ended", "failed") else set()
        granted |= {who} if word == "granted" else set()
        actions = play(fan_in, who, word)
        if A.END_OTHERS in actions:
            ordered_to_end += fan_in.live_ranks
            assert not ended & set(fan_in.live_ranks)
        if A.TELL_GRANTED in actions:
            assert len(granted) == num_ranks
            assert is_good
        said += actions
        has_last = bool(LAST & set(said))
        assert has_last == (len(ended) == num_ranks), (who, word)
    assert sum(action in LAST for action in said) == 1
    assert said[-1] in LAST
    assert said[-1] is (A.TELL_DONE if is_good else A.TELL_ENDED)
    assert said.count(A.TELL_LOST) <= 1
    assert said.count(A.TELL_GRANTED) <= 1
    assert len(ordered_to_end) == len(set(ordered_to_end))


@given(transcripts())
def test_a_failed_rank_ends_all_that_have_not_ended(transcript):
    num_ranks, words = transcript
    fan_in = RoomFanIn(num_ranks)
    for who, word in words:
        before = fan_in.state
        if before is GroupState.OVER:
            return
        actions = play(fan_in, who, word)
        if before is GroupState.OPEN and fan_in.state is not GroupState.OPEN and word != "ended":
            assert actions[0] is A.END_OTHERS
            assert (A.TELL_LOST in actions) == (word != "give up")
            assert fan_in.error is None or str(who) in str(fan_in.error)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_pages_are_not_safe_while_one_rank_may_still_write(num_ranks):
    fan_in = RoomFanIn(num_ranks)
    assert fan_in.failed(0, PeerLost("x")) == [A.END_OTHERS, A.TELL_LOST]
    for rank in range(1, num_ranks - 1):
        assert fan_in.ended(rank) == []
    assert fan_in.live_ranks == [num_ranks - 1]
    assert fan_in.ended(num_ranks - 1) == [A.TELL_ENDED]


def test_a_landing_that_crossed_with_an_end_is_no_landing():
    fan_in = RoomFanIn(2)
    fan_in.give_up()
    assert fan_in.ended(0) == []
    assert fan_in.ended(1) == [A.TELL_ENDED]
    assert fan_in.error is None


def test_a_last_word_said_twice_is_a_bug_by_name():
    fan_in = RoomFanIn(2)
    fan_in.ended(0)
    with pytest.raises(AssertionError, match="rank 0 ended twice"):
        fan_in.ended(0)


def test_nothing_can_happen_to_a_room_that_is_over():
    fan_in = RoomFanIn(1)
    fan_in.ended(0)
    with pytest.raises(AssertionError, match="GIVEN_UP in state OVER"):
        fan_in.give_up()


def test_every_state_but_the_last_knows_every_event():
    for state, arrows in TRANSITIONS.items():
        expected = set() if state is GroupState.OVER else set(GroupEvent)
        assert set(arrows) == expected


@given(transcripts(), st.booleans())
def test_a_room_whose_ranks_are_known_late_ends_as_if_they_had_been_known(transcript, is_given_up):
    num_ranks, words = transcript
    late, early = RoomFanIn(1), RoomFanIn(num_ranks)
    if is_given_up:
        assert late.give_up() == early.give_up()
    late.widen(num_ranks)
    for who, word in words:
        if early.state is not GroupState.OVER:
            assert play(late, who, word) == play(early, who, word)
    assert late.state is early.state


def test_a_room_that_is_over_has_no_more_ranks():
    fan_in = RoomFanIn(1)
    fan_in.ended(0)
    with pytest.raises(AssertionError, match="has no more ranks"):
        fan_in.widen(2)
