"""Decode's links: one to each bootstrap port that is wanted, made on demand.

```
 want ─▶ CONNECTING  Hello goes out once there is a connection, with an offer of each transport
      ─▶ GREETED     Redirect sends a rank to prefill's rank with heads of it: CONNECTING again, once
                     Welcome names the transport prefill took; the other offers are fenced
      ─▶ up          until prefill is silent, refuses, or the connection breaks: then the link is
                     lost, once, and the next `want` makes a new one
```

A lost link is fenced in a thread of its own, because that may have to wait for a stopped writer.
Knows nothing of rooms. Everything else runs in the agent's control thread.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtransfer.control import TURN_S, ControlThread
from kvtransfer.layout import KVLayout
from kvtransfer.sharding import Shard
from kvtransfer.transports.base import Admission, Listener
from telemetry.log import get_logger
from wire.channel import Link, Waker, tcp_address, wait
from wire.errors import PeerLost, TandemError, TransferRefused, error_from_info
from wire.hand_off import FromPrefill, Hello, Landed, LinkPing, Redirect, Refused, Released, Welcome
from wire.heartbeat import Heartbeat
from wire.hosts import resolve
from wire.ids import Epoch
from wire.keys import ChannelKey
from wire.messages import Message

log = get_logger("kvtransfer.links")

# Looked at this often while a connection is being made: it takes a millisecond on one host.
CONNECTING_TURN_S = 0.002


@dataclass(frozen=True, slots=True)
class ReceiverEnd:
    """What decode is, to those it says Hello to.

    Attributes:
        epoch: Of this process.
        fingerprint: Equal at both ends exactly when their KV is interchangeable.
        layout: Of the own pool.
        listeners: By transport name, best first.
        shard: Which of the node's ranks this is.
    """

    epoch: Epoch
    fingerprint: str
    layout: KVLayout
    listeners: Mapping[str, Listener]
    shard: Shard = field(default_factory=Shard)


@dataclass(eq=False, slots=True)
class PrefillLink:
    """A link to one bootstrap port.

    Attributes:
        address: The port that was wanted; the socket's own may be another after a Redirect.
        epoch: Prefill's, once it said Welcome.
        transport: The one it took; its admission is the only one left then.
        more_ports: Of other ranks of prefill that hold heads of ours; known once the link is up.
        heads: Those that come over this link, counted in our pages; known once it is up.
    """

    host: str
    address: str
    socket: Link[FromPrefill]
    admissions: dict[str, Admission]
    deadline_s: float
    last_heard_s: float
    is_greeted: bool = False
    is_redirected: bool = False
    epoch: Epoch | None = None
    transport: str = ""
    more_ports: Sequence[int] = ()
    heads: range = range(0)

    @property
    def is_up(self) -> bool:
        """Whether prefill said Welcome."""
        return self.epoch is not None


class PrefillLinks:
    """Keeps the links.

    Args:
        end: What we are.
        control: Runs everything here; fences report through it.
        key: Proves to prefill nodes that we know the cluster's secret.
        connect_timeout_s: From `want` to Welcome.
        heartbeat: Of the links.
        up: Called when a link is up.
        heard: Called with every Landed and Released of a link that is up.
        lost: Called once when a link is lost, before its fence begins.
        fenced: Called when no write can arrive over a lost link any more.
    """

    def __init__(
        self,
        end: ReceiverEnd,
        control: ControlThread,
        *,
        key: ChannelKey | None,
        connect_timeout_s: float,
        heartbeat: Heartbeat,
        clock: Callable[[], float],
        up: Callable[[PrefillLink], None],
        heard: Callable[[PrefillLink, Landed | Released], None],
        lost: Callable[[PrefillLink, TandemError], None],
        fenced: Callable[[PrefillLink], None],
    ) -> None:
        self._end, self._control, self._key, self._clock = end, control, key, clock
        self._connect_timeout_s, self._heartbeat = connect_timeout_s, heartbeat
        self._up, self._heard, self._lost, self._fenced = up, heard, lost, fenced
        self._links: dict[str, PrefillLink] = {}
        self._next_ping_s = clock()
        self.num_refused = 0

    @property
    def num_violations(self) -> int:
        """Writes that our listeners refused."""
        return sum(listener.num_violations for listener in self._end.listeners.values())

    @property
    def num_links(self) -> int:
        """Links that are up or being made."""
        return len(self._links)

    def want(self, host: str, port: int) -> PrefillLink:
        """Return the link to a bootstrap port, a new one if there is none.

        Raises:
            TandemError: There can be none, and why.
        """
        address = tcp_address(host, port)
        if (link := self._links.get(address)) is None:
            link = self._links[address] = self._make(host, port, address)
        return link

    def listener(self, link: PrefillLink) -> tuple[Listener, Admission]:
        """Return what prefill writes through. Only once the link is up."""
        return self._end.listeners[link.transport], link.admissions[link.transport]

    def send(self, link: PrefillLink, message: Message) -> None:
        """Send; a link that cannot be sent to is found out by the next ping."""
        with contextlib.suppress(PeerLost):
            link.socket.send(message)

    def turn(self, waker: Waker) -> None:
        """Wait a moment, hear all that came, ping, and drop the silent."""
        links = list(self._links.values())
        is_connecting = any(not link.is_greeted for link in links)
        wait([link.socket for link in links], CONNECTING_TURN_S if is_connecting else TURN_S, waker)
        # All of it before anybody is judged silent: it may be us who were slow.
        for link in links:
            while self._is_kept(link) and (message := link.socket.receive()) is not None:
                link.last_heard_s = self._clock()
                self._hear(link, message)
        self._keep_alive(self._clock())

    def drop(self, link: PrefillLink, error: TandemError) -> None:
        """Lose a link and begin to fence it; no-op when it is lost already."""
        if not self._is_kept(link):
            return
        log.warning("kv_link.lost", address=link.socket.address, reason=str(error))
        del self._links[link.address]
        link.socket.close()
        self._lost(link, error)
        self._fence(link, tuple(link.admissions), partial(self._fenced, link))

    def close(self) -> None:
        """Close the sockets and, with them, all listeners."""
        for link in self._links.values():
            link.socket.close()
        for listener in self._end.listeners.values():
            listener.close()

    def _make(self, host: str, port: int, address: str) -> PrefillLink:
        now_s, socket = self._clock(), self._socket(host, port)
        admissions, reasons = {}, []
        for name, listener in self._end.listeners.items():
            try:
                admissions[name] = listener.admit(host)
            except TransferRefused as error:  # the others are offered all the same
                log.warning("kv_transport.not_offered", transport=name, reason=str(error))
                reasons.append(str(error))
        if not admissions:
            socket.close()
            raise TransferRefused("; ".join(reasons))
        deadline_s = now_s + self._connect_timeout_s
        return PrefillLink(host, address, socket, admissions, deadline_s, last_heard_s=now_s)

    def _socket(self, host: str, port: int) -> Link[FromPrefill]:
        address = tcp_address(resolve(host), port)
        return Link(address, FromPrefill, self._key, self._heartbeat)

    def _is_kept(self, link: PrefillLink) -> bool:
        return self._links.get(link.address) is link

    def _hear(self, link: PrefillLink, message: FromPrefill) -> None:
        match message:
            case Refused(error=info):
                self.drop(link, error_from_info(info))
            case Welcome():
                self._welcome(link, message)
            case Redirect():
                self._redirect(link, message)
            case LinkPing():
                pass
            case Landed() | Released():
                if message.epoch == link.epoch:
                    self._heard(link, message)
                else:
                    self.num_refused += 1

    def _welcome(self, link: PrefillLink, welcome: Welcome) -> None:
        num_own = self._end.layout.num_kv_heads
        num_heads = num_own if welcome.num_heads is None else welcome.num_heads
        has_such_heads = welcome.first_head >= 0 and 0 <= num_heads <= num_own - welcome.first_head
        if link.is_up or welcome.transport not in link.admissions or not has_such_heads:
            self.num_refused += 1
            return self.drop(
                link, PeerLost("prefill said Welcome twice, or to another offer or rank")
            )
        link.epoch, link.transport = welcome.epoch, welcome.transport
        if not link.is_redirected:
            link.more_ports = welcome.more_ports
        link.heads = range(welcome.first_head, welcome.first_head + num_heads)
        log.info(
            "kv_link.up",
            address=link.socket.address,
            transport=link.transport,
            num_heads=len(link.heads),
        )
        unused = tuple(name for name in link.admissions if name != link.transport)
        self._fence(link, unused, lambda: None)
        return self._up(link)

    def _redirect(self, link: PrefillLink, redirect: Redirect) -> None:
        if link.is_up or link.is_redirected:
            self.num_refused += 1
            return self.drop(link, PeerLost("prefill redirected twice"))
        try:
            socket = self._socket(link.host, redirect.port)
        except PeerLost as error:
            return self.drop(link, error)
        link.socket.close()
        link.socket, link.is_redirected, link.is_greeted = socket, True, False
        link.more_ports = redirect.more_ports
        return None

    def _fence(self, link: PrefillLink, names: tuple[str, ...], fenced: Callable[[], None]) -> None:
        admissions = [(self._end.listeners[name], link.admissions.pop(name).peer) for name in names]

        def cut_off() -> None:
            for listener, peer in admissions:
                listener.fence(peer)
            self._control.post(fenced)

        threading.Thread(target=cut_off, name="kv-fence", daemon=True).start()

    def _keep_alive(self, now_s: float) -> None:
        is_ping_due = now_s >= self._next_ping_s
        if is_ping_due:
            self._next_ping_s = now_s + self._heartbeat.interval_s
        for link in list(self._links.values()):
            if not link.is_up and now_s >= link.deadline_s:
                why = f": {refusal}" if (refusal := link.socket.refusal) else ""
                self.drop(link, PeerLost(f"no answer from {link.socket.address}{why}"))
            elif not link.is_greeted:
                self._greet(link)
            elif now_s - link.last_heard_s > self._heartbeat.silence_s and link.is_up:
                self.drop(link, PeerLost(f"prefill was silent for {self._heartbeat.silence_s:g} s"))
            elif is_ping_due:
                self._ping(link)

    def _greet(self, link: PrefillLink) -> None:
        hello = Hello(
            epoch=self._end.epoch,
            fingerprint=self._end.fingerprint,
            layout=self._end.layout.to_info(),
            offers=[admission.offer for admission in link.admissions.values()],
            tp_rank=self._end.shard.tp_rank,
            tp_size=self._end.shard.tp_size,
            model_kv_heads=self._end.shard.model_kv_heads,
        )
        with contextlib.suppress(PeerLost):  # there is no connection yet
            link.socket.send(hello)
            link.is_greeted = True

    def _ping(self, link: PrefillLink) -> None:
        try:
            link.socket.send(LinkPing(epoch=self._end.epoch))
        except PeerLost as error:
            self.drop(link, error)
