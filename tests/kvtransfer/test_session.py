"""The tables of a room are complete and documented. Tests of the agents cover the behaviour."""

from pathlib import Path

import pytest

from tandem.kvtransfer.session import (
    OVER,
    RECEIVER,
    SENDER,
    Action,
    ReceiverState,
    RoomEvent,
    SenderState,
    UnexpectedEvent,
    receiver_session,
)
from tandem.wire.errors import PeerLost


def test_an_unexpected_event_names_state_and_event_and_changes_nothing():
    session = receiver_session()
    with pytest.raises(UnexpectedEvent, match="Fenced in state RESERVING"):
        session.apply(RoomEvent.FENCED, PeerLost("x"))
    assert (session.state, session.error) == (ReceiverState.RESERVING, None)


def test_a_room_keeps_its_first_error():
    session, first = receiver_session(), PeerLost("first")
    session.apply(RoomEvent.LINK_READY)
    session.apply(RoomEvent.WITHDRAW_REQUESTED)
    session.apply(RoomEvent.LINK_LOST, first)
    session.apply(RoomEvent.LINK_LOST, PeerLost("second"))
    assert session.error is first


@pytest.mark.parametrize("table", [SENDER, RECEIVER])
def test_every_state_can_be_reached_and_left_unless_it_is_over(table):
    states = {state for arrows in table.values() for state in (s.state for s in arrows.values())}
    assert states | {next(iter(table))} == set(table)
    for state, arrows in table.items():
        assert (state in OVER) != any(step.state is not state for step in arrows.values())


def diagram(table):
    """Return the table as lines `STATE  Event → STATE  actions`, as the page has it."""
    lines = []
    for state, arrows in table.items():
        for event, step in arrows.items():
            does = ", ".join(action.value for action in step.actions)
            target = "·" if step.state is state else step.state.name
            lines.append(f"{state.name:<14}{event.value:<18}→ {target:<14}{does}".rstrip())
    return "\n".join(lines)


@pytest.mark.parametrize("table", [SENDER, RECEIVER], ids=["sender", "receiver"])
def test_hand_off_page_shows_the_current_table(table):
    page = Path(__file__).resolve().parents[2] / "docs" / "hand-off.md"
    assert f"```\n{diagram(table)}\n```" in page.read_text()


def test_landed_and_released_are_sent_only_when_no_write_is_in_flight():
    writing = {SenderState.PUSHING, SenderState.RELEASING}
    says = {
        Action.SEND_RELEASED: RoomEvent.WRITES_STOPPED,
        Action.SEND_LANDED: RoomEvent.WRITES_DONE,
    }
    for state, arrows in SENDER.items():
        for event, step in arrows.items():
            for action in says.keys() & set(step.actions):
                assert state not in writing or event is says[action], (state, event)
            if state in writing and step.state not in writing:
                assert event in says.values(), (state, event)


def test_decode_reuses_pages_only_after_the_last_message_or_a_fence():
    writable = {ReceiverState.GRANTED, ReceiverState.WITHDRAWN, ReceiverState.FENCING}
    ends = {
        RoomEvent.LANDED_ARRIVED,
        RoomEvent.CORRUPTED_ARRIVED,
        RoomEvent.RELEASED_ARRIVED,
        RoomEvent.FENCED,
    }
    for state in writable:
        for event, step in RECEIVER[state].items():
            assert step.state in writable or event in ends, (state, event)
