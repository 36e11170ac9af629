"""Prefill's links: the bootstrap port, and the decode ranks that are connected to it.

```
 Hello ─▶ different model or protocol: Refused
       ├▶ this rank holds none of decode's heads: Redirect to a rank that does
       ├▶ no offer works: Refused; decode sends Hello on a new link, with its next offer
       └▶ a worker connects by the first offer that works ─▶ Welcome ─▶ Grant, Withdraw ...
```

If several ranks hold heads of the rank that sent Hello, Welcome or Redirect lists the addresses of all of them.
`link_session.py` has the states of a link. A lost link never comes back: a decode that still sends on it is
refused, and sends Hello on a new link.

Links are independent of rooms. Everything runs in the agent's control thread, except the workers' jobs.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from tandem.kvtransfer.agents.control import TURN_S, ControlThread, HeartbeatSchedule, LinkWorker
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.link_session import (
    LinkAction,
    LinkEvent,
    LinkSession,
    SenderLink,
    sender_link,
)
from tandem.kvtransfer.plan import CopyPlan, HeadRange
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sharding import RankPair, Shard, held_heads, pair_ranks
from tandem.kvtransfer.threads import CLOSE_S, Poll
from tandem.kvtransfer.transports.base import Connection, PostingConnection, Transport
from tandem.kvtransfer.transports.registry import choose
from tandem.telemetry.log import get_logger
from tandem.wire.channel import Heartbeat, Inbox, Peer, Waker, wait
from tandem.wire.errors import (
    LayoutMismatch,
    PeerLost,
    ProtocolMismatch,
    TandemError,
    TransferFailed,
    TransferRefused,
)
from tandem.wire.generation import Epoch, Room
from tandem.wire.hand_off import (
    PROTOCOL,
    Grant,
    Hello,
    LinkPing,
    RankAddress,
    Redirect,
    Refused,
    ToPrefill,
    Welcome,
    Withdraw,
)
from tandem.wire.messages import Message

log = get_logger("kvtransfer.bootstrap")

# Limit of offers per Hello, because trying one may take seconds. There are fewer transports.
MAX_OFFERS = 16
# Time for decode nodes to read that the links are closed.
FAREWELL_S = 0.1
# Peers may send names of any length, but the answer must fit into a message.
MAX_DESCRIPTION_CHARS = 1000


@dataclass(frozen=True, slots=True)
class SenderEnd:
    """Identity and pool of a prefill rank.

    Attributes:
        fingerprint: Equal at both ends exactly when their KV is interchangeable.
        layout: Layout of the pool in `region`.
        ranks: At rank 0 of stage 0, the addresses of all ranks, stage by stage, itself included. Decode nodes learn them
            from this rank. Empty at the others, or if there are no others.
        stage: Pipeline stage of the rank.
        obstacle: Why decode must have as many ranks, and what to set; empty: it need not.
    """

    epoch: Epoch
    fingerprint: str
    layout: KVLayout
    region: MemoryRegion
    transports: Sequence[Transport]
    ranks: Sequence[RankAddress] = ()
    shard: Shard = field(default_factory=Shard)
    stage: int = 0
    obstacle: str = ""


@dataclass(eq=False, slots=True)
class DecodeLink:
    """A decode rank that sent Hello, and the worker that writes to it.

    Attributes:
        part: Index of the rank among the `num_parts` decode ranks that this rank pushes to.
        heads: Heads pushed over this link.
        more_addresses: Addresses of the other prefill ranks that push to the decode rank; empty if unknown here.
        heartbeat_s: Interval of its pings; 0: the same as ours.
        session: The link's state; only the control thread uses it, and `close` after that thread.
        is_closed_by_peer: Whether decode announced that it closes the link.
        transport, connection: Set by the worker once it is connected.
        post: `PostingConnection.post` of the connection, if it has one.
    """

    peer: Peer
    epoch: Epoch
    layout: KVLayout
    worker: LinkWorker
    last_received_s: float
    part: int
    num_parts: int
    heads: HeadRange
    more_addresses: list[RankAddress]
    heartbeat_s: float
    session: LinkSession[SenderLink] = field(default_factory=sender_link)
    is_closed_by_peer: bool = False
    transport: str = ""
    connection: Connection | None = None
    post: Callable[[Room, CopyPlan], Poll] | None = None

    def connect(self, transport: str, connection: Connection) -> None:
        """Set the connection that writes go through. Runs on the worker."""
        self.transport, self.connection = transport, connection
        self.post = connection.post if isinstance(connection, PostingConnection) else None

    def write(self, room: Room, plan: CopyPlan) -> Poll | None:
        """Start a write and return its poll, or None if the write is complete. Runs on the worker."""
        if self.post is not None:
            return self.post(room, plan)
        assert self.connection is not None
        self.connection.write(room, plan)
        return None

    def close_connection(self) -> None:
        """Close the connection, if there is one. Any thread may call it. Safe to call twice."""
        if self.connection is not None:
            self.connection.close()


class BootstrapPort:
    """All links of a prefill rank.

    Args:
        end: Identity and pool of this rank.
        inbox: The bound port; closed by `close`.
        control: Runs everything here except the workers' jobs.
        on_message: Called with every Grant and Withdraw of an open link.
        on_lost: Called once when a link is lost; its worker is closed already.

    Attributes:
        links: Open links.
        num_refused: Invalid messages and refused links.
    """

    def __init__(
        self,
        end: SenderEnd,
        inbox: Inbox[ToPrefill],
        control: ControlThread,
        *,
        heartbeat: Heartbeat,
        clock: Callable[[], float],
        on_message: Callable[[DecodeLink, Grant | Withdraw], None],
        on_lost: Callable[[DecodeLink, TandemError], None],
    ) -> None:
        self._end, self._inbox, self._control = end, inbox, control
        self._clock, self._heartbeat = clock, heartbeat
        self._schedule = HeartbeatSchedule(heartbeat, clock())
        self._on_message, self._on_lost = on_message, on_lost
        self.links: dict[Peer, DecodeLink] = {}
        self._closing_workers: list[LinkWorker] = []  # of lost links; a write may still run
        self.num_refused = 0
        self._num_lost = 0  # connections of the inbox

    def turn(self, waker: Waker) -> None:
        """Wait briefly, handle received messages, send pings, and drop silent links."""
        wait([self._inbox], TURN_S, waker)
        # Read queued messages of every link before checking for silence: this thread may have been slow.
        for envelope in self._inbox.queued():
            self._handle(envelope.peer, envelope.message)
        self._keep_alive(self._clock())

    def send(self, link: DecodeLink, message: Message) -> None:
        """Send a message. If sending fails, the link is dropped, because messages are not resent."""
        if not link.session.is_open:
            return
        try:
            self._inbox.send(link.peer, message)
        except PeerLost as error:
            # Deferred: the message's room finishes its transition before it loses the link.
            self._control.post(partial(self.drop, link, error))

    def drop(self, link: DecodeLink, error: TandemError) -> None:
        """Drop a link; no-op if it is already dropped."""
        self._apply(link, LinkEvent.LOST, error)

    def close(self) -> None:
        """Close all links and the port. Writes in flight fail; those that last longer than `CLOSE_S` are abandoned."""
        num_told = sum(link.session.is_open for link in self.links.values())
        for link in self.links.values():
            self.send(link, LinkPing(epoch=self._end.epoch, is_last=True))
            self._apply(link, LinkEvent.SHUT_DOWN)
        # A decode that reads its last ping closes the connection. If this end closed it first, libzmq would discard the
        # messages that decode has not read.
        if num_told:
            self._inbox.wait_lost(num_told, FAREWELL_S)
        deadline_s = time.monotonic() + CLOSE_S
        joined = [
            each.join(max(0.0, deadline_s - time.monotonic())) for each in self._closing_workers
        ]
        if not all(joined):
            log.warning("kv_write.not_returned", num_links=joined.count(False), waited_s=CLOSE_S)
        self._inbox.close()

    def _apply(self, link: DecodeLink, event: LinkEvent, error: TandemError | None = None) -> None:
        actions = link.session.apply(event)
        with ExitStack() as stack:  # all actions run even if one raises: a lost link must be closed
            for action in reversed(actions):
                stack.callback(self._act, link, action, error)

    def _act(self, link: DecodeLink, action: LinkAction, error: TandemError | None) -> None:
        match action:
            case LinkAction.SEND_WELCOME:
                self._welcome(link)
            case LinkAction.REMOVE:
                self._remove(link, error)
            case LinkAction.SEND_REFUSED:
                assert error is not None
                self._refuse(link.peer, error)
            case LinkAction.CLOSE_CONNECTION:
                link.worker.close(link.close_connection)
                running = [each for each in self._closing_workers if each.is_running]
                self._closing_workers = [*running, link.worker]
            case LinkAction.REPORT_LOST:
                assert error is not None
                self._on_lost(link, error)
            case _:
                raise AssertionError(action)

    def _remove(self, link: DecodeLink, error: TandemError | None) -> None:
        if link.is_closed_by_peer:
            log.info("kv_link.closed", decode_epoch=link.epoch)
        elif isinstance(error, TransferRefused):
            log.info("kv_link.offer_refused", decode_epoch=link.epoch, reason=str(error))
        else:
            log.warning("kv_link.lost", decode_epoch=link.epoch, reason=str(error))
        del self.links[link.peer]

    def _handle(self, peer: Peer, message: ToPrefill) -> None:
        link = self.links.get(peer)
        if isinstance(message, Hello):
            self._greet(peer, message)
        elif link is None or message.epoch != link.epoch:
            self.num_refused += 1
            self._refuse(peer, PeerLost("unknown link: prefill restarted or dropped the link"))
        else:
            link.last_received_s = self._clock()
            if not isinstance(message, LinkPing):
                self._on_message(link, message)
            elif message.is_last:
                link.is_closed_by_peer = True
                self.drop(link, PeerLost("decode closed the link"))

    def _greet(self, peer: Peer, hello: Hello) -> None:
        try:
            layout, pairs = self._pair_with(hello)
            sources = [pair.source for pair in pairs if pair.destination == hello.tp_rank]
            own_rank = self._end.shard.tp_rank
            targets = {pair.destination: pair.heads for pair in pairs if pair.source == own_rank}
            addresses = self._addresses_of(hello.stage, sources)
            if hello.stage != self._end.stage or hello.tp_rank not in targets:
                return self._redirect(peer, addresses)
            # Keep other links of the same epoch: decode may reach this rank at two addresses. Links that decode
            # has dropped become silent and time out.
            if (old := self.links.get(peer)) is not None:
                self.drop(old, PeerLost("decode made a new link"))
            worker = LinkWorker("kv-push", self._control)
        except (LayoutMismatch, ProtocolMismatch, TransferRefused, TransferFailed) as error:
            see = f"docs/reference/errors.md#{error.code}"
            log.warning("kv_link.refused", reason=str(error), see=see)
            self.num_refused += 1
            return self._refuse(peer, error)
        self.links[peer] = link = DecodeLink(
            peer,
            hello.epoch,
            layout,
            worker,
            self._clock(),
            list(targets).index(hello.tp_rank),
            len(targets),
            targets[hello.tp_rank],
            addresses,
            hello.heartbeat_s,
        )

        def connect() -> None:
            link.connect(*choose(hello.offers, self._end.transports, self._end.region))

        def connected(_none: None) -> None:
            self._apply(link, LinkEvent.CONNECTED)

        worker.submit(connect, connected, partial(self.drop, link))
        return None

    def _pair_with(self, hello: Hello) -> tuple[KVLayout, list[RankPair]]:
        """Return the layout of the decode rank, and the heads that each pair of ranks of its stage copies.

        Raises:
            LayoutMismatch: The model or its layout differs.
            ProtocolMismatch: Decode uses a different version of the protocol.
            TransferRefused: There are more than `MAX_OFFERS` offers.
        """
        if hello.protocol != PROTOCOL:
            raise ProtocolMismatch(hello.protocol, PROTOCOL)
        if len(hello.offers) > MAX_OFFERS:
            raise TransferRefused(f"{len(hello.offers)} offers; the limit is {MAX_OFFERS}")
        end = self._end
        theirs = Shard(hello.tp_rank, hello.tp_size, hello.model_kv_heads)
        sources = held_heads(end.shard, end.layout.num_kv_heads)
        ours = _describe(end.fingerprint, end.layout, end.shard)
        try:
            layout = KVLayout.from_info(hello.layout)
            num_heads = theirs.model_kv_heads or layout.num_kv_heads
            is_same_model = hello.fingerprint == end.fingerprint and num_heads == (
                end.shard.model_kv_heads or end.layout.num_kv_heads
            )
            is_same = is_same_model and layout.holds_same_heads(end.layout)
            is_first = end.shard.tp_rank == end.stage == 0
            is_known = hello.stage * end.shard.tp_size < max(len(end.ranks), 1) or not is_first
            # Ranks of other stages have other layers, and compare their own.
            if not is_known or (hello.stage == end.stage and not is_same):
                why = end.obstacle if hello.tp_size != end.shard.tp_size else ""
                raise LayoutMismatch(ours, _describe(hello.fingerprint, layout, theirs), why)
            return layout, pair_ranks(sources, held_heads(theirs, layout.num_kv_heads))
        except ValueError as error:
            raise LayoutMismatch(ours, _describe(hello.fingerprint, error)) from error

    def _addresses_of(self, stage: int, sources: Sequence[int]) -> list[RankAddress]:
        """Return the addresses of a stage's ranks `sources` except this one. Empty if this rank does not know them."""
        size, ranks = self._end.shard.tp_size, self._end.ranks
        numbers = [stage * size + rank for rank in sources]
        return [ranks[each] for each in numbers if 0 < each < len(ranks)]

    def _welcome(self, link: DecodeLink) -> None:
        log.info("kv_link.up", decode_epoch=link.epoch, transport=link.transport)
        welcome = Welcome(
            epoch=self._end.epoch,
            transport=link.transport,
            more_addresses=link.more_addresses,
            first_head=link.heads.destination_first,
            num_heads=link.heads.num_heads,
            protocol=PROTOCOL,
            heartbeat_s=self._heartbeat.interval_s,
        )
        self.send(link, welcome)

    def _redirect(self, peer: Peer, addresses: Sequence[RankAddress]) -> None:
        if not addresses:
            return self._refuse(
                peer, PeerLost("this prefill rank holds no heads of the decode rank")
            )
        first, *more = addresses
        redirect = Redirect(epoch=self._end.epoch, address=first, more_addresses=more)
        with contextlib.suppress(PeerLost):
            self._inbox.send(peer, redirect)
        return None

    def _refuse(self, peer: Peer, error: TandemError) -> None:
        ours = Refused(error=error.info())
        if isinstance(error, LayoutMismatch):
            ours = Refused(
                error=error.info(), fingerprint=self._end.fingerprint, layout=self._end.layout
            )
        with contextlib.suppress(PeerLost):
            self._inbox.send(peer, ours)

    def _keep_alive(self, now_s: float) -> None:
        if self._inbox.num_lost > self._num_lost:
            # A ROUTER socket does not tell whose it was, but sending to that peer fails.
            self._num_lost = self._inbox.num_lost
            self._schedule.hasten()
        is_ping_due = self._schedule.is_ping_due(now_s)
        for link in list(self.links.values()):
            try:
                self._schedule.check("decode", link.heartbeat_s, link.last_received_s, now_s)
            except PeerLost as error:
                self.drop(link, error)
            if is_ping_due:
                self.send(link, LinkPing(epoch=self._end.epoch))


def _describe(fingerprint: str, layout: KVLayout | ValueError, shard: Shard | None = None) -> str:
    rank = ""
    if isinstance(layout, KVLayout) and shard and (shard.tp_rank, shard.tp_size) != (0, 1):
        num_heads = shard.model_kv_heads or layout.num_kv_heads
        rank = f"; rank {shard.tp_rank} of {shard.tp_size}, {num_heads} KV heads in all"
    return f"{fingerprint} ({layout}{rank})"[:MAX_DESCRIPTION_CHARS]
