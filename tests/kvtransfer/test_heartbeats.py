"""Whatever a transport, a resolver or a checksum takes its time over, other links hear the heartbeat.

Each of them is held until the test lets go, so nothing here depends on how fast a machine is. None of them
may be called by a control thread in any test of this file, held or not.
"""

import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from tandem.kvtransfer.bootstrap import SenderEnd
from tandem.kvtransfer.events import Failed, Landed
from tandem.kvtransfer.receiver import DecodeAgent
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sender import PrefillAgent
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.loopback import (
    LoopbackConnection,
    LoopbackListener,
    LoopbackTransport,
)
from tandem.wire.channel import Inbox, Link, Waker, wait
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.hand_off import (
    FromPrefill,
    Grant,
    Hello,
    LinkPing,
    Refused,
    Released,
    ToPrefill,
    Welcome,
    Withdraw,
)
from tandem.wire.hand_off import Landed as LandedWord
from tandem.wire.ids import Epoch, Room
from tests.calm import CalmHeartbeat, calm_receiver, calm_sender
from tests.kvtransfer.test_agents import layout
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


class Prefill:
    """A prefill that does what a test says: its bootstrap port and nothing behind it."""

    def __init__(self, epoch):
        self.epoch = Epoch(epoch)
        self.inbox: Inbox[ToPrefill] = Inbox("tcp://127.0.0.1:0", ToPrefill, heartbeat=OFTEN)
        self.port = self.inbox.port
        self._peer = None

    def next(self, kind):
        for _ in patiently():
            while (envelope := self.inbox.receive()) is not None:
                self._peer = envelope.peer
                if isinstance(envelope.message, kind):
                    return envelope.message
            wait([self.inbox], 0.1)
        raise AssertionError(f"no {kind}")

    def say(self, message):
        self.inbox.send(self._peer, message)

    def welcome(self):
        self.next(Hello)
        self.say(Welcome(epoch=self.epoch, transport="loopback"))

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
def prefills():
    made = [Prefill(11), Prefill(12)]
    yield made
    for each in made:
        each.inbox.close()


class Decode:
    def __init__(self, holds):
        self.region = HeldRegion.private(layout().pool_bytes)
        self.region.hold = holds["read"]
        self.waker = Waker()
        self.agent = DecodeAgent(
            epoch=Epoch(2),
            fingerprint="llama",
            layout=layout(),
            region=self.region,
            transports=[HeldTransport(holds)],
            waker=self.waker,
            timeouts=calm_receiver(heartbeat=OFTEN),
        )

    def ask(self, prefill, room, host="127.0.0.1"):
        self.agent.request(Room(room), host, prefill.port, [room])

    def next(self, kind):
        for _ in patiently():
            for event in self.agent.events():
                assert isinstance(event, kind), event
                return event
            wait([], 0.1, self.waker)
        raise AssertionError(f"no {kind}")


@pytest.fixture
def decode(holds, let_go):
    made = Decode(holds)
    yield made
    let_go()
    made.agent.close()
    made.waker.close()
    made.region.close()


# ── decode ───────────────────────────────────────────────────────────────────────────────────────


def landed(prefill, room, checksums=()):
    return LandedWord(
        epoch=prefill.epoch,
        room=Room(room),
        first_token=9,
        seed=77,
        checksums=list(checksums),
        checksum_one_in=1,
    )


def link_up(decode, prefill, room=0):
    decode.ask(prefill, room)
    prefill.welcome()
    assert prefill.next(Grant).room == room


def test_a_slow_admission_of_one_prefill_silences_no_other(decode, prefills, holds, let_go):
    first, second = prefills
    link_up(decode, first)
    holds["admit"].begin()
    decode.ask(second, 1)
    assert holds["admit"].reached.wait(PATIENCE_S)
    first.hear_beats()
    let_go()
    second.welcome()
    assert second.next(Grant).room == 1


def test_a_slow_resolver_silences_no_link(decode, prefills, holds, let_go, monkeypatch):
    first, second = prefills
    link_up(decode, first)
    resolve = socket.getaddrinfo

    def resolve_slowly(host, *rest, **more):
        if host == SLOW:
            holds["resolve"].pass_by()
        return resolve("127.0.0.1" if host == SLOW else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_slowly)
    holds["resolve"].begin()
    decode.ask(second, 1, host=SLOW)
    assert holds["resolve"].reached.wait(PATIENCE_S)
    first.hear_beats()
    let_go()
    second.welcome()
    assert second.next(Grant).room == 1


def test_a_name_that_is_not_known_fails_the_request_saying_so(decode, prefills):
    decode.ask(prefills[0], 0, host="nowhere.invalid")
    error = decode.next(Failed).error
    assert isinstance(error, PeerLost)
    assert "cannot resolve nowhere.invalid" in error.message


def test_slow_checksums_of_one_room_silence_no_link_not_even_their_own(
    decode, prefills, holds, let_go
):
    first, second = prefills
    link_up(decode, first)
    link_up(decode, second, 1)
    holds["read"].begin()
    first.say(landed(first, 0, checksums=[1]))
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
    link_up(decode, first)
    link_up(decode, second, 1)
    holds["revoke"].begin()
    word = Released(epoch=first.epoch, room=Room(0)) if end is Released else landed(first, 0)
    first.say(word)
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
    link_up(decode, first)
    holds["permit"].begin()
    decode.ask(second, 1)
    second.welcome()
    assert holds["permit"].reached.wait(PATIENCE_S)
    first.hear_beats()
    decode.agent.withdraw(Room(1))  # must not overtake the grant
    let_go()
    words = [second.next((Grant, Withdraw)) for _ in range(2)]
    assert [type(word) for word in words] == [Grant, Withdraw]


def test_a_slow_fence_silences_no_other_link(decode, prefills, holds, let_go):
    first, second = prefills
    link_up(decode, first)
    link_up(decode, second, 1)
    holds["fence"].begin()
    second.say(Refused(error=PeerLost("restarting").info()))
    assert holds["fence"].reached.wait(PATIENCE_S)
    first.hear_beats()


def test_a_landed_prompt_counts_although_its_prefill_ends_while_it_is_checked(
    decode, prefills, holds, let_go
):
    first = prefills[0]
    link_up(decode, first)
    holds["revoke"].begin()
    first.say(landed(first, 0))
    assert holds["revoke"].reached.wait(PATIENCE_S)
    first.say(Refused(error=PeerLost("it ends").info()))
    for _ in patiently():
        if not decode.agent.statistics().num_links:
            break
        wait([], 0.005)
    let_go()
    assert decode.next(Landed).room == 0


# ── prefill ──────────────────────────────────────────────────────────────────────────────────────


class DecodeEnd:
    """A decode that does what a test says: its link, and a listener for what is pushed."""

    def __init__(self, prefill, transport, epoch):
        self.epoch = Epoch(epoch)
        self.region = MemoryRegion.private(layout().pool_bytes)
        self._listener = transport.listen(Pool(self.region, layout().page_bytes, 16))
        self._link: Link[FromPrefill] = Link(
            f"tcp://127.0.0.1:{prefill.port}", FromPrefill, heartbeat=OFTEN
        )
        self.admission = self._listener.admit("127.0.0.1")

    def say(self, message):
        for _ in patiently():
            try:
                return self._link.send(message)
            except PeerLost:
                wait([self._link], 0.005)
        raise AssertionError("no connection")

    def hello(self, epoch=0):
        self.say(
            Hello(
                epoch=epoch or self.epoch,
                fingerprint="llama",
                layout=layout().to_info(),
                offers=[self.admission.offer],
            )
        )

    def grant(self, room):
        self._listener.permit(self.admission.peer, Room(room), [room])
        self.say(Grant(epoch=self.epoch, room=Room(room), page_ids=[room]))

    def next(self, kind):
        for _ in patiently():
            while (message := self._link.receive()) is not None:
                if isinstance(message, kind):
                    return message
            wait([self._link], 0.1)
        raise AssertionError(f"no {kind}")

    def hear_beats(self):
        while self._link.receive() is not None:
            pass
        for _ in range(NUM_BEATS):
            self.next(LinkPing)

    def close(self):
        self._link.close()
        self.region.close()


@pytest.fixture
def pushing(holds, let_go):
    """Yield a prefill, and a function that makes a decode end."""
    transport = HeldTransport(holds)
    region = MemoryRegion.private(layout().pool_bytes)
    end = SenderEnd(Epoch(1), "llama", layout(), region, [transport])
    with ExitStack() as stack:
        agent = PrefillAgent("tcp://127.0.0.1:0", end, timeouts=calm_sender(heartbeat=OFTEN))

        def make(epoch):
            made = DecodeEnd(agent, transport, epoch)
            stack.callback(made.close)
            return made

        yield agent, make
        let_go()
        agent.close()
    region.close()


def test_a_slow_connection_to_one_decode_silences_no_other(pushing, holds):
    _, make = pushing
    first, second = make(21), make(22)
    first.hello()
    first.next(Welcome)
    holds["connect"].begin()
    second.hello()
    assert holds["connect"].reached.wait(PATIENCE_S)
    first.hear_beats()


def test_a_long_plan_of_copies_to_one_decode_silences_no_link(pushing, holds):
    agent, make = pushing
    first, second = make(21), make(22)
    for each in (first, second):
        each.hello()
        each.next(Welcome)
    agent.expect(Room(1))
    second.grant(1)
    holds["plan"].begin()
    agent.push(Room(1), HeldPages([1], holds["plan"]), 0, range(1))
    assert holds["plan"].reached.wait(PATIENCE_S)
    first.hear_beats()
    second.hear_beats()


@pytest.mark.parametrize("is_writing", [False, True])
def test_a_slow_hang_up_on_one_decode_silences_no_other(pushing, holds, is_writing):
    agent, make = pushing
    first, second = make(21), make(22)
    for each in (first, second):
        each.hello()
        each.next(Welcome)
    if is_writing:
        holds["write"].begin()
        agent.expect(Room(1))
        second.grant(1)
        agent.push(Room(1), [1], 0)
        assert holds["write"].reached.wait(PATIENCE_S)
    holds["close"].begin()
    second.hello()  # anew: the link before it is lost
    assert holds["close"].reached.wait(PATIENCE_S)
    first.hear_beats()
