from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kvtransfer.session import (
    OVER,
    RECEIVER,
    SENDER,
    AbortAsked,
    Action,
    CorruptedArrived,
    Expected,
    Fenced,
    GrantArrived,
    LandedArrived,
    LinkLost,
    LinkReady,
    ReceiverState,
    ReleasedArrived,
    SenderState,
    TimedOut,
    UnexpectedEvent,
    WithdrawArrived,
    WithdrawAsked,
    WriteFailed,
    WritesDone,
    WritesStopped,
    diagram,
    receiver_session,
    sender_session,
)
from tandem.wire.errors import Aborted, PeerLost


def walk(session, *events):
    return [action for event in events for action in session.apply(event)]


def test_a_hand_off_is_told_and_said_once_whichever_half_comes_first():
    for first, second in ((Expected(), GrantArrived()), (GrantArrived(), Expected())):
        session = sender_session()
        actions = walk(session, first, second, WritesDone())
        assert actions == [Action.TELL_GRANTED, Action.SEND_LANDED, Action.TELL_PUSHED]
        assert session.state is SenderState.LANDED


def test_a_withdrawn_push_stops_its_writes_before_it_says_released():
    session = sender_session()
    walk(session, Expected(), GrantArrived())
    assert session.apply(WithdrawArrived()) == (Action.STOP_WRITES,)
    assert session.apply(AbortAsked()) == ()
    assert session.apply(WritesStopped()) == (Action.SEND_RELEASED, Action.TELL_RELEASED)


def test_a_push_after_an_abort_is_refused():
    session = sender_session()
    walk(session, Expected(), AbortAsked(Aborted("no longer wanted")))
    assert session.apply(GrantArrived()) == (Action.SEND_RELEASED,)
    assert session.error.message == "no longer wanted"


def test_a_request_after_its_grant_was_withdrawn_fails_at_once():
    session = sender_session()
    actions = walk(session, GrantArrived(), WithdrawArrived(), Expected())
    assert actions == [Action.SEND_RELEASED, Action.TELL_RELEASED]


def test_a_withdraw_that_crosses_landed_changes_nothing_at_prefill():
    session = sender_session()
    walk(session, Expected(), GrantArrived(), WritesDone())
    assert session.apply(WithdrawArrived()) == ()
    assert session.state is SenderState.LANDED


def test_a_landed_that_crosses_a_withdraw_makes_the_pages_safe():
    session = receiver_session()
    walk(session, LinkReady(), WithdrawAsked())
    assert session.apply(LandedArrived()) == (Action.REVOKE, Action.TELL_SAFE)


def test_pages_of_a_lost_prefill_are_safe_only_after_the_fence():
    session = receiver_session()
    assert walk(session, LinkReady(), LinkLost())[-2:] == [Action.FENCE, Action.TELL_LOST]
    assert session.apply(Fenced()) == (Action.TELL_SAFE,)


def test_corrupted_pages_fail_and_are_safe():
    session = receiver_session()
    actions = walk(session, LinkReady(), CorruptedArrived())
    assert actions[-2:] == [Action.REVOKE, Action.TELL_FAILED]


def test_an_unexpected_event_names_state_and_event_and_changes_nothing():
    session = receiver_session()
    with pytest.raises(UnexpectedEvent, match="Fenced in state RESERVING"):
        session.apply(Fenced(PeerLost("x")))
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


class World:
    """Both ends of one room, with messages and writes that take their time.

    A page is reused the moment decode's role is told that it may; from then on no write may arrive.
    """

    def __init__(self):
        self.sender, self.receiver = sender_session(), receiver_session()
        self.to_prefill, self.to_decode = deque(), deque()
        self.told = []
        self.is_link_up, self.is_lost_at_prefill = True, False
        self.is_writing = self.is_fenced = self.has_stop = self.is_fencing = False
        self.is_reused = self.is_expected = self.is_timed_out = False

    def at_prefill(self, event):
        for action in self.sender.apply(event):
            match action:
                case Action.TELL_GRANTED:
                    self.is_writing = True
                case Action.STOP_WRITES:
                    self.has_stop = True
                case Action.SEND_LANDED:
                    self.say(LandedArrived())
                case Action.SEND_RELEASED:
                    self.say(ReleasedArrived())
                case _:
                    self.told.append(action)

    def say(self, event):
        assert not self.is_writing, "the last word came before the last write"
        if self.is_link_up:
            self.to_decode.append(event)

    def at_decode(self, event):
        for action in self.receiver.apply(event):
            match action:
                case Action.SEND_GRANT:
                    self.to_prefill.append(GrantArrived())
                case Action.SEND_WITHDRAW:
                    self.to_prefill.append(WithdrawArrived())
                case Action.FENCE:
                    self.is_fencing = True
                case Action.TELL_LANDED | Action.TELL_FAILED | Action.TELL_SAFE:
                    self.is_reused = True
                    self.told.append(action)

    def write(self):
        """One more byte of a write that is under way; a fence stops it at the far end."""
        assert not (self.is_writing and self.is_reused and not self.is_fenced), "a late write"

    def choices(self):
        """Everything that can happen now, in a fixed order."""
        sender, receiver = self.sender.state, self.receiver.state
        can = [
            ("expect", not self.is_expected),
            ("link", receiver is ReceiverState.RESERVING and self.is_link_up),
            ("hear prefill", bool(self.to_decode) and self.is_link_up),
            ("hear decode", bool(self.to_prefill) and not self.is_lost_at_prefill),
            ("written", self.is_writing and sender is SenderState.PUSHING),
            ("broken", self.is_writing and sender is SenderState.PUSHING),
            ("stopped", self.has_stop),
            (
                "abort",
                self.is_expected and sender not in (SenderState.NEW, SenderState.GRANTED_EARLY),
            ),
            ("withdraw", True),
            ("landed timeout", receiver is ReceiverState.GRANTED),
            ("half timeout", sender in (SenderState.WAITING, SenderState.GRANTED_EARLY)),
            ("lose link", self.is_link_up),
            ("prefill notices", not self.is_link_up and not self.is_lost_at_prefill),
            ("fenced", self.is_fencing),
        ]
        return [name for name, is_possible in can if is_possible]

    def do(self, name):
        match name:
            case "expect":
                self.is_expected = True
                if self.sender.state in (
                    SenderState.NEW,
                    SenderState.GRANTED_EARLY,
                    SenderState.REFUSING,
                ):
                    self.at_prefill(Expected())
            case "link":
                self.at_decode(LinkReady())
            case "hear prefill":
                self.at_decode(self.to_decode.popleft())
            case "hear decode":
                self.at_prefill(self.to_prefill.popleft())
            case "written":
                self.is_writing = False
                self.at_prefill(WritesDone())
            case "broken":
                self.at_prefill(WriteFailed())
            case "stopped":
                self.is_writing = self.has_stop = False
                self.at_prefill(WritesStopped())
            case "abort":
                self.at_prefill(AbortAsked())
            case "withdraw":
                self.at_decode(WithdrawAsked())
            case "landed timeout":
                self.at_decode(TimedOut())
            case "half timeout":
                self.at_prefill(TimedOut())
            case "lose link":
                self.is_link_up = False
                self.to_decode.clear()
                if self.receiver.state not in OVER:
                    self.at_decode(LinkLost())
            case "prefill notices":
                self.is_lost_at_prefill = True
                self.to_prefill.clear()
                if self.sender.state not in (*OVER, SenderState.NEW, SenderState.WAITING):
                    self.at_prefill(LinkLost())
            case "fenced":
                self.is_fenced, self.is_fencing = True, False
                self.at_decode(Fenced())
        self.write()


# What must happen sooner or later, in the order in which a quiet world does it.
INEVITABLE = [
    "expect",
    "link",
    "hear decode",
    "hear prefill",
    "stopped",
    "fenced",
    "prefill notices",
    "written",
    "half timeout",
    "landed timeout",
]


@settings(max_examples=600, deadline=None)
@given(st.lists(st.integers(0, 100), max_size=25))
def test_no_schedule_reuses_a_page_before_its_last_write_and_all_end_in_agreement(schedule):
    world = World()
    for number in schedule:
        possible = world.choices()
        world.do(possible[number % len(possible)])
    while name := next((each for each in INEVITABLE if each in world.choices()), None):
        world.do(name)
    sender, receiver = world.sender.state, world.receiver.state
    assert receiver in OVER
    assert sender in OVER | {SenderState.REFUSING}
    assert not world.is_writing
    if receiver is ReceiverState.READY:
        assert sender is SenderState.LANDED
    told_decode = [
        each
        for each in world.told
        if each in (Action.TELL_LANDED, Action.TELL_FAILED, Action.TELL_SAFE)
    ]
    assert len(told_decode) == 1
    assert sum(each in (Action.TELL_PUSHED, Action.TELL_RELEASED) for each in world.told) == 1
