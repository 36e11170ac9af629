"""Plays prefill to a decode node under test: a bootstrap port, and writes into the node's pages by TCP."""

import contextlib
import time
from typing import Any, Protocol

import msgspec
import zmq
from typing_extensions import override

from tandem.conformance.play import Player, Subject
from tandem.kvtransfer.checksum import page_sums, sampled_slabs
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import PagedTokens, plan_copies
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Connection
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.kvtransfer.transports.tcp_stream import address_toward
from tandem.wire.channel import Inbox, Peer, tcp_address, wait
from tandem.wire.errors import ErrorInfo, PeerLost
from tandem.wire.generation import Room, new_epoch, new_room
from tandem.wire.hand_off import (
    PROTOCOL,
    Grant,
    Hello,
    LinkPing,
    ToPrefill,
    TransportOffer,
)
from tandem.wire.messages import Message

# Of every page that is written: a small number in each type of element, so that a model can go on from it.
CONTENT = 0x3C
FIRST_TOKEN = 5
# That one write has.
MOST_PAGES = 4


class DecodeUnderTest(Subject, Protocol):
    """A decode node, as whoever gives it requests.

    Attributes:
        page_size: Tokens in its pages.
    """

    page_size: int

    def start(self, room: Room, num_tokens: int, host: str, port: int) -> None:
        """Have it take over a prompt of so many tokens in a room, from the prefill at this port."""
        ...

    def cancel(self, room: Room) -> None:
        """Give the request up."""
        ...

    def outcome(self, room: Room) -> str:
        """Return `landed` once a token came, or the code of the error; empty before."""
        ...


class PrefillPlayer(Player):
    """A prefill half that does what a test asks, lies included.

    Attributes:
        hello: Of the last decode that connected.
        connection: Into its pages.
    """

    hello: Hello
    connection: Connection
    layout: KVLayout

    def __init__(self, subject: DecodeUnderTest) -> None:
        super().__init__(subject, new_epoch())
        self.node = subject
        self.host = address_toward(subject.host, "0.0.0.0")
        address = tcp_address(self.host, 0)
        self.inbox: Inbox[ToPrefill] = Inbox(address, ToPrefill, subject.key, self.beat)
        self._peer: Peer | None = None
        self._opened = contextlib.ExitStack()

    # ── what a hand-off begins with ──────────────────────────────────────────────────────────────

    def meet(self, num_pages: int = 2) -> Room:
        """Have decode connect for a new request."""
        room = self.start(num_pages)
        self.hello = self.expect(Hello)
        return room

    def start(self, num_pages: int = 2) -> Room:
        """Give decode a new request."""
        room = new_room()
        self.node.start(room, num_pages * self.node.page_size, self.host, self.inbox.port)
        return room

    def offer(self) -> TransportOffer:
        """Return decode's offer of TCP."""
        found = [offer for offer in self.hello.offers if offer.name == "tcp"]
        assert found, f"tcp is not among {[offer.name for offer in self.hello.offers]}"
        return found[0]

    def stand(self, num_pages: int = 2, **new: Any) -> Grant:
        """Make a new link for a new request; return its grant."""
        room = self.meet(num_pages)
        self.layout = KVLayout.from_info(self.hello.layout)
        size_bytes = MOST_PAGES * self.layout.page_bytes
        source = self._opened.enter_context(MemoryRegion.private(size_bytes))
        source.array()[:] = CONTENT
        self.connection = TcpTransport().connect(self.offer(), source)
        self._opened.callback(self.connection.close)
        protocol = min(self.hello.protocol, PROTOCOL)
        self.say("Welcome", **{"transport": "tcp", "protocol": protocol, **new})
        return self.granted(room, num_pages)

    def granted(self, room: Room, num_pages: int) -> Grant:
        """Wait for the grant of a room; check it."""
        grant = self.expect(Grant)
        assert grant.room == room, f"{grant} is of another room"
        assert grant.epoch == self.hello.epoch, f"{grant} is of another epoch than Hello"
        assert grant.have_tokens % self.layout.page_size == 0
        num_granted = len(grant.page_ids)
        assert len(set(grant.page_ids)) == num_granted, f"{grant} has a page twice"
        assert all(0 <= page < self.layout.num_pages for page in grant.page_ids), f"{grant}"
        num_held = grant.have_tokens // self.layout.page_size
        assert num_granted + num_held == num_pages, f"{grant} is of another prompt"
        return grant

    # ── what prefill sends and writes ────────────────────────────────────────────────────────────

    def say(self, kind: str, **fields: Any) -> None:
        """Send a message, which may hold anything."""
        self.say_raw(msgspec.msgpack.encode({"type": kind, "epoch": self.epoch, **fields}))

    def say_raw(self, frame: bytes) -> None:
        """Send any bytes."""
        assert self._peer is not None, "nobody is connected"
        try:
            self.inbox.socket.send_multipart([self._peer, frame])
        except zmq.ZMQError as error:
            raise AssertionError(f"decode hung up: {error}") from error

    def write(self, room: Room, *page_ids: int) -> None:
        """Write whole pages."""
        size, num_tokens = self.layout.page_size, len(page_ids) * self.layout.page_size
        own = msgspec.structs.replace(self.layout, num_pages=MOST_PAGES, strips=())
        source = PagedTokens(own, range(len(page_ids)))
        plan = plan_copies(source, PagedTokens(self.layout, page_ids), range(num_tokens))
        assert plan.total_bytes == num_tokens // size * self.layout.page_bytes
        self.connection.write(room, plan)

    def land(self, grant: Grant, **lies: Any) -> None:
        """Send Landed."""
        self.say("Landed", **{"room": grant.room, "first_token": FIRST_TOKEN, "seed": 1, **lies})

    def sums(self, grant: Grant) -> list[int]:
        """Return the checksums of a grant whose pages were all written."""
        layout = msgspec.structs.replace(self.layout, num_pages=1, strips=())
        slabs = sampled_slabs(grant.room, layout, 1)
        with MemoryRegion.private(layout.page_bytes) as page:
            page.array()[:] = CONTENT
            one = PagedTokens(layout, [0])
            (digest,) = page_sums(page, one, one, layout.page_size, slabs=slabs)
        return [digest] * len(grant.page_ids)

    def release(self, room: Room, code: str = "engine_failed") -> None:
        """Send Released."""
        error = ErrorInfo(code=code, message="the suite gives this request up")
        self.say("Released", room=room, error=error)

    def hand_over(self) -> None:
        """Do an honest hand-off over the link that stands: the node serves on."""
        self.finish(self.granted(self.start(), 2))

    def finish(self, grant: Grant, **new: Any) -> None:
        """Push a grant's pages, and wait for decode to go on from them."""
        self.write(grant.room, *grant.page_ids)
        self.land(grant, checksums=self.sums(grant), **new)
        assert self.outcome(grant.room) == "landed"

    def outcome(self, room: Room) -> str:
        """Wait for the end of a request at decode."""
        deadline_s = time.monotonic() + self.patience_s
        while not (ended := self.node.outcome(room)):
            assert time.monotonic() < deadline_s, (
                f"the request did not end in {self.patience_s:g} s"
            )
            self._turn()
        return ended

    @override
    def ping(self) -> None:
        if self._peer is not None:
            with contextlib.suppress(PeerLost):
                self.inbox.send(self._peer, LinkPing(epoch=self.epoch))

    @override
    def receive(self) -> Message | None:
        wait([self.inbox], 0.01)
        envelope = self.inbox.receive()
        if envelope is None:
            return None
        if isinstance(envelope.message, Hello):
            self._peer = envelope.peer
        return envelope.message if envelope.peer == self._peer else None

    def close(self) -> None:
        """Hang up on everybody."""
        self._opened.close()
        self.inbox.close()
