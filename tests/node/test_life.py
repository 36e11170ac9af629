"""Transcripts of a node's life cycle, and the drain of its engine with explicit times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.node.life.life import (
    SENTENCES,
    TRANSITIONS,
    UNREAD_S,
    EngineDrain,
    Life,
    LifeEvent,
    NodeState,
    StateConflict,
)
from tandem.wire.errors import InvalidRequest


def lived(*events: LifeEvent, role="decode") -> Life:
    life = Life(role)
    for event in events:
        life.apply(event)
    return life


@pytest.mark.parametrize(
    ("transcript", "state"),
    [
        ("loaded", NodeState.SERVING),
        ("loaded, drain, emptied", NodeState.DRAINED),
        ("loaded, drain, drain, emptied, drain", NodeState.DRAINED),
        ("loaded, drain, resume", NodeState.SERVING),
        ("loaded, drain, emptied, resume", NodeState.SERVING),
        ("loaded, drain, emptied, turn, loaded", NodeState.SERVING),
        ("loaded, drain, emptied, turn, not loaded, turn, loaded", NodeState.SERVING),
        ("loaded, drain, emptied, load, loaded", NodeState.SERVING),
        ("loaded, end", NodeState.LEAVING),
        ("joined, end", NodeState.LEAVING),
        ("loaded, drain, end, emptied", NodeState.ENDED),
        ("loaded, end, too late", NodeState.ENDED),
        ("loaded, end, force", NodeState.ENDED),
        ("end, loaded", NodeState.ENDED),
        ("loaded, drain, emptied, end", NodeState.ENDED),
        ("loaded, turn, end, not loaded", NodeState.ENDED),
    ],
)
def test_events_lead_to_the_states_of_the_diagram(transcript, state):
    assert lived(*map(LifeEvent, transcript.split(", "))).state is state


@given(st.lists(st.sampled_from(LifeEvent)))
def test_node_can_end_in_every_state_and_stays_ended(events):
    life = Life("decode")
    for event in events:
        before = life.state
        try:
            life.apply(event)
        except StateConflict:
            assert life.state is before
        assert before is not NodeState.ENDED or life.state is NodeState.ENDED
    assert life.describe(3)
    assert life.apply(LifeEvent.END) in (NodeState.LEAVING, NodeState.ENDED)
    assert life.apply(LifeEvent.FORCE) is NodeState.ENDED


def test_every_state_has_transitions_and_a_sentence():
    assert set(TRANSITIONS) == set(SENTENCES) == set(NodeState)


def test_invalid_event_is_rejected_with_the_current_state():
    with pytest.raises(StateConflict, match="cannot drain now: the node is loading") as refused:
        Life("prefill").apply(LifeEvent.DRAIN)
    assert refused.value.status == 409
    with pytest.raises(
        StateConflict, match="cannot resume now: the node is draining before it exits"
    ):
        lived(LifeEvent.LOADED, LifeEvent.END).apply(LifeEvent.RESUME)


def test_role_change_needs_a_node_without_requests():
    life = lived(LifeEvent.LOADED)
    with pytest.raises(
        StateConflict, match="has 3 requests; drain it first with `tandem drain URL`"
    ):
        life.turn("prefill", num_left=3)
    life.apply(LifeEvent.DRAIN)
    with pytest.raises(StateConflict, match="drain it first"):
        life.turn("prefill", num_left=0)
    assert (life.state, life.role) == (NodeState.DRAINING, "decode")
    life.apply(LifeEvent.EMPTIED)
    assert life.turn("prefill", num_left=0)
    assert (life.state, life.role) == (NodeState.TURNING, "prefill")
    assert "changing to prefill" in life.describe()
    assert not life.turn("prefill", num_left=5)


def test_failed_role_change_is_described_and_can_be_reverted():
    life = lived(LifeEvent.LOADED)
    life.turn("prefill", num_left=0)
    life.not_loaded("port 8998 is in use")
    assert "the change to prefill failed (port 8998 is in use)" in life.describe()
    assert '{"role": "decode"}' in life.describe()
    assert life.turn("decode", num_left=0)
    life.apply(LifeEvent.LOADED)
    assert life.describe() == "serving"


def test_colocated_node_cannot_change_its_role():
    with pytest.raises(InvalidRequest, match="colocated node"):
        lived(LifeEvent.LOADED, role="colocated").turn("decode", num_left=0)


def test_new_drain_order_replaces_the_deadline_and_the_number():
    drain = EngineDrain()
    drain.begin(1, 30.0, 100.0)
    assert drain.take_end(0, 100.0, is_read=True) == 1
    drain.begin(2, 0.0, 101.0)
    assert drain.take_hand_over(101.0)
    assert drain.take_end(3, 101.0, is_read=True) is None
    assert drain.take_end(0, 101.0, is_read=True) == 2
    assert drain.take_end(0, 101.0, is_read=True) is None


def test_every_drain_hands_over_once_at_its_deadline():
    drain = EngineDrain()
    for number in (1, 2):
        drain.begin(number, 30.0, 100.0)
        taken = [drain.take_hand_over(now_s) for now_s in (129.0, 130.0, 131.0)]
        assert taken == [False, True, False]
        drain.end()


def test_drain_ends_when_answers_are_read_or_time_out():
    drain = EngineDrain()
    drain.begin(1, 0.0, 100.0)
    assert drain.take_end(0, 105.0, is_read=False) is None
    assert drain.take_end(0, 105.0 + UNREAD_S, is_read=False) == 1
    drain.begin(2, 0.0, 110.0)
    assert drain.take_end(0, 110.0, is_read=False) is None
    assert drain.take_end(0, 110.1, is_read=True) == 2
