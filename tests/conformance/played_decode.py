"""Plays decode to a prefill node: a link, and a pool that the node writes into."""

import contextlib
import time

import msgspec
import numpy as np

from tandem.kvtransfer.checksum import page_sums
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import PagedTokens
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.kvtransfer.transports.tcp_stream import address_toward
from tandem.wire.channel import Link, tcp_address, wait
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Epoch, new_epoch, new_room
from tandem.wire.hand_off import (
    PROTOCOL,
    FromPrefill,
    Grant,
    Landed,
    LayoutInfo,
    LinkPing,
    Refused,
    Released,
    Welcome,
    Withdraw,
)
from tests.conformance.played import PlayedHalf

NUM_PAGES = 8
# Bytes that no write of the node may change.
MARK = 0xA5
NO_MODEL = {"fingerprint": "none", "layout": LayoutInfo(1, 1, 1, 1, 1, "none", 1)}


class PlayedDecode(PlayedHalf):
    """A decode half that does what a test asks, lies included.

    Without a layout it takes on the node's, which a Hello of another model is answered with.

    Args:
        node: An `Address`. The suite's nodes also have `start(room, num_tokens)`, to compute a prompt and push
            it, and `content(num_tokens)`, the bytes of its pages in order, or None.

    Attributes:
        welcome: Of the link that stands.
    """

    def __init__(self, node, *, transport=None, layout=None, fingerprint="llama", epoch=None):
        super().__init__(node, Epoch(epoch or new_epoch()))
        self.fingerprint, self.layout, self.channel = fingerprint, layout, None
        host = address_toward(node.host, "0.0.0.0")
        transport = transport or TcpTransport(TransportConfig(host=host))
        with contextlib.ExitStack() as undo:
            self.reconnect()
            undo.callback(self._hang_up)
            if layout is None:
                self._learn()
            self.num_pages = self.layout.num_pages
            self.region = undo.enter_context(MemoryRegion.private(self.layout.pool_bytes))
            self.pages = self.region.array().reshape(self.num_pages, -1)
            self.pages[:] = MARK
            self.listener = transport.listen(Pool.of_layout(self.region, self.layout))
            undo.callback(self.listener.close)
            self._opened = undo.pop_all()
        self._granted = {}

    # ── what decode sends ────────────────────────────────────────────────────────────────────────

    def reconnect(self):
        """Use a new connection."""
        self._hang_up()
        address = tcp_address(self.node.host, self.node.port)
        self.channel = Link(address, FromPrefill, self.node.key, self.beat)
        self._is_introduced = False

    def introduce(self, **lies):
        """Send Hello with a new offer over the present connection."""
        self.admission = self.listener.admit(self.node.host)
        honest = {
            "epoch": self.epoch,
            "fingerprint": self.fingerprint,
            "layout": self.layout,
            "offers": [self.admission.offer],
            "protocol": PROTOCOL,
        }
        self.send_raw(msgspec.msgpack.encode({"type": "Hello", **honest, **lies}))
        self._is_introduced = True

    def hello(self, **lies):
        """Send Hello with a new offer; return the answer."""
        self.introduce(**lies)
        return self.next()

    def stand(self, **new):
        """Make a new link that stands; `new` are fields that the node does not know."""
        self.reconnect()
        welcome = self.hello(**new)
        assert isinstance(welcome, Welcome), f"{welcome} came to an honest Hello"
        assert welcome.transport == "tcp"
        assert not welcome.more_addresses, "this suite tests nodes of one rank"
        self.welcome = welcome

    def grant(self, page_ids=(1, 2), **lies):
        """Grant pages, in a new room unless one is given; return the room."""
        honest = {"epoch": self.epoch, "room": new_room(), "page_ids": list(page_ids)}
        grant = msgspec.convert({**honest, **lies}, Grant)
        if all(0 <= page < self.num_pages for page in grant.page_ids):
            self.listener.permit(self.admission.peer, grant.room, grant.page_ids)
        self._granted[grant.room] = grant
        self.send_raw(msgspec.msgpack.encode({"type": "Grant", **honest, **lies}))
        return grant.room

    def withdraw(self, room, **more):
        """Send Withdraw."""
        self.send(Withdraw(epoch=self.epoch, room=room, **more))

    def send(self, message):
        """Send a message once there is a connection."""
        self.send_raw(msgspec.msgpack.encode(message))

    def send_raw(self, frame):
        """Send any bytes once there is a connection."""
        deadline_s = time.monotonic() + self.patience_s
        while not self.channel.socket.poll(20, 2):  # zmq.POLLOUT
            self.stay_alive()
            assert time.monotonic() < deadline_s, "the node's bootstrap port does not answer"
        self.channel.socket.send(frame)

    # ── what prefill answers ─────────────────────────────────────────────────────────────────────

    def wait_written(self, room):
        """Return when the first bytes of a room arrived. No message is read meanwhile."""
        deadline_s, page_ids = time.monotonic() + self.patience_s, self._granted[room].page_ids
        while (self.pages[page_ids] == MARK).all():
            assert time.monotonic() < deadline_s, f"nothing was written in {self.patience_s:g} s"
            self.stay_alive()

    def last(self, room):
        """Wait for the last message of a room, and close its pages."""
        message = self.expect(Landed | Released)
        assert message.room == room, f"{message} is of another room"
        assert message.epoch == self.welcome.epoch, f"{message} is of another epoch than Welcome"
        self.listener.revoke(self.admission.peer, room)
        return message

    def landed(self, room, num_tokens):
        """Wait until a room has landed; check what is in its pages, and in all others."""
        message, grant = self.last(room), self._granted[room]
        assert isinstance(message, Landed), f"{message} came; Landed was due"
        self._check_sums(message, grant)
        written = self.pages[grant.page_ids]
        if (content := self.node.content(num_tokens)) is not None:
            begin = grant.have_tokens // self.layout.page_size * self.layout.page_bytes
            wanted = np.frombuffer(content, np.uint8)[begin:]
            got = written.reshape(-1)[: len(wanted)]
            assert np.array_equal(got, wanted), "pages hold other bytes than prefill's"
        assert not (written == MARK).all(axis=1).any(), "a granted page was never written"
        self.check_untouched(grant.page_ids)

    def check_untouched(self, granted):
        """Check that nothing was written, nor tried to be, outside of these pages."""
        others = sorted(set(range(self.num_pages)) - set(granted))
        assert (self.pages[others] == MARK).all(), "prefill wrote outside of its grant"
        assert self.listener.num_violations == 0, "prefill tried to write outside of a live grant"

    def check_rests(self):
        """Check that nothing more is sent or written; pages are marked anew first."""
        self.pages[:] = MARK
        messages = self.settle()
        assert not messages, f"{messages} came after the last message of every room"
        self.check_untouched([])

    def hand_over(self, page_ids=(1, 2), have_pages=0, **new):
        """Do an honest hand-off over the link that stands: the node serves on."""
        self.pages[:] = MARK
        size = self.layout.page_size
        room = self.grant(page_ids, have_tokens=have_pages * size, **new)
        self.node.start(room, (have_pages + len(page_ids)) * size)
        self.landed(room, (have_pages + len(page_ids)) * size)
        return room

    def ping(self):
        """Send a ping after Hello."""
        if self._is_introduced:
            with contextlib.suppress(PeerLost):
                self.channel.send(LinkPing(epoch=self.epoch))

    def receive(self):
        """Return the next message, or None after a few milliseconds."""
        wait([self.channel], 0.01)
        return self.channel.receive()

    def close(self):
        """Hang up."""
        self._opened.close()

    def _hang_up(self):
        if self.channel is not None:
            self.channel.close()

    def _learn(self):
        hello = {"type": "Hello", "epoch": self.epoch, "offers": [], **NO_MODEL}
        self.send_raw(msgspec.msgpack.encode(hello))
        refused = self.expect(Refused)
        assert refused.error.code == "layout_mismatch", f"{refused} answers a Hello of no model"
        assert refused.layout, "a Hello of another model is not answered with prefill's layout"
        self.fingerprint = refused.fingerprint
        info = msgspec.structs.replace(refused.layout, num_pages=NUM_PAGES, strips=())
        self.layout = KVLayout.from_info(info)

    def _check_sums(self, landed, grant):
        if not landed.checksums:
            return
        granted = PagedTokens(self.layout, grant.page_ids, grant.have_tokens)
        end_token = landed.end_token or granted.end_token
        assert 0 <= granted.end_token - end_token < self.layout.page_size, f"{landed}: end_token"
        sums = page_sums(self.region, granted, granted, end_token)
        assert sums == landed.checksums, "the pages hold other bytes than the checksums are of"
