"""Heartbeats: slow calls silence no other link, and silent peers are lost in time.

Transports, resolvers and checksums are held until the test lets go, so nothing here depends on how fast a
machine is. None of them may be called by a control thread in any test of this file, held or not.
"""

import socket
from collections.abc import Sequence
from threading import Event, Thread

import pytest
from structlog.testing import capture_logs

from tandem.kvtransfer import events
from tandem.kvtransfer.agents import receiver_links, sender_links
from tandem.kvtransfer.agents.control import TURN_S, HeartbeatSchedule
from tandem.kvtransfer.agents.receiver import ReceiverTimeouts
from tandem.kvtransfer.events import RoomFailed, RoomGranted, RoomLanded, RoomLost, RoomSafe
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import tcp_stream
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.kvtransfer.transports.tcp_stream import HANDSHAKE_TIMEOUT_S
from tandem.wire.channel import DEFAULT_HEARTBEAT, Heartbeat
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Room
from tandem.wire.hand_off import Grant, Hello, Landed, Released, Welcome, Withdraw
from tests.calm import LONG_S, CalmHeartbeat, calm_receiver, calm_sender
from tests.kvtransfer import rig
from tests.kvtransfer.rig import ROOM, layout
from tests.patience import PATIENCE_S, until

OFTEN = CalmHeartbeat(0.02)
SLOW = "slow.example.org"


CONTROL_THREADS = {"kv-decode", "kv-prefill"}


class HeldRegion(MemoryRegion):
    """Memory whose reader is held."""

    hold: rig.Hold

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


@pytest.fixture
def transport():
    made = rig.Scripted()
    yield made
    assert not [name for name, hold in made.holds.items() if hold.threads & CONTROL_THREADS]


@pytest.fixture
def holds(transport):
    return transport.holds


@pytest.fixture
def let_go(holds):
    """Let everything go, before what waits for it is closed."""
    return lambda: [hold.let_go() for hold in list(holds.values())]


def link_up(prefill, decode, room=0):
    rig.meet(prefill, decode, Room(room), [room])
    prefill.welcome()
    assert prefill.expect(Grant).room == room


@pytest.fixture
def prefills(stack):
    return [rig.fake_prefill(stack, epoch, heartbeat=OFTEN) for epoch in (11, 12)]


@pytest.fixture
def decode(cluster, stack, transport, holds, let_go):
    cluster.use(transport)
    made = cluster.decode(timeouts=calm_receiver(heartbeat=OFTEN))
    region = HeldRegion.private(layout().pool_bytes)
    stack.callback(region.close)
    region.hold, made.agent._region = holds["read"], region
    stack.callback(let_go)
    return made


# ── decode ───────────────────────────────────────────────────────────────────────────────────────


def ask(decode, prefill, host="127.0.0.1"):
    decode.agent.request(Room(1), host, prefill.port, [1])


def answer_hello(decode, prefill):
    ask(decode, prefill)
    prefill.expect(Hello)
    prefill.welcome()


# What makes decode call what is held, for its second prefill; the third has begun a hand-off already.
SLOW_AT_DECODE = {
    "admit": ask,
    "resolve": lambda decode, prefill: ask(decode, prefill, SLOW),
    "permit": answer_hello,
    "read": lambda _, prefill: prefill.land(Room(1), checksums=[1]),
    "revoke": lambda _, prefill: prefill.release(Room(1)),
    "fence": lambda _, prefill: prefill.refuse(),
}


@pytest.mark.parametrize("call", SLOW_AT_DECODE)
def test_a_slow_call_for_one_prefill_silences_no_link(
    decode, prefills, holds, let_go, monkeypatch, call
):
    first, second = prefills
    resolve = socket.getaddrinfo

    def resolve_slowly(host, *rest, **more):
        if host == SLOW:
            holds["resolve"].pass_by()
        return resolve("127.0.0.1" if host == SLOW else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_slowly)
    link_up(first, decode)
    is_up = call in ("read", "revoke", "fence")
    if is_up:
        link_up(second, decode, 1)
    holds[call].begin()
    SLOW_AT_DECODE[call](decode, second)
    assert holds[call].reached.wait(PATIENCE_S)
    first.hear_beats()
    if call in ("read", "revoke"):
        second.hear_beats()
    let_go()
    if is_up:
        assert decode.next(RoomLost if call == "fence" else RoomFailed).room == 1
        return
    if call != "permit":
        second.expect(Hello)
        second.welcome()
    assert second.expect(Grant).room == 1


def test_unknown_host_name_fails_the_request_with_the_name(decode, prefills):
    decode.agent.request(Room(0), "nowhere.invalid", prefills[0].port, [0])
    error = decode.next(RoomFailed).error
    assert isinstance(error, PeerLost)
    assert "cannot resolve nowhere.invalid" in error.message


@pytest.mark.parametrize("end", [Released, Landed])
def test_slow_revocation_silences_no_link_and_delays_the_last_event(
    decode, prefills, holds, let_go, end
):
    first, second = prefills
    link_up(first, decode)
    link_up(second, decode, 1)
    holds["revoke"].begin()
    (first.release if end is Released else first.land)(Room(0))
    assert holds["revoke"].reached.wait(PATIENCE_S)
    first.hear_beats()
    second.hear_beats()
    assert not list(decode.agent.events())
    let_go()
    decode.next(RoomFailed if end is Released else RoomLanded)


def test_a_slow_permission_silences_no_link_and_the_grant_follows_it(
    decode, prefills, holds, let_go
):
    first, second = prefills
    link_up(first, decode)
    holds["permit"].begin()
    decode.agent.request(Room(1), "127.0.0.1", second.port, [1])
    second.expect(Hello)
    second.welcome()
    assert holds["permit"].reached.wait(PATIENCE_S)
    first.hear_beats()
    decode.agent.withdraw(Room(1))  # must not overtake the grant
    let_go()
    words = [second.expect(Grant | Withdraw) for _ in range(2)]
    assert [type(word) for word in words] == [Grant, Withdraw]


def test_landed_prompt_counts_if_prefill_ends_during_the_check(decode, prefills, holds, let_go):
    first = prefills[0]
    link_up(first, decode)
    holds["revoke"].begin()
    first.land(Room(0))
    assert holds["revoke"].reached.wait(PATIENCE_S)
    first.refuse()
    until(lambda: not decode.agent.statistics().num_links)
    let_go()
    assert decode.next(RoomLanded).room == 0


# ── prefill ──────────────────────────────────────────────────────────────────────────────────────


def permit(decode, room):
    decode.listener.permit(decode.admission.peer, Room(room), [room])
    decode.grant([room], room=Room(room))


@pytest.fixture
def pushing(cluster, stack, transport, let_go):
    """Return a prefill's agent, and two decode ends."""
    cluster.use(transport)
    agent = cluster.prefill(timeouts=calm_sender(heartbeat=OFTEN)).agent
    ends = [
        rig.fake_decode(stack, agent.port, transport, epoch, heartbeat=OFTEN) for epoch in (21, 22)
    ]
    stack.callback(let_go)
    return agent, *ends


# What makes prefill call what is held, for its second decode.
SLOW_AT_PREFILL = {
    "connect": lambda agent, decode, holds: decode.introduce(),
    "plan": lambda agent, decode, holds: agent.push(
        Room(1), HeldPages([1], holds["plan"]), 0, range(1)
    ),
    "close": lambda agent, decode, holds: decode.introduce(),  # the link before it is lost
}


@pytest.mark.parametrize(
    ("call", "is_writing"),
    [("connect", False), ("plan", False), ("close", False), ("close", True)],
)
def test_a_slow_call_for_one_decode_silences_no_link(pushing, holds, call, is_writing):
    agent, first, second = pushing
    assert isinstance(first.hello(), Welcome)
    if call != "connect":
        assert isinstance(second.hello(), Welcome)
        agent.expect(Room(1))
        permit(second, 1)
    if is_writing:
        holds["write"].begin()
        agent.push(Room(1), [1], 0)
        assert holds["write"].reached.wait(PATIENCE_S)
    holds[call].begin()
    SLOW_AT_PREFILL[call](agent, second, holds)
    assert holds[call].reached.wait(PATIENCE_S)
    first.hear_beats()
    if call == "plan":
        second.hear_beats()


# ── silence ──────────────────────────────────────────────────────────────────────────────────────


def check_silence(node, clock, limit_s=10.0):
    """Let time pass in which nothing comes from the only peer, which stays connected."""
    node.wait_until(lambda now: now.num_links == 1)
    clock.now_s += limit_s - 0.1
    rig.has_turned(node.agent)
    assert node.agent.statistics().num_links == 1
    clock.now_s += 0.2
    rig.has_turned(node.agent)
    assert node.agent.statistics().num_links == 0


def test_connected_decode_is_lost_after_ten_seconds_of_silence(cluster, stack):
    limits = calm_sender(heartbeat=DEFAULT_HEARTBEAT)
    prefill = cluster.prefill(timeouts=limits, clock=cluster.clock)
    decode = rig.fake_decode(stack, prefill.agent.port, cluster.transport)
    decode.is_pinging = False
    assert isinstance(decode.hello(), Welcome)
    prefill.agent.expect(ROOM)
    decode.grant([1], room=ROOM)
    prefill.next(RoomGranted)
    check_silence(prefill, cluster.clock)
    assert isinstance(prefill.next(events.RoomReleased).error, PeerLost)


def test_connected_prefill_is_lost_after_ten_seconds_of_silence(cluster, stack):
    limits = calm_receiver(heartbeat=DEFAULT_HEARTBEAT)
    decode = cluster.decode(timeouts=limits, clock=cluster.clock)
    prefill = rig.fake_prefill(stack)
    prefill.is_pinging = False
    rig.meet(prefill, decode)
    prefill.welcome()
    prefill.expect(Grant)
    check_silence(decode, cluster.clock)
    assert isinstance(decode.next(RoomLost).error, PeerLost)
    assert decode.next() == RoomSafe(ROOM)


@pytest.mark.parametrize("is_prefill", [True, False])
def test_end_of_a_peer_that_stops_is_no_fault(cluster, is_prefill):
    ends = rig.begin(cluster)
    for end in ends:
        end.wait_until(lambda now: now.num_links == 1)
    stopping, other = ends if is_prefill else reversed(ends)
    ends[1].wait_until(lambda now: now.num_granted == 1)
    with capture_logs() as logs:
        stopping.agent.close()
        other.wait_until(lambda now: now.num_links == 0)
    assert [each["event"] for each in logs if each["event"].startswith("kv_link")] == [
        "kv_link.closed"
    ]
    assert {each["log_level"] for each in logs} == {"info"}


def test_prefill_that_stops_waits_until_decode_has_read_its_last_message(cluster, monkeypatch):
    monkeypatch.setattr(sender_links, "FAREWELL_S", PATIENCE_S)
    is_held, may_read, wait = Event(), Event(), receiver_links.wait

    def wait_late(*args):
        is_held.set()
        assert may_read.wait(PATIENCE_S)
        wait(*args)

    prefill, decode = rig.begin(cluster)
    for end in (prefill, decode):
        end.wait_until(lambda now: now.num_links == 1)
    monkeypatch.setattr(receiver_links, "wait", wait_late)
    assert is_held.wait(PATIENCE_S)
    stopping = Thread(target=prefill.agent.close)
    with capture_logs() as logs:
        stopping.start()
        stopping.join(0.3)  # if it did not wait, it would end now
        assert stopping.is_alive()
        may_read.set()
        decode.wait_until(lambda now: now.num_links == 0)
        stopping.join(PATIENCE_S)
    assert [each["event"] for each in logs if each["event"].startswith("kv_link")] == [
        "kv_link.closed"
    ]


def test_end_of_a_peer_that_announced_nothing_is_a_fault(cluster, stack):
    decode = cluster.decode(timeouts=calm_receiver())
    prefill = rig.fake_prefill(stack)
    rig.meet(prefill, decode)
    prefill.welcome()
    prefill.expect(Grant)
    with capture_logs() as logs:
        prefill.close()
        decode.wait_until(lambda now: now.num_links == 0)
    [lost] = [each for each in logs if each["event"] == "kv_link.lost"]
    assert lost["log_level"] == "warning"


# Pings of this interval, and silence, detect nothing in a test.
RARE = Heartbeat(60.0, busy_s=LONG_S)


def test_prefill_whose_connection_ends_is_lost_before_a_ping_is_due(cluster, stack):
    decode = cluster.decode(timeouts=calm_receiver(heartbeat=RARE), clock=cluster.clock)
    prefill = rig.fake_prefill(stack)
    rig.meet(prefill, decode)
    prefill.welcome()
    prefill.expect(Grant)
    prefill.close()
    decode.wait_until(lambda now: now.num_links == 0)


def test_decode_whose_connection_ends_is_lost_before_a_ping_is_due(cluster, stack):
    prefill = cluster.prefill(timeouts=calm_sender(heartbeat=RARE), clock=cluster.clock)
    lost, kept = (
        rig.fake_decode(stack, prefill.agent.port, cluster.transport, epoch) for epoch in (21, 22)
    )
    for decode in (lost, kept):
        assert isinstance(decode.hello(), Welcome)
    rig.has_turned(prefill.agent)  # the first ping is sent
    lost.close()
    cluster.clock.now_s += TURN_S
    prefill.wait_until(lambda now: now.num_links == 1)


def test_many_lost_connections_cause_a_ping_per_turn():
    schedule = HeartbeatSchedule(RARE, 0.0)
    num_pings = 0
    for number in range(1000):  # over ten turns
        schedule.hasten()
        num_pings += schedule.is_ping_due(number * TURN_S / 100)
    assert num_pings == 10


def test_decode_with_a_longer_interval_may_be_silent_for_longer(cluster, stack):
    prefill = cluster.prefill(
        timeouts=calm_sender(heartbeat=DEFAULT_HEARTBEAT), clock=cluster.clock
    )
    decode = rig.fake_decode(stack, prefill.agent.port, cluster.transport)
    decode.is_pinging = False
    assert decode.hello(heartbeat_s=4.0).heartbeat_s == DEFAULT_HEARTBEAT.interval_s
    check_silence(prefill, cluster.clock, 14.0)


@pytest.mark.parametrize(("interval_s", "limit_s"), [(4.0, 14.0), (0.02, 10.0)])
def test_longer_interval_of_both_ends_determines_when_prefill_is_lost(
    cluster, stack, interval_s, limit_s
):
    limits = calm_receiver(heartbeat=DEFAULT_HEARTBEAT)
    decode = cluster.decode(timeouts=limits, clock=cluster.clock)
    prefill = rig.fake_prefill(stack)
    prefill.is_pinging = False
    assert rig.meet(prefill, decode).heartbeat_s == DEFAULT_HEARTBEAT.interval_s
    prefill.welcome(heartbeat_s=interval_s)
    prefill.expect(Grant)
    check_silence(decode, cluster.clock, limit_s)


def test_interval_above_a_minute_is_no_valid_message(cluster, stack):
    decode = cluster.decode(timeouts=calm_receiver(), clock=cluster.clock)
    prefill = rig.fake_prefill(stack)
    rig.meet(prefill, decode)
    prefill.welcome(heartbeat_s=61.0)
    prefill.welcome()
    assert prefill.expect(Grant).room == ROOM


def test_prefill_that_registers_its_pool_has_a_minute_while_it_sends_pings(cluster, stack):
    limits = ReceiverTimeouts(heartbeat=calm_receiver().heartbeat)
    decode = cluster.decode(timeouts=limits, clock=cluster.clock)
    prefill = rig.fake_prefill(stack)
    rig.meet(prefill, decode)
    for _ in range(14):
        cluster.clock.now_s += 4.2  # 58.8 s in all
        prefill.say("LinkPing")
        until(lambda: link_of(decode).deadline_s > cluster.clock.now_s + 1)
    assert not list(decode.agent.events())
    cluster.clock.now_s += 1.3
    assert isinstance(decode.next(RoomFailed).error, PeerLost)


def link_of(decode):
    [link] = decode.agent._links.links.values()
    return link


def test_a_prefill_that_never_answers_hello_fails_the_request_in_time(cluster, stack):
    limits = ReceiverTimeouts(heartbeat=calm_receiver().heartbeat)
    decode = cluster.decode(timeouts=limits, clock=cluster.clock)
    rig.meet(rig.fake_prefill(stack), decode)
    cluster.clock.now_s += 4.9
    rig.has_turned(decode.agent)
    assert not list(decode.agent.events())
    cluster.clock.now_s += 0.2
    assert isinstance(decode.next(RoomFailed).error, PeerLost)
    decode.wait_until(lambda now: now.num_links == 0)


@pytest.fixture
def listener(stack):
    region = stack.enter_context(MemoryRegion.private(4096))
    made = TcpTransport().listen(Pool.packed(region, 4096, 1))
    stack.callback(made.close)
    return made


def stream_to(listener, stack):
    facts = listener.admit("127.0.0.1").offer.descriptor
    stream = socket.create_connection((facts["host"], facts["port"]), PATIENCE_S)
    return stack.enter_context(stream)


def test_stream_that_never_authenticates_is_closed_in_time(listener, stack, monkeypatch):
    assert HANDSHAKE_TIMEOUT_S == 5.0  # as it is where tests need no patience
    monkeypatch.setattr(tcp_stream, "HANDSHAKE_TIMEOUT_S", 0.05)
    stream = stream_to(listener, stack)
    assert len(stream.recv(tcp_stream.CHALLENGE_BYTES)) == tcp_stream.CHALLENGE_BYTES
    assert stream.recv(1) == b""


def test_number_of_unauthenticated_streams_is_limited(listener, stack):
    strangers = [stream_to(listener, stack) for _ in range(64)]
    for each in strangers:
        assert each.recv(1)
    assert stream_to(listener, stack).recv(1) == b""
    strangers[0].close()
    until(lambda: stream_to(listener, stack).recv(1))
