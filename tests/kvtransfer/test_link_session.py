"""The tables of a link: complete, and safe for every sequence of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtransfer.link_session import (
    NOT_OPEN,
    RECEIVER_LINK,
    SENDER_LINK,
    LinkAction,
    LinkEvent,
    ReceiverLink,
    SenderLink,
    receiver_link,
    sender_link,
)
from tandem.kvtransfer.session import UnexpectedEvent

_R, _S, _A, _E = ReceiverLink, SenderLink, LinkAction, LinkEvent

ENDS = pytest.mark.parametrize(
    ("make", "table"),
    [(receiver_link, RECEIVER_LINK), (sender_link, SENDER_LINK)],
    ids=["receiver", "sender"],
)
CLOSING = {_A.CLOSE_SOCKET, _A.CLOSE_CONNECTION}
AT_MOST_ONCE = CLOSING | {
    _A.SEND_WELCOME,
    _A.SEND_REFUSED,
    _A.REMOVE,
    _A.REPORT_UP,
    _A.REPORT_LOST,
    _A.REPORT_FENCED,
    _A.FENCE,
}


def actions_of(session, *events):
    return [action for event in events for action in session.apply(event)]


@ENDS
def test_every_state_is_reachable_and_can_be_left_unless_closed(make, table):
    targets = {step.state for row in table.values() for step in row.values()}
    assert targets | {make().state} == set(table) == set(type(make().state))
    for state, row in table.items():
        assert (state.name == "CLOSED") != any(step.state is not state for step in row.values())


@ENDS
def test_every_state_accepts_a_loss(make, table):
    del make
    assert all(LinkEvent.LOST in row for row in table.values())


@ENDS
def test_every_open_state_accepts_a_shutdown(make, table):
    del make
    assert all(LinkEvent.SHUT_DOWN in row for state, row in table.items() if state not in NOT_OPEN)


@ENDS
def test_unexpected_event_names_state_and_event_and_changes_nothing(make, table):
    for state, row in table.items():
        for event in set(LinkEvent) - set(row):
            session = make()
            session.state = state
            assert not session.expects(event)
            with pytest.raises(UnexpectedEvent, match=f"{event.value} in state {state.name}"):
                session.apply(event)
            assert session.state is state


def test_receiver_link_comes_up_after_hello_and_welcome():
    session = receiver_link()
    assert actions_of(session, _E.OFFER_READY, _E.HELLO_SENT) == [_A.OPEN_SOCKET]
    assert actions_of(session, _E.WELCOME_ARRIVED) == [_A.REPORT_UP]
    assert (session.state, session.is_open) == (_R.UP, True)


def test_receiver_link_follows_one_redirect_and_no_second():
    session = receiver_link()
    actions_of(session, _E.OFFER_READY, _E.HELLO_SENT)
    assert actions_of(session, _E.REDIRECT_ARRIVED, _E.HELLO_SENT) == [_A.REOPEN_SOCKET]
    assert session.expects(_E.WELCOME_ARRIVED)
    assert not session.expects(_E.REDIRECT_ARRIVED)


@pytest.mark.parametrize("state", [_R.CONNECTING, _R.REDIRECTED, _R.UP])
def test_receiver_link_accepts_answers_only_to_a_hello(state):
    session = receiver_link()
    session.state = state
    assert not session.expects(_E.WELCOME_ARRIVED)
    assert not session.expects(_E.REDIRECT_ARRIVED)


@pytest.mark.parametrize("redirect", [[], [_E.REDIRECT_ARRIVED, _E.HELLO_SENT]])
def test_receiver_link_makes_the_next_offer_after_a_refused_one(redirect):
    session = receiver_link()
    actions_of(session, _E.OFFER_READY, _E.HELLO_SENT, *redirect)
    assert actions_of(session, _E.OFFER_REFUSED) == [_A.OFFER_NEXT]
    assert session.state is _R.OPENING
    assert actions_of(session, _E.OFFER_READY, _E.HELLO_SENT) == [_A.OPEN_SOCKET]
    assert actions_of(session, _E.WELCOME_ARRIVED) == [_A.REPORT_UP]
    assert not session.expects(_E.OFFER_REFUSED)


def test_receiver_link_lost_before_its_offer_is_ready_opens_no_socket():
    session = receiver_link()
    assert actions_of(session, _E.LOST) == [_A.REMOVE, _A.REPORT_LOST, _A.FENCE]
    assert actions_of(session, _E.OFFER_READY) == []
    assert actions_of(session, _E.FENCED) == [_A.REPORT_FENCED]
    assert session.state is _R.CLOSED


def test_sender_link_lost_while_connecting_sends_no_welcome():
    session = sender_link()
    lost = [_A.REMOVE, _A.SEND_REFUSED, _A.CLOSE_CONNECTION, _A.REPORT_LOST]
    assert actions_of(session, _E.LOST) == lost
    assert actions_of(session, _E.CONNECTED) == []
    assert not session.is_open


@ENDS
@given(events=st.lists(st.sampled_from(LinkEvent), max_size=20))
def test_no_sequence_of_events_closes_twice_or_reopens(make, table, events):
    del table
    session, done = make(), []
    for event in events:
        was_open = session.is_open
        if not session.expects(event):
            continue
        new = session.apply(event)
        done += new
        assert was_open or not session.is_open, "a link that was closed is open again"
        assert not (CLOSING & set(done) and session.is_open), "a closed link is usable"
        assert all(done.count(action) <= 1 for action in AT_MOST_ONCE), done
    if not session.is_open:
        num_closed = done.count(_A.OFFER_NEXT) + done.count(_A.CLOSE_SOCKET)
        assert done.count(_A.OPEN_SOCKET) == num_closed
    if _A.REPORT_FENCED in done:
        assert done.index(_A.REPORT_LOST) < done.index(_A.FENCE) < done.index(_A.REPORT_FENCED)
