"""Plays decode to a prefill node under test: a link, and a pool that the node writes into by TCP."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from typing_extensions import override

from tandem.conformance.play import Player, Subject
from tandem.kvtransfer.checksum import page_sums, sampled_slabs
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import PagedTokens
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.kvtransfer.transports.tcp_stream import address_toward
from tandem.wire.channel import Link, tcp_address, wait
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Room, new_epoch, new_room
from tandem.wire.hand_off import (
    PROTOCOL,
    FromPrefill,
    Grant,
    Hello,
    Landed,
    LayoutInfo,
    LinkPing,
    Refused,
    Released,
    Welcome,
    Withdraw,
)
from tandem.wire.messages import Message

NUM_PAGES = 8
# Bytes that no write of the node may change.
MARK = 0xA5


class PrefillUnderTest(Subject, Protocol):
    """A prefill node, as whoever gives it requests.

    Attributes:
        port: Its bootstrap port.
    """

    port: int

    def start(self, room: Room, num_tokens: int) -> None:
        """Have it compute a prompt of so many tokens and push it in a room."""
        ...

    def content(self, num_tokens: int) -> bytes | None:
        """Return the bytes of its pages of such a prompt, in order; None: not known."""
        ...


class DecodePlayer(Player):
    """A decode half that does what a test asks, lies included.

    It takes on the layout and the fingerprint of the node, which answers a Hello of another model with them.

    Attributes:
        welcome: Of the link that stands.
    """

    def __init__(self, subject: PrefillUnderTest) -> None:
        super().__init__(subject, new_epoch())
        self.node = subject
        self.link = self._connect()
        with contextlib.ExitStack() as undo:
            undo.callback(self.link.close)
            told = self._learn()
            assert told.layout is not None
            self.fingerprint = told.fingerprint
            self.layout = KVLayout.from_info(
                msgspec.structs.replace(told.layout, num_pages=NUM_PAGES, strips=())
            )
            undo.pop_all()
        self.region = MemoryRegion.private(self.layout.pool_bytes)
        self.pages = self.region.array().reshape(NUM_PAGES, -1)
        self.pages[:] = MARK
        host = address_toward(subject.host, "0.0.0.0")
        pool = Pool.of_layout(self.region, self.layout)
        self.listener = TcpTransport(TransportConfig(host=host)).listen(pool)
        self._granted: dict[Room, Grant] = {}

    # ── what decode sends ────────────────────────────────────────────────────────────────────────

    def reconnect(self) -> None:
        """Use a new connection."""
        self.link.close()
        self.link = self._connect()

    def hello(self, **lies: Any) -> Message:
        """Send Hello with a new offer, over the connection that there is; return the answer."""
        self.admission = self.listener.admit(self.node.host)
        honest = {
            "epoch": self.epoch,
            "fingerprint": self.fingerprint,
            "layout": self.layout,
            "offers": [self.admission.offer],
            "protocol": PROTOCOL,
        }
        self.send_raw(msgspec.msgpack.encode({"type": "Hello", **honest, **lies}))
        return self.next()

    def stand(self, **new: Any) -> None:
        """Make a new link that stands; `new` are fields that the node does not know."""
        self.reconnect()
        welcome = self.hello(**new)
        assert isinstance(welcome, Welcome), f"{welcome} came to an honest Hello"
        assert welcome.transport == "tcp"
        assert not welcome.more_ports, "this suite tests nodes of one rank"
        self.welcome = welcome

    def grant(self, num_pages: int = 2, *, have_tokens: int = 0, **lies: Any) -> Room:
        """Grant pages 1 and on in a new room."""
        honest = {"epoch": self.epoch, "room": new_room(), "have_tokens": have_tokens}
        fields = {**honest, "page_ids": list(range(1, num_pages + 1)), **lies}
        grant = msgspec.convert(fields, Grant)
        if all(0 <= page < NUM_PAGES for page in grant.page_ids):
            self.listener.permit(self.admission.peer, grant.room, grant.page_ids)
        self._granted[grant.room] = grant
        self.send_raw(msgspec.msgpack.encode({"type": "Grant", **fields}))
        return grant.room

    def withdraw(self, room: Room) -> None:
        """Send Withdraw."""
        self.send(Withdraw(epoch=self.epoch, room=room))

    def send(self, message: Message) -> None:
        """Send once there is a connection."""
        self.send_raw(msgspec.msgpack.encode(message))

    def send_raw(self, frame: bytes) -> None:
        """Send any bytes once there is a connection."""
        deadline_s = time.monotonic() + self.patience_s
        while not self.link.socket.poll(20, 2):  # zmq.POLLOUT
            self.stay_alive()
            assert time.monotonic() < deadline_s, "the node's bootstrap port does not answer"
        self.link.socket.send(frame)

    # ── what prefill answers ─────────────────────────────────────────────────────────────────────

    def wait_written(self, room: Room) -> None:
        """Return when the first bytes of a room arrived. No message is read meanwhile."""
        deadline_s, page_ids = time.monotonic() + self.patience_s, self._granted[room].page_ids
        while (self.pages[page_ids] == MARK).all():
            assert time.monotonic() < deadline_s, f"nothing was written in {self.patience_s:g} s"
            self.stay_alive()

    def last(self, room: Room) -> Landed | Released:
        """Wait for the last message of a room, and close its pages."""
        message = self.next()
        assert isinstance(message, Landed | Released), f"{message} came; the end of a room was due"
        assert message.room == room, f"{message} is of another room"
        assert message.epoch == self.welcome.epoch, f"{message} is of another epoch than Welcome"
        self.listener.revoke(self.admission.peer, room)
        return message

    def landed(self, room: Room, num_tokens: int) -> None:
        """Wait until a room has landed; check what is in its pages, and in all others."""
        message = self.last(room)
        assert isinstance(message, Landed), f"{message} came; Landed was due"
        grant = self._granted[room]
        self._check_sums(message, grant)
        content = self.node.content(num_tokens)
        if content is not None:
            begin = grant.have_tokens // self.layout.page_size * self.layout.page_bytes
            wanted = np.frombuffer(content, np.uint8)[begin:]
            got = self.pages[grant.page_ids].reshape(-1)
            assert np.array_equal(got[: len(wanted)], wanted), "pages hold other bytes than prefill"
        written = self.pages[grant.page_ids]
        assert not (written == MARK).all(axis=1).any(), "a granted page was never written"
        self.check_untouched(grant.page_ids)

    def check_untouched(self, granted: Sequence[int]) -> None:
        """Check that nothing was written, nor tried to be, outside of these pages."""
        others = sorted(set(range(NUM_PAGES)) - set(granted))
        assert (self.pages[others] == MARK).all(), "prefill wrote outside of its grant"
        assert self.listener.num_violations == 0, "prefill tried to write outside of a live grant"

    def check_rests(self) -> None:
        """Check that nothing more is sent or written; pages are marked anew first."""
        self.pages[:] = MARK
        messages = self.settle()
        assert not messages, f"{messages} came after the last message of every room"
        self.check_untouched([])

    def hand_over(self) -> None:
        """Do an honest hand-off over the link that stands: the node serves on."""
        self.pages[:] = MARK
        num_tokens = 2 * self.layout.page_size
        room = self.grant()
        self.node.start(room, num_tokens)
        self.landed(room, num_tokens)

    @override
    def ping(self) -> None:
        with contextlib.suppress(PeerLost):
            self.link.send(LinkPing(epoch=self.epoch))

    @override
    def receive(self) -> Message | None:
        wait([self.link], 0.01)
        return self.link.receive()

    def close(self) -> None:
        """Hang up."""
        self.link.close()
        self.listener.close()
        self.region.close()

    def _connect(self) -> Link[FromPrefill]:
        address = tcp_address(self.node.host, self.node.port)
        return Link(address, FromPrefill, self.node.key, self.beat)

    def _learn(self) -> Refused:
        none = LayoutInfo(1, 1, 1, 1, 1, "none", 1)
        self.send(Hello(epoch=self.epoch, fingerprint="none", layout=none, offers=[]))
        refused = self.expect(Refused)
        assert refused.error.code == "layout_mismatch", f"{refused} answers a Hello of no model"
        assert refused.layout, "a Hello of another model is not answered with prefill's layout"
        return refused

    def _check_sums(self, landed: Landed, grant: Grant) -> None:
        if not landed.checksums:
            return
        granted = PagedTokens(self.layout, grant.page_ids, grant.have_tokens)
        end_token = landed.end_token or granted.end_token
        assert 0 <= granted.end_token - end_token < self.layout.page_size, f"{landed}: end_token"
        slabs = sampled_slabs(grant.room, self.layout, landed.checksum_one_in)
        sums = page_sums(self.region, granted, granted, end_token, slabs=slabs)
        assert sums == landed.checksums, "the pages hold other bytes than the checksums are of"
