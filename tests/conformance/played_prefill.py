"""Plays prefill to a decode node: a bootstrap port, and writes into the node's pages."""

import contextlib
import time

import msgspec
import zmq

from tandem.kvtransfer.checksum import page_sums
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import PagedTokens, plan_copies
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.kvtransfer.transports.tcp_stream import address_toward
from tandem.wire.channel import Inbox, tcp_address, wait
from tandem.wire.errors import ErrorInfo, PeerLost
from tandem.wire.generation import Epoch, new_epoch, new_room
from tandem.wire.hand_off import PROTOCOL, Grant, Hello, LinkPing, ToPrefill
from tests.conformance.played import PlayedHalf

# Of every byte that is written: a small number in each type of element, so that a model can go on from it.
CONTENT = 0x3C
# Of one write.
MAX_PAGES = 4


class PlayedPrefill(PlayedHalf):
    """A prefill half that does what a test asks, lies included.

    Args:
        node: An `Address`. The suite's nodes also have `page_size` in tokens, `start(room, num_tokens, host,
            port)`, to take over a prompt from the prefill at that port, `cancel(room)` and `outcome(room)`:
            `landed` once a token came, the code of the error, or empty before.

    Attributes:
        hello: Of the last decode that connected.
        connection: Into its pages.
    """

    def __init__(self, node, *, transport="tcp", epoch=None):
        super().__init__(node, Epoch(epoch or new_epoch()))
        self.host, self.transport = address_toward(node.host, "0.0.0.0"), transport
        address = tcp_address(self.host, 0)
        self.inbox = self.channel = Inbox(address, ToPrefill, node.key, self.beat)
        self.port, self._peer = self.inbox.port, None
        self._opened = contextlib.ExitStack()

    # ── what a hand-off begins with ──────────────────────────────────────────────────────────────

    def meet(self, num_pages=2):
        """Have decode connect for a new request, and refuse its offers until one is of TCP; return the room."""
        room = self.start(num_pages)
        self.hello = self.expect(Hello)
        while self.hello.offers and not self._tcp_offers():
            self.refuse("transfer_refused")
            self.hello = self.expect(Hello)
        return room

    def start(self, num_pages=2):
        """Give decode a new request; return the room."""
        room = new_room()
        self.node.start(room, num_pages * self.node.page_size, self.host, self.port)
        return room

    def offer(self):
        """Return decode's offer of TCP."""
        found = self._tcp_offers()
        assert found, f"tcp is not among {[offer.name for offer in self.hello.offers]}"
        return found[0]

    def _tcp_offers(self):
        return [offer for offer in self.hello.offers if offer.name == "tcp"]

    def stand(self, num_pages=2, **new):
        """Make a new link for a new request; return its grant."""
        room = self.meet(num_pages)
        self.layout = KVLayout.from_info(self.hello.layout)
        region = MemoryRegion.private(MAX_PAGES * self.layout.page_bytes)
        source = self._opened.enter_context(region)
        source.array()[:] = CONTENT
        self.connection = TcpTransport().connect(self.offer(), source)
        self._opened.callback(self.connection.close)
        self.welcome(**new)
        return self.granted(room, num_pages)

    def granted(self, room, num_pages=2):
        """Wait for the grant of a room; check it."""
        grant = self.expect(Grant)
        assert grant.room == room, f"{grant} is of another room"
        assert grant.epoch == self.hello.epoch, f"{grant} is of another epoch than Hello"
        num_held, rest = divmod(grant.have_tokens, self.layout.page_size)
        assert not rest, f"{grant} holds part of a page"
        assert len(set(grant.page_ids)) == len(grant.page_ids), f"{grant} has a page twice"
        assert all(0 <= page < self.layout.num_pages for page in grant.page_ids), f"{grant}"
        assert len(grant.page_ids) + num_held == num_pages, f"{grant} is of another prompt"
        return grant

    # ── what prefill sends and writes ────────────────────────────────────────────────────────────

    def say(self, kind, **fields):
        """Send a message, which may hold anything."""
        self.send_raw(msgspec.msgpack.encode({"type": kind, "epoch": self.epoch, **fields}))

    def send_raw(self, frame):
        """Send any bytes."""
        assert self._peer is not None, "nobody is connected"
        try:
            self.inbox.socket.send_multipart([self._peer, frame])
        except zmq.ZMQError as error:
            raise AssertionError(f"decode hung up: {error}") from error

    def welcome(self, **lies):
        """Send Welcome."""
        self.say("Welcome", **{"transport": self.transport, "protocol": PROTOCOL, **lies})

    def refuse(self, code="peer_lost"):
        """Send Refused."""
        self.say("Refused", error=ErrorInfo(code=code, message="the test refuses"))

    def land(self, room, **lies):
        """Send Landed."""
        self.say("Landed", **{"room": room, "first_token": 5, "seed": 1, **lies})

    def release(self, room, code="engine_failed", **lies):
        """Send Released."""
        error = ErrorInfo(code=code, message="the test gives this request up")
        self.say("Released", **{"room": room, "error": error, **lies})

    def write(self, room, *page_ids):
        """Write whole pages."""
        own = msgspec.structs.replace(self.layout, num_pages=MAX_PAGES, strips=())
        source = PagedTokens(own, range(len(page_ids)))
        tokens = range(len(page_ids) * self.layout.page_size)
        plan = plan_copies(source, PagedTokens(self.layout, page_ids), tokens)
        assert plan.total_bytes == len(page_ids) * self.layout.page_bytes
        self.connection.write(room, plan)

    def sums(self, grant):
        """Return the checksums of a grant whose pages were all written."""
        layout = msgspec.structs.replace(self.layout, num_pages=1, strips=())
        with MemoryRegion.private(layout.page_bytes) as page:
            page.array()[:] = CONTENT
            one = PagedTokens(layout, [0])
            return page_sums(page, one, one, layout.page_size) * len(grant.page_ids)

    def hand_over(self):
        """Do an honest hand-off over the link that stands: the node serves on."""
        self.finish(self.granted(self.start()))

    def finish(self, grant, **new):
        """Push a grant's pages, and wait for decode to go on from them."""
        self.write(grant.room, *grant.page_ids)
        self.land(grant.room, checksums=self.sums(grant), **new)
        assert self.outcome(grant.room) == "landed"

    def outcome(self, room):
        """Wait for the end of a request at decode."""
        deadline_s = time.monotonic() + self.patience_s
        while not (ended := self.node.outcome(room)):
            assert time.monotonic() < deadline_s, f"no end of the request in {self.patience_s:g} s"
            self._turn()
        return ended

    def ping(self):
        """Send a ping once decode has connected."""
        if self._peer is not None:
            with contextlib.suppress(PeerLost):
                self.inbox.send(self._peer, LinkPing(epoch=self.epoch))

    def receive(self):
        """Return the next message of the last decode that connected, or None after a few milliseconds."""
        wait([self.inbox], 0.01)
        envelope = self.inbox.receive()
        if envelope is None:
            return None
        if isinstance(envelope.message, Hello):
            self._peer = envelope.peer
        return envelope.message if envelope.peer == self._peer else None

    def close(self):
        """Hang up on everybody."""
        self._opened.close()
        self.inbox.close()
