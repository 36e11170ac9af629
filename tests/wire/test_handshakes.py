"""Peers that may not speak: nothing of theirs gets through, nothing of them stays, each end says why."""

import contextlib
import os
import socket
from itertools import pairwise

import pytest
import structlog.testing
import zmq

from tandem.wire.channel import DEFAULT_HEARTBEAT, Inbox, Link, configure, wait
from tandem.wire.errors import PeerLost
from tandem.wire.handshakes import HUNG_UP
from tandem.wire.keys import ChannelKey, operator_key, warn_of_weak_secret
from tandem.wire.messages import FromEngine, Ping, ToEngine
from tests.calm import CALM
from tests.patience import PATIENCE_S, patiently

OURS = ChannelKey.from_secret("the cluster's own secret")
GUESS = ChannelKey.from_secret("somebody's guess of it")
ANOTHER = "the other end has another TANDEM_CLUSTER_KEY"
WE_HAVE, THEY_HAVE = (
    "this end has a TANDEM_CLUSTER_KEY and the other has none",
    "the other end has a TANDEM_CLUSTER_KEY and this one has none",
)
# Of the listening and of the connecting end, and what each then says.
MISMATCHES = pytest.mark.parametrize(
    ("inbox_key", "link_key", "inbox_says", "link_says"),
    [
        (OURS, GUESS, ANOTHER, HUNG_UP),
        (OURS, None, WE_HAVE, THEY_HAVE),
        (None, OURS, THEY_HAVE, WE_HAVE),
    ],
    ids=["another key", "no key", "a key where none is"],
)


def until(is_so, *ends) -> None:
    for _ in patiently():
        if is_so():
            return
        wait(ends, 0.01)
    raise AssertionError("it did not come")


@MISMATCHES
def test_a_stranger_is_not_heard_and_both_ends_know_why(inbox_key, link_key, inbox_says, link_says):
    with Inbox("tcp://127.0.0.1:0", ToEngine, inbox_key, CALM) as inbox:
        link: Link[FromEngine] = Link(inbox.address, FromEngine, link_key)
        until(lambda: link.refusal, inbox)
        until(lambda: inbox.receive() or inbox.num_strangers, inbox)
        assert link.refusal in (link_says, HUNG_UP)
        # Whoever sees first that only one of them has a key hangs up on the other.
        assert inbox._handshakes.reason in (inbox_says, HUNG_UP)
        assert {link.refusal, inbox._handshakes.reason} != {HUNG_UP}
        with pytest.raises(PeerLost):
            link.send(Ping())
        link.close()
        _hear_a_friend(inbox, inbox_key)


def test_hundreds_of_strangers_leave_nothing_behind_and_are_told_of_once_a_minute():
    with Inbox("tcp://127.0.0.1:0", ToEngine, OURS, CALM) as inbox:

        def turn_away(num: int) -> None:
            expected = inbox.num_strangers + num
            with zmq.Context() as context, contextlib.ExitStack() as stack:
                for number in range(num):
                    knocking = stack.enter_context(context.socket(zmq.DEALER))
                    configure(
                        knocking, (GUESS, None)[number % 2], DEFAULT_HEARTBEAT, is_server=False
                    )
                    knocking.connect(inbox.address)
                until(lambda: inbox.receive() or inbox.num_strangers >= expected, inbox)

        with structlog.testing.capture_logs() as logs:
            turn_away(50)
            num_before, resident = _num_descriptors(), [_resident_bytes()]
            for _ in range(6):
                turn_away(50)
                resident.append(_resident_bytes())
            assert len(logs) == 1
            inbox._handshakes._silent_until_s = 0.0  # a minute later
            inbox.receive()
        assert sum(log["num_times"] for log in logs) == inbox.num_strangers >= 350
        until(lambda: _num_descriptors() <= num_before, inbox)  # closed by zmq's own thread
        # An allocator takes some more at times, whoever is at work; what strangers left, each fifty would.
        assert min(after - before for before, after in pairwise(resident)) < 1 << 20


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_bytes_that_are_no_handshake_are_cut_off_and_friends_are_heard():
    with Inbox("tcp://127.0.0.1:0", ToEngine, OURS, CALM) as inbox:
        for greeting in (b"GET / HTTP/1.1\r\n\r\n" * 8, b"\xff" + bytes(8) + b"\x7f" + b"x" * 200):
            with socket.create_connection(
                ("127.0.0.1", inbox.port), timeout=PATIENCE_S
            ) as stranger:
                stranger.sendall(greeting)
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(4096):  # its own greeting, then the end
                        pass
        _hear_a_friend(inbox, OURS)
        assert inbox.num_invalid == 0


def test_keys_for_different_purposes_tell_nothing_of_each_other():
    operator = operator_key("a secret")
    assert operator != operator_key("another")
    assert operator.encode() not in ChannelKey.from_secret("a secret").server_secret
    assert operator_key("") == ""


def test_a_secret_that_can_be_guessed_is_warned_of_without_saying_it():
    with structlog.testing.capture_logs() as logs:
        warn_of_weak_secret("")
        warn_of_weak_secret("0123456789abcdef")
        warn_of_weak_secret("hunter2")
    assert [log["event"] for log in logs] == ["cluster_key.weak"]
    assert "hunter2" not in str(logs)


def _hear_a_friend(inbox: Inbox[ToEngine], key: ChannelKey | None) -> None:
    friend: Link[FromEngine] = Link(inbox.address, FromEngine, key, CALM)
    until(lambda: _sends(friend), friend)
    until(lambda: (envelope := inbox.receive()) and envelope.message == Ping(), inbox)
    friend.close()


def _sends(link: Link[FromEngine]) -> bool:
    try:
        link.send(Ping())
    except PeerLost:
        return False
    return True


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
