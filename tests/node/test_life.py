"""A node's life as transcripts, and the drain of its engine with the time given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.node.life import SENTENCES, TRANSITIONS, UNREAD_S, Drain, Event, Life, NotNow, State
from tandem.wire.errors import InvalidRequest


def lived(*events: Event, role="decode") -> Life:
    life = Life(role)
    for event in events:
        life.apply(event)
    return life


@pytest.mark.parametrize(
    ("transcript", "state"),
    [
        ("loaded", State.SERVING),
        ("loaded, drain, emptied", State.DRAINED),
        ("loaded, drain, drain, emptied, drain", State.DRAINED),
        ("loaded, drain, resume", State.SERVING),
        ("loaded, drain, emptied, resume", State.SERVING),
        ("loaded, drain, emptied, turn, loaded", State.SERVING),
        ("loaded, drain, emptied, turn, not loaded, turn, loaded", State.SERVING),
        ("loaded, drain, emptied, load, loaded", State.SERVING),
        ("loaded, end", State.LEAVING),
        ("loaded, drain, end, emptied", State.ENDED),
        ("loaded, end, too late", State.ENDED),
        ("loaded, end, force", State.ENDED),
        ("end, loaded", State.ENDED),
        ("loaded, drain, emptied, end", State.ENDED),
        ("loaded, turn, end, not loaded", State.ENDED),
    ],
)
def test_a_transcript_of_a_life_ends_as_drawn(transcript, state):
    assert lived(*map(Event, transcript.split(", "))).state is state


@given(st.lists(st.sampled_from(Event)))
def test_whatever_happens_a_node_can_end_and_an_ended_one_stays_so(events):
    life = Life("decode")
    for event in events:
        before = life.state
        try:
            life.apply(event)
        except NotNow:
            assert life.state is before
        assert before is not State.ENDED or life.state is State.ENDED
    assert life.describe(3)
    assert life.apply(Event.END) in (State.LEAVING, State.ENDED)
    assert life.apply(Event.FORCE) is State.ENDED


def test_every_state_has_its_transitions_and_its_sentence():
    assert set(TRANSITIONS) == set(SENTENCES) == set(State)


def test_what_cannot_be_now_is_refused_with_what_the_node_is_doing():
    with pytest.raises(NotNow, match="cannot drain now: the node is loading") as refused:
        Life("prefill").apply(Event.DRAIN)
    assert refused.value.status == 409
    with pytest.raises(NotNow, match="cannot resume now: the node is draining, and ends then"):
        lived(Event.LOADED, Event.END).apply(Event.RESUME)


def test_a_node_with_requests_is_turned_only_when_it_is_drained():
    life = lived(Event.LOADED)
    with pytest.raises(NotNow, match="has 3 requests: drain it first, with `tandem drain URL`"):
        life.turn("prefill", num_left=3)
    life.apply(Event.DRAIN)
    with pytest.raises(NotNow, match="drain it first"):
        life.turn("prefill", num_left=0)
    assert (life.state, life.role) == (State.DRAINING, "decode")
    life.apply(Event.EMPTIED)
    assert life.turn("prefill", num_left=0)
    assert (life.state, life.role) == (State.TURNING, "prefill")
    assert "turning into prefill" in life.describe()
    assert not life.turn("prefill", num_left=5)


def test_a_node_that_could_not_become_the_other_says_why_and_can_be_turned_back():
    life = lived(Event.LOADED)
    life.turn("prefill", num_left=0)
    life.not_loaded("port 8998 is in use")
    assert "could not become prefill (port 8998 is in use)" in life.describe()
    assert '{"role": "decode"}' in life.describe()
    assert life.turn("decode", num_left=0)
    life.apply(Event.LOADED)
    assert life.describe() == "serving"


def test_a_node_with_both_roles_turns_into_neither():
    with pytest.raises(InvalidRequest, match="both roles"):
        lived(Event.LOADED, role="colocated").turn("decode", num_left=0)


def test_a_later_order_moves_the_deadline_and_is_answered_for_itself():
    drain = Drain()
    drain.begin(1, 30.0, 100.0)
    assert drain.take_end(0, 100.0, is_read=True) == 1
    drain.begin(2, 0.0, 101.0)
    assert drain.take_hand_over(101.0)
    assert drain.take_end(3, 101.0, is_read=True) is None
    assert drain.take_end(0, 101.0, is_read=True) == 2
    assert drain.take_end(0, 101.0, is_read=True) is None


def test_it_is_over_when_the_last_answers_were_read_or_had_their_time():
    drain = Drain()
    drain.begin(1, 0.0, 100.0)
    assert drain.take_end(0, 105.0, is_read=False) is None
    assert drain.take_end(0, 105.0 + UNREAD_S, is_read=False) == 1
    drain.begin(2, 0.0, 110.0)
    assert drain.take_end(0, 110.0, is_read=False) is None
    assert drain.take_end(0, 110.1, is_read=True) == 2
