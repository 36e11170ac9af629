from pathlib import Path

import pytest

from tandem.kvtransfer.session import (
    OVER,
    RECEIVER,
    SENDER,
    Action,
    Event,
    ReceiverState,
    SenderState,
    UnexpectedEvent,
    diagram,
    receiver_session,
    sender_session,
)
from tandem.wire.errors import Aborted, PeerLost


def walk(session, *events):
    return [action for event in events for action in session.apply(event)]


def test_a_hand_off_is_told_and_said_once_whichever_half_comes_first():
    for first, second in (
        (Event.EXPECTED, Event.GRANT_ARRIVED),
        (Event.GRANT_ARRIVED, Event.EXPECTED),
    ):
        session = sender_session()
        actions = walk(session, first, second, Event.WRITES_DONE)
        assert actions == [Action.TELL_GRANTED, Action.SEND_LANDED, Action.TELL_PUSHED]
        assert session.state is SenderState.LANDED


def test_a_withdrawn_push_stops_its_writes_before_it_says_released():
    session = sender_session()
    walk(session, Event.EXPECTED, Event.GRANT_ARRIVED)
    assert session.apply(Event.WITHDRAW_ARRIVED) == (Action.STOP_WRITES,)
    assert session.apply(Event.ABORT_ASKED) == ()
    assert session.apply(Event.WRITES_STOPPED) == (Action.SEND_RELEASED, Action.TELL_RELEASED)


def test_a_push_after_an_abort_is_refused():
    session = sender_session()
    walk(session, Event.EXPECTED)
    session.apply(Event.ABORT_ASKED, Aborted("no longer wanted"))
    assert session.apply(Event.GRANT_ARRIVED) == (Action.SEND_RELEASED,)
    assert session.error.message == "no longer wanted"


def test_a_request_after_its_grant_was_withdrawn_fails_at_once():
    session = sender_session()
    actions = walk(session, Event.GRANT_ARRIVED, Event.WITHDRAW_ARRIVED, Event.EXPECTED)
    assert actions == [Action.SEND_RELEASED, Action.TELL_RELEASED]


def test_a_withdraw_that_crosses_landed_changes_nothing_at_prefill():
    session = sender_session()
    walk(session, Event.EXPECTED, Event.GRANT_ARRIVED, Event.WRITES_DONE)
    assert session.apply(Event.WITHDRAW_ARRIVED) == ()
    assert session.state is SenderState.LANDED


def test_a_landed_that_crosses_a_withdraw_makes_the_pages_safe():
    session = receiver_session()
    walk(session, Event.LINK_READY, Event.WITHDRAW_ASKED)
    assert session.apply(Event.LANDED_ARRIVED) == (Action.TELL_SAFE,)


def test_pages_of_a_lost_prefill_are_safe_only_after_the_fence():
    session = receiver_session()
    assert walk(session, Event.LINK_READY, Event.LINK_LOST)[-1] is Action.TELL_LOST
    assert session.state is ReceiverState.FENCING
    assert session.apply(Event.FENCED) == (Action.TELL_SAFE,)


def test_corrupted_pages_fail_and_are_safe():
    session = receiver_session()
    actions = walk(session, Event.LINK_READY, Event.CORRUPTED_ARRIVED)
    assert actions[-1] is Action.TELL_FAILED


def test_an_unexpected_event_names_state_and_event_and_changes_nothing():
    session = receiver_session()
    with pytest.raises(UnexpectedEvent, match="Fenced in state RESERVING"):
        session.apply(Event.FENCED, PeerLost("x"))
    assert (session.state, session.error) == (ReceiverState.RESERVING, None)


@pytest.mark.parametrize("table", [SENDER, RECEIVER])
def test_every_state_can_be_reached_and_left_unless_it_is_over(table):
    states = {state for arrows in table.values() for state in (s.state for s in arrows.values())}
    assert states | {next(iter(table))} == set(table)
    for state, arrows in table.items():
        assert (state in OVER) != any(step.state is not state for step in arrows.values())


def test_the_diagram_has_a_line_for_every_arrow():
    lines = diagram(SENDER).splitlines()
    assert len(lines) == sum(len(arrows) for arrows in SENDER.values())
    assert "PUSHING       WritesDone        → LANDED        send Landed, tell pushed" in lines


@pytest.mark.parametrize("table", [SENDER, RECEIVER], ids=["sender", "receiver"])
def test_the_page_of_the_hand_off_shows_the_table_as_it_is(table):
    page = Path(__file__).resolve().parents[2] / "docs" / "hand-off.md"
    assert f"```\n{diagram(table)}\n```" in page.read_text()
