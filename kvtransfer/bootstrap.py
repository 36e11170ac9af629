"""Prefill's links: the bootstrap port, and the ranks of decode that are connected to it.

```
 Hello ─▶ another model or protocol: Refused
       ├▶ this rank holds none of its heads: Redirect to one that does
       └▶ a worker connects by the best transport that works ─▶ Welcome ─▶ Grant, Withdraw ...
 a link that is silent, broken or closed is lost: once, and it never comes back. A decode that
 still sends on it is refused, and sends Hello again on a new one
```

Where several ranks hold heads of the one that sent Hello, it receives the ports of all of them.

Knows nothing of rooms. Everything runs in the agent's control thread, except the workers' jobs.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tandem.kvtransfer.control import TURN_S, ControlThread, Look, Rhythm, Worker
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import CopyPlan, HeadRange
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sharding import RankPair, Shard, held_heads, pair_ranks
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
    OLDEST_PROTOCOL,
    PROTOCOL,
    Grant,
    Hello,
    LinkPing,
    Redirect,
    Refused,
    ToPrefill,
    Welcome,
    Withdraw,
)
from tandem.wire.messages import Message

log = get_logger("kvtransfer.bootstrap")

# One for each transport there is, with room for more. Trying one may take seconds.
MAX_OFFERS = 16
# A peer may send names of any length, and the answer has to fit into a message.
MAX_DESCRIPTION_CHARS = 1000


@dataclass(frozen=True, slots=True)
class SenderEnd:
    """What prefill is to decode nodes.

    Attributes:
        fingerprint: Equal at both ends exactly when their KV is interchangeable.
        layout: Of the own pool, which `region` holds.
        rank_ports: Bootstrap ports of the ranks after this one; only rank 0's is known outside.
    """

    epoch: Epoch
    fingerprint: str
    layout: KVLayout
    region: MemoryRegion
    transports: Sequence[Transport]
    rank_ports: Sequence[int] = ()
    shard: Shard = field(default_factory=Shard)


@dataclass(eq=False, slots=True)
class DecodeLink:
    """A rank of a decode node that sent Hello, and the worker that writes to it.

    Attributes:
        part: Its number among the `num_parts` ranks of its node that we push to.
        heads: Those that we push to it.
        more_ports: Of the other ranks of our node that push to it, where this one knows them.
        protocol: The version that both ends speak.
        connection, post: Put in by the worker; see `PostingConnection`.
    """

    peer: Peer
    epoch: Epoch
    layout: KVLayout
    worker: Worker
    last_heard_s: float
    part: int
    num_parts: int
    heads: HeadRange
    more_ports: list[int]
    protocol: int
    connection: Connection | None = None
    post: Callable[[Room, CopyPlan], Look] | None = None

    def connect(self, connection: Connection) -> None:
        """Write through this connection from now on."""
        self.connection = connection
        self.post = connection.post if isinstance(connection, PostingConnection) else None

    def write(self, room: Room, plan: CopyPlan) -> Look | None:
        """Write in the worker; return what looks for the end, if the write goes on by itself."""
        if self.post is not None:
            return self.post(room, plan)
        assert self.connection is not None
        self.connection.write(room, plan)
        return None

    def hang_up(self) -> None:
        """Close the connection, if there is one. Any thread may call it, and twice."""
        if self.connection is not None:
            self.connection.close()


class BootstrapPort:
    """Keeps prefill's links.

    Args:
        end: What we are.
        inbox: The bound port; closed by `close`.
        control: Runs everything here but the workers' jobs.
        heard: Called with every Grant and Withdraw of a link that stands.
        lost: Called once when a link is lost; its worker is closed already.

    Attributes:
        links: Those that stand or are being connected.
        num_refused: Words of decode nodes that cannot be.
    """

    def __init__(
        self,
        end: SenderEnd,
        inbox: Inbox[ToPrefill],
        control: ControlThread,
        *,
        heartbeat: Heartbeat,
        clock: Callable[[], float],
        heard: Callable[[DecodeLink, Grant | Withdraw], None],
        lost: Callable[[DecodeLink, TandemError], None],
    ) -> None:
        self._end, self._inbox, self._control = end, inbox, control
        self._clock, self._rhythm = clock, Rhythm(heartbeat, clock())
        self._heard, self._lost = heard, lost
        self.links: dict[Peer, DecodeLink] = {}
        self._ending: list[Worker] = []  # of lost links; perhaps in a write still
        self.num_refused = 0

    def turn(self, waker: Waker) -> None:
        """Wait a moment, take all that came, ping, and drop the silent."""
        wait([self._inbox], TURN_S, waker)
        # All of it before anybody is judged silent: it may be us who were slow.
        while (envelope := self._inbox.receive()) is not None:
            self._hear(envelope.peer, envelope.message)
        self._keep_alive(self._clock())

    def send(self, link: DecodeLink, message: Message) -> None:
        """Send; a link that does not take the message is lost, since nobody sends it again."""
        if self.links.get(link.peer) is not link:
            return
        try:
            self._inbox.send(link.peer, message)
        except PeerLost as error:
            # Posted: the room whose message it is has to come to rest before the link is lost to it.
            self._control.post(partial(self.drop, link, error))

    def drop(self, link: DecodeLink, error: TandemError) -> None:
        """Lose a link; no-op when it is lost already."""
        if self.links.get(link.peer) is not link:
            return
        log.warning("kv_link.lost", decode_epoch=link.epoch, reason=str(error))
        self._refuse(link.peer, error)
        del self.links[link.peer]
        link.worker.close(link.hang_up)
        self._ending = [each for each in self._ending if each.is_running] + [link.worker]
        self._lost(link, error)

    def close(self) -> None:
        """Hang up on everybody. After it no write of ours is under way."""
        for link in self.links.values():
            link.worker.close(link.hang_up)
        for worker in (*self._ending, *(link.worker for link in self.links.values())):
            worker.join()
        self._inbox.close()

    def _hear(self, peer: Peer, message: ToPrefill) -> None:
        link = self.links.get(peer)
        if isinstance(message, Hello):
            self._greet(peer, message)
        elif link is None or message.epoch != link.epoch:
            self.num_refused += 1
            self._refuse(peer, PeerLost("prefill does not know this link: it restarted or gave up"))
        else:
            link.last_heard_s = self._clock()
            if not isinstance(message, LinkPing):
                self._heard(link, message)

    def _greet(self, peer: Peer, hello: Hello) -> None:
        try:
            layout, pairs = self._paired(hello)
            sources = [pair.source for pair in pairs if pair.destination == hello.tp_rank]
            own_rank = self._end.shard.tp_rank
            targets = {pair.destination: pair.heads for pair in pairs if pair.source == own_rank}
            if hello.tp_rank not in targets:
                return self._redirect(peer, self._ports_of(sources))
            # Not other links of its epoch: it may reach us at two addresses, and a link that it gave up is lost soon.
            if (old := self.links.get(peer)) is not None:
                self.drop(old, PeerLost("decode made a new link"))
            worker = Worker("kv-push", self._control)
        except (LayoutMismatch, ProtocolMismatch, TransferRefused, TransferFailed) as error:
            see = f"tandem docs errors#{error.code}"
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
            self._ports_of(sources),
            min(hello.protocol, PROTOCOL),
        )

        def connect() -> str:
            name, connection = choose(hello.offers, self._end.transports, self._end.region)
            link.connect(connection)
            return name

        worker.submit(connect, partial(self._welcome, link), partial(self.drop, link))
        return None

    def _paired(self, hello: Hello) -> tuple[KVLayout, list[RankPair]]:
        """Return the layout of decode's rank, and which ranks of the two nodes copy what.

        Raises:
            LayoutMismatch: It is another model, or another layout of it.
            ProtocolMismatch: Its newest version is older than our oldest.
            TransferRefused: There are more offers than anybody makes.
        """
        if hello.protocol < OLDEST_PROTOCOL:
            raise ProtocolMismatch(hello.protocol, OLDEST_PROTOCOL, PROTOCOL)
        if len(hello.offers) > MAX_OFFERS:
            raise TransferRefused(f"{len(hello.offers)} offers; the limit is {MAX_OFFERS}")
        end = self._end
        theirs = Shard(hello.tp_rank, hello.tp_size, hello.model_kv_heads)
        sources = held_heads(end.shard, end.layout.num_kv_heads)
        ours = _described(end.fingerprint, end.layout, end.shard)
        try:
            layout = KVLayout.from_info(hello.layout)
            num_heads = theirs.model_kv_heads or layout.num_kv_heads
            is_same_model = hello.fingerprint == end.fingerprint and num_heads == (
                end.shard.model_kv_heads or end.layout.num_kv_heads
            )
            if not is_same_model or not layout.holds_same_heads(end.layout):
                raise LayoutMismatch(ours, _described(hello.fingerprint, layout, theirs))
            return layout, pair_ranks(sources, held_heads(theirs, layout.num_kv_heads))
        except ValueError as error:
            raise LayoutMismatch(ours, _described(hello.fingerprint, error)) from error

    def _ports_of(self, sources: Sequence[int]) -> list[int]:
        """Return the ports of ranks beside this one; only rank 0 knows them."""
        ports = self._end.rank_ports
        return [ports[rank - 1] for rank in sources if rank] if ports else []

    def _welcome(self, link: DecodeLink, transport: str) -> None:
        if self.links.get(link.peer) is not link:
            return  # lost while it was being connected
        log.info("kv_link.up", decode_epoch=link.epoch, transport=transport)
        welcome = Welcome(
            epoch=self._end.epoch,
            transport=transport,
            more_ports=link.more_ports,
            first_head=link.heads.destination_first,
            num_heads=link.heads.num_heads,
            protocol=link.protocol,
        )
        self.send(link, welcome)

    def _redirect(self, peer: Peer, ports: Sequence[int]) -> None:
        if not ports:
            return self._refuse(peer, PeerLost("this rank of prefill holds no head of yours"))
        redirect = Redirect(epoch=self._end.epoch, port=ports[0], more_ports=list(ports[1:]))
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
        is_ping_due = self._rhythm.is_ping_due(now_s)
        for link in list(self.links.values()):
            try:
                self._rhythm.check("decode", link.last_heard_s, now_s)
            except PeerLost as error:
                self.drop(link, error)
            if is_ping_due:
                self.send(link, LinkPing(epoch=self._end.epoch))


def _described(fingerprint: str, layout: KVLayout | ValueError, shard: Shard | None = None) -> str:
    place = ""
    if isinstance(layout, KVLayout) and shard and (shard.tp_rank, shard.tp_size) != (0, 1):
        whole = shard.model_kv_heads or layout.num_kv_heads
        place = f"; rank {shard.tp_rank} of {shard.tp_size}, {whole} KV heads in all"
    return f"{fingerprint} ({layout}{place})"[:MAX_DESCRIPTION_CHARS]
