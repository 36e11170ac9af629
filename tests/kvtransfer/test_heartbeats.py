"""Heartbeats: whatever takes its time, other links hear them, and who is silent is lost in time.

Transports, resolvers and checksums are held until the test lets go, so nothing here depends on how fast a
machine is. None of them may be called by a control thread in any test of this file, held or not.
"""

import socket
import threading
from collections.abc import Sequence

import pytest

from tandem.kvtransfer import events
from tandem.kvtransfer.events import Failed, Granted, Landed, Lost, Safe
from tandem.kvtransfer.receiver import ReceiverTimeouts
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import tcp_stream
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.loopback import (
    LoopbackConnection,
    LoopbackListener,
    LoopbackTransport,
)
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.kvtransfer.transports.tcp_stream import HANDSHAKE_TIMEOUT_S
from tandem.wire.channel import DEFAULT_HEARTBEAT, wait
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import Grant, Hello, LinkPing, Refused, Released, Welcome, Withdraw
from tandem.wire.hand_off import Landed as LandedWord
from tests.calm import CalmHeartbeat, calm_receiver, calm_sender
from tests.kvtransfer import rig
from tests.kvtransfer.rig import ROOM, layout
from tests.patience import PATIENCE_S, patiently

OFTEN = CalmHeartbeat(0.02)
# More than can be on their way when something is held.
NUM_BEATS = 10
SLOW = "slow.example.org"


CONTROL_THREADS = {"kv-decode", "kv-prefill"}


class Hold:
    """Stops whoever comes to it, once it is told to, until it is let go.

    Attributes:
        threads: Names of those that came.
    """

    def __init__(self):
        self._is_on, self.reached, self._let_go = False, threading.Event(), threading.Event()
        self.threads = set()

    def begin(self):
        self._is_on = True

    def pass_by(self):
        self.threads.add(threading.current_thread().name)
        if self._is_on:
            self.reached.set()
            assert self._let_go.wait(PATIENCE_S)

    def let_go(self):
        self._is_on = False
        self._let_go.set()


class HeldListener(LoopbackListener):
    def __init__(self, pool, listeners, holds):
        super().__init__(pool, listeners)
        self._holds = holds

    def admit(self, toward_host):
        self._holds["admit"].pass_by()
        return super().admit(toward_host)

    def permit(self, peer, room, page_ids):
        self._holds["permit"].pass_by()
        super().permit(peer, room, page_ids)

    def revoke(self, peer, room):
        self._holds["revoke"].pass_by()
        super().revoke(peer, room)

    def fence(self, peer):
        self._holds["fence"].pass_by()
        super().fence(peer)


class HeldConnection(LoopbackConnection):
    def __init__(self, holds, *rest):
        super().__init__(*rest)
        self._holds = holds

    def write(self, room, plan):
        self._holds["write"].pass_by()
        super().write(room, plan)

    def close(self):
        self._holds["close"].pass_by()
        super().close()


class HeldTransport(LoopbackTransport):
    """Each call is held at a hold of its name."""

    def __init__(self, holds):
        super().__init__()
        self._holds = holds

    def listen(self, pool):
        return HeldListener(pool, self._listeners, self._holds)

    def connect(self, offer, region):
        self._holds["connect"].pass_by()
        if offer.descriptor["peer"] not in self._listeners:
            raise TransferRefused("the offer is from another process")
        peer = offer.descriptor["peer"]
        return HeldConnection(self._holds, self, self._listeners[peer], peer, region)


class HeldRegion(MemoryRegion):
    """Memory whose reader is held."""

    hold: Hold

    def read(self, extents):
        self.hold.pass_by()
        return super().read(extents)


class HeldPages(Sequence):
    """Page ids whose reader is held."""

    def __init__(self, page_ids, hold):
        self._page_ids, self._hold = page_ids, hold

    def __len__(self):
        return len(self._page_ids)

    def __getitem__(self, index):
        self._hold.pass_by()
        return self._page_ids[index]


class Prefill(rig.FakePrefill):
    """A prefill that counts heartbeats."""

    def __init__(self, stack, epoch):
        super().__init__(stack, epoch, heartbeat=OFTEN)

    def link_up(self, decode, room=0):
        self.meet(decode, Room(room), [room])
        self.welcome()
        assert self.next(Grant).room == room

    def hear_beats(self):
        """Forget those on their way, and wait for more than can be."""
        while self.inbox.receive() is not None:
            pass
        for _ in range(NUM_BEATS):
            self.next(LinkPing)


@pytest.fixture
def holds():
    decodes = ("admit", "permit", "revoke", "fence", "read", "resolve")
    made = {name: Hold() for name in (*decodes, "connect", "plan", "write", "close")}
    yield made
    assert not [name for name, hold in made.items() if hold.threads & CONTROL_THREADS]


@pytest.fixture
def let_go(holds):
    """Let everything go, before what waits for it is closed."""
    return lambda: [hold.let_go() for hold in holds.values()]


@pytest.fixture
def prefills(stack):
    return [Prefill(stack, 11), Prefill(stack, 12)]


@pytest.fixture
def decode(cluster, stack, holds, let_go):
    cluster.use(HeldTransport(holds))
    made = cluster.decode(timeouts=calm_receiver(heartbeat=OFTEN))
    region = HeldRegion.private(layout().pool_bytes)
    stack.callback(region.close)
    region.hold, made.agent._region = holds["read"], region
    stack.callback(let_go)
    return made


# ── decode ───────────────────────────────────────────────────────────────────────────────────────


def test_a_slow_admission_of_one_prefill_silences_no_other(decode, prefills, holds, let_go):
    first, second = prefills
    first.link_up(decode)
    holds["admit"].begin()
    decode.agent.request(Room(1), "127.0.0.1", second.port, [1])
    assert holds["admit"].reached.wait(PATIENCE_S)
    first.hear_beats()
    let_go()
    second.next(Hello)
    second.welcome()
    assert second.next(Grant).room == 1


def test_a_slow_resolver_silences_no_link(decode, prefills, holds, let_go, monkeypatch):
    first, second = prefills
    first.link_up(decode)
    resolve = socket.getaddrinfo

    def resolve_slowly(host, *rest, **more):
        if host == SLOW:
            holds["resolve"].pass_by()
        return resolve("127.0.0.1" if host == SLOW else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_slowly)
    holds["resolve"].begin()
    decode.agent.request(Room(1), SLOW, second.port, [1])
    assert holds["resolve"].reached.wait(PATIENCE_S)
    first.hear_beats()
    let_go()
    second.next(Hello)
    second.welcome()
    assert second.next(Grant).room == 1


def test_a_name_that_is_not_known_fails_the_request_saying_so(decode, prefills):
    decode.agent.request(Room(0), "nowhere.invalid", prefills[0].port, [0])
    error = decode.next(Failed).error
    assert isinstance(error, PeerLost)
    assert "cannot resolve nowhere.invalid" in error.message


def test_slow_checksums_of_one_room_silence_no_link_not_even_their_own(
    decode, prefills, holds, let_go
):
    first, second = prefills
    first.link_up(decode)
    second.link_up(decode, 1)
    holds["read"].begin()
    first.landed(Room(0), checksums=[1])
    assert holds["read"].reached.wait(PATIENCE_S)
    first.hear_beats()
    second.hear_beats()
    let_go()
    assert decode.next(Failed).room == 0


@pytest.mark.parametrize("end", [Released, LandedWord])
def test_a_slow_revocation_silences_no_link_and_holds_the_last_word_back(
    decode, prefills, holds, let_go, end
):
    first, second = prefills
    first.link_up(decode)
    second.link_up(decode, 1)
    holds["revoke"].begin()
    (first.released if end is Released else first.landed)(Room(0))
    assert holds["revoke"].reached.wait(PATIENCE_S)
    first.hear_beats()
    second.hear_beats()
    assert not list(decode.agent.events())
    let_go()
    decode.next(Failed if end is Released else Landed)


def test_a_slow_permission_silences_no_link_and_the_grant_follows_it(
    decode, prefills, holds, let_go
):
    first, second = prefills
    first.link_up(decode)
    holds["permit"].begin()
    decode.agent.request(Room(1), "127.0.0.1", second.port, [1])
    second.next(Hello)
    second.welcome()
    assert holds["permit"].reached.wait(PATIENCE_S)
    first.hear_beats()
    decode.agent.withdraw(Room(1))  # must not overtake the grant
    let_go()
    words = [second.next(Grant, Withdraw) for _ in range(2)]
    assert [type(word) for word in words] == [Grant, Withdraw]


def test_a_slow_fence_silences_no_other_link(decode, prefills, holds, let_go):
    first, second = prefills
    first.link_up(decode)
    second.link_up(decode, 1)
    holds["fence"].begin()
    second.say(Refused(error=PeerLost("restarting").info()))
    assert holds["fence"].reached.wait(PATIENCE_S)
    first.hear_beats()


def test_a_landed_prompt_counts_although_its_prefill_ends_while_it_is_checked(
    decode, prefills, holds, let_go
):
    first = prefills[0]
    first.link_up(decode)
    holds["revoke"].begin()
    first.landed(Room(0))
    assert holds["revoke"].reached.wait(PATIENCE_S)
    first.say(Refused(error=PeerLost("it ends").info()))
    for _ in patiently():
        if not decode.agent.statistics().num_links:
            break
        wait([], 0.005)
    let_go()
    assert decode.next(Landed).room == 0


# ── prefill ──────────────────────────────────────────────────────────────────────────────────────


class Decode(rig.FakeDecode):
    """A decode that counts heartbeats."""

    def __init__(self, stack, port, transport, epoch):
        super().__init__(stack, port, transport, epoch, heartbeat=OFTEN)

    def link_up(self):
        assert isinstance(self.hello(), Welcome)

    def permit(self, room):
        self.listener.permit(self.admission.peer, Room(room), [room])
        self.grant([room], Room(room))

    def hear_beats(self):
        while self.link.receive() is not None:
            pass
        for _ in range(NUM_BEATS):
            self.next(LinkPing)


@pytest.fixture
def pushing(cluster, stack, holds, let_go):
    """Return a prefill's agent, and two decode ends."""
    cluster.use(HeldTransport(holds))
    agent = cluster.prefill(timeouts=calm_sender(heartbeat=OFTEN)).agent
    ends = [Decode(stack, agent.port, cluster.transport, epoch) for epoch in (21, 22)]
    stack.callback(let_go)
    return agent, *ends


def test_a_slow_connection_to_one_decode_silences_no_other(pushing, holds):
    _, first, second = pushing
    first.link_up()
    holds["connect"].begin()
    second.introduce()
    assert holds["connect"].reached.wait(PATIENCE_S)
    first.hear_beats()


def test_a_long_plan_of_copies_to_one_decode_silences_no_link(pushing, holds):
    agent, first, second = pushing
    for each in (first, second):
        each.link_up()
    agent.expect(Room(1))
    second.permit(1)
    holds["plan"].begin()
    agent.push(Room(1), HeldPages([1], holds["plan"]), 0, range(1))
    assert holds["plan"].reached.wait(PATIENCE_S)
    first.hear_beats()
    second.hear_beats()


@pytest.mark.parametrize("is_writing", [False, True])
def test_a_slow_hang_up_on_one_decode_silences_no_other(pushing, holds, is_writing):
    agent, first, second = pushing
    for each in (first, second):
        each.link_up()
    if is_writing:
        holds["write"].begin()
        agent.expect(Room(1))
        second.permit(1)
        agent.push(Room(1), [1], 0)
        assert holds["write"].reached.wait(PATIENCE_S)
    holds["close"].begin()
    second.introduce()  # anew: the link before it is lost
    assert holds["close"].reached.wait(PATIENCE_S)
    first.hear_beats()


# ── silence ──────────────────────────────────────────────────────────────────────────────────────

# What operators are promised; and how long a peer may at least be silent, busy as it may be.
NOTICED_WITHIN_S, FORGIVEN_S = 2.0, 1.5


def has_turned(agent):
    """Return when the control thread has looked at all its links at the time that it is."""
    for _ in range(2):
        is_done = threading.Event()
        agent._control.post(is_done.set)
        assert is_done.wait(PATIENCE_S)


def check_silence(node, clock):
    """Let time pass in which nothing comes from the only peer."""
    node.wait_until(lambda now: now.num_links == 1)
    clock.now_s += FORGIVEN_S
    has_turned(node.agent)
    assert node.agent.statistics().num_links == 1
    clock.now_s += NOTICED_WITHIN_S - FORGIVEN_S
    has_turned(node.agent)
    assert node.agent.statistics().num_links == 0


def test_a_decode_that_falls_silent_is_lost_in_two_seconds(cluster, stack):
    limits = calm_sender(heartbeat=DEFAULT_HEARTBEAT)
    prefill = cluster.prefill(timeouts=limits, clock=cluster.clock)
    decode = rig.FakeDecode(stack, prefill.agent.port, cluster.transport)
    assert isinstance(decode.hello(), Welcome)
    prefill.agent.expect(ROOM)
    decode.grant([1])
    prefill.next(Granted)
    check_silence(prefill, cluster.clock)
    assert isinstance(prefill.next(events.Released).error, PeerLost)


def test_a_prefill_that_falls_silent_is_lost_in_two_seconds(cluster, stack):
    limits = calm_receiver(heartbeat=DEFAULT_HEARTBEAT)
    decode = cluster.decode(timeouts=limits, clock=cluster.clock)
    prefill = rig.FakePrefill(stack)
    prefill.meet(decode)
    prefill.welcome()
    prefill.next(Grant)
    check_silence(decode, cluster.clock)
    assert isinstance(decode.next(Lost).error, PeerLost)
    assert decode.next() == Safe(ROOM)


def test_a_prefill_that_never_answers_hello_fails_the_request_in_time(cluster, stack):
    limits = ReceiverTimeouts(heartbeat=calm_receiver().heartbeat)
    decode = cluster.decode(timeouts=limits, clock=cluster.clock)
    rig.FakePrefill(stack).meet(decode)
    cluster.clock.now_s += 4.9
    has_turned(decode.agent)
    assert not list(decode.agent.events())
    cluster.clock.now_s += 0.2
    assert isinstance(decode.next(Failed).error, PeerLost)
    decode.wait_until(lambda now: now.num_links == 0)


@pytest.fixture
def listener(stack):
    region = stack.enter_context(MemoryRegion.private(4096))
    made = TcpTransport().listen(Pool(region, 4096, 1))
    stack.callback(made.close)
    return made


def stream_to(listener, stack):
    facts = listener.admit("127.0.0.1").offer.descriptor
    stream = socket.create_connection((facts["host"], facts["port"]), PATIENCE_S)
    return stack.enter_context(stream)


def test_a_stream_that_never_proves_itself_is_cut_in_time(listener, stack, monkeypatch):
    assert HANDSHAKE_TIMEOUT_S == 5.0  # as it is where tests need no patience
    monkeypatch.setattr(tcp_stream, "HANDSHAKE_TIMEOUT_S", 0.05)
    stream = stream_to(listener, stack)
    assert len(stream.recv(tcp_stream.CHALLENGE_BYTES)) == tcp_stream.CHALLENGE_BYTES
    assert stream.recv(1) == b""


def test_no_more_streams_than_that_wait_to_prove_themselves(listener, stack):
    strangers = [stream_to(listener, stack) for _ in range(64)]
    for each in strangers:
        assert each.recv(1)
    assert stream_to(listener, stack).recv(1) == b""
    strangers[0].close()
    rig.until(lambda: stream_to(listener, stack).recv(1))
