"""Decode's links: one to each requested bootstrap port, made on demand.

```
 want ─▶ OPENING     the link's worker resolves the host and has each transport make an offer
      ─▶ CONNECTING  Hello goes out once there is a connection, with the offers
      ─▶ GREETED     Redirect sends a rank to prefill's rank with heads of it: CONNECTING again, once
                     Welcome names the transport prefill took; the other offers are fenced
      ─▶ up          until prefill is silent, refuses, or the connection breaks: then the link is
                     lost, once, and the next `want` makes a new one
```

Every transport call is a job of the link's worker. Jobs run in order, and a message follows the jobs
queued before it. The last job of a lost link is its fence, which may wait for a stopped writer.
Everything else runs on the agent's control thread. Links are independent of rooms.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from tandem.kvtransfer.control import TURN_S, ControlThread, Rhythm, Worker, transport_errors
from tandem.kvtransfer.transports.base import Admission, Listener, PeerKey
from tandem.telemetry.log import get_logger
from tandem.wire.channel import Heartbeat, Link, Waker, tcp_address, wait
from tandem.wire.errors import (
    PeerLost,
    ProtocolMismatch,
    TandemError,
    TransferRefused,
    error_from_info,
)
from tandem.wire.generation import Epoch, Room
from tandem.wire.hand_off import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    STRIPS_PROTOCOL,
    FromPrefill,
    Hello,
    Landed,
    LinkPing,
    Redirect,
    Refused,
    Released,
    Welcome,
)
from tandem.wire.hosts import resolve
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import Message

log = get_logger("kvtransfer.links")

T = TypeVar("T")

# A failed fence is retried, because nothing else makes its pages safe.
FENCE_RETRY_S = 1.0
# Polling interval while connecting, which takes a millisecond on one host.
CONNECTING_TURN_S = 0.002
# From `want` to the offers. Pinning a terabyte for RDMA takes most of it; an unreachable resolver takes 20 s.
OPEN_TIMEOUT_S = 60.0


@dataclass(eq=False, slots=True)
class PrefillLink:
    """A link to one bootstrap port.

    Attributes:
        ip: Address of `host`, once resolved.
        address: The requested address; after a Redirect the socket's port may differ.
        admissions: By transport name. The worker adds them before the socket is opened, and removes
            them once fenced.
        epoch: Prefill's epoch, once Welcome has arrived.
        transport: The one that prefill chose; the other offers are then fenced.
        more_ports: Ports of prefill's other ranks that hold our heads; known once the link is up.
        heads: Heads sent over this link, as indices in our pages; known once the link is up.
    """

    host: str
    port: int
    address: str
    worker: Worker
    deadline_s: float
    last_heard_s: float
    ip: str = ""
    admissions: dict[str, Admission] = field(default_factory=dict)
    socket: Link[FromPrefill] | None = None
    is_greeted: bool = False
    is_redirected: bool = False
    epoch: Epoch | None = None
    transport: str = ""
    more_ports: Sequence[int] = ()
    heads: range = range(0)

    @property
    def is_up(self) -> bool:
        """Whether prefill sent Welcome."""
        return self.epoch is not None


class PrefillLinks:
    """Keeps decode's links.

    Args:
        hello: Describes this node; each link adds its offers.
        listeners: By transport name, best first.
        control: Runs everything here except the workers' jobs.
        key: Proves to prefill nodes that this node knows the cluster's secret.
        connect_timeout_s: From the offers to Welcome.
        heartbeat: Heartbeat settings of the links.
        up: Called when a link is up.
        heard: Called with every Landed and Released from a link that is up.
        lost: Called once when a link is lost, before its fence begins.
        fenced: Called when no write can arrive over a lost link any more.

    Attributes:
        links: Links that are up or connecting, by address.
        num_refused: Number of invalid messages from prefill nodes.
    """

    def __init__(
        self,
        hello: Hello,
        listeners: Mapping[str, Listener],
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
        self._hello, self._listeners = hello, listeners
        self._control, self._key, self._clock = control, key, clock
        self._connect_timeout_s, self._heartbeat = connect_timeout_s, heartbeat
        self._rhythm = Rhythm(heartbeat, clock())
        self._up, self._heard, self._lost, self._fenced = up, heard, lost, fenced
        self.links: dict[str, PrefillLink] = {}
        self._closing = threading.Event()
        self.num_refused = 0

    @property
    def num_violations(self) -> int:
        """Number of rejected writes, summed over the listeners that count them."""
        return sum(getattr(each, "num_violations", 0) for each in self._listeners.values())

    def want(self, host: str, port: int) -> PrefillLink:
        """Return the link to a bootstrap port; make one if none exists."""
        address = tcp_address(host, port)
        if (link := self.links.get(address)) is None:
            now_s, worker = self._clock(), Worker("kv-link", self._control)
            link = PrefillLink(host, port, address, worker, now_s + OPEN_TIMEOUT_S, now_s)
            self.links[address] = link
            worker.submit(
                partial(self._offer, link), partial(self._connect, link), partial(self.drop, link)
            )
        return link

    def permit(self, link: PrefillLink, room: Room, page_ids: Sequence[int]) -> None:
        """Let prefill write into these pages, before the next message is sent. The link must be up.

        A failure drops the link.
        """
        listener, peer = self._receiving(link)
        link.worker.submit(
            lambda: listener.permit(peer, room, page_ids),
            lambda _none: None,
            partial(self.drop, link),
        )

    def revoke(
        self,
        link: PrefillLink,
        room: Room,
        look: Callable[[], T],
        then: Callable[[T], None],
        failed: Callable[[TandemError], None],
    ) -> None:
        """Revoke a room's pages, then call `look`, both on the worker; see `Worker.submit` for the rest.

        If the revocation fails, the peer is fenced and the link dropped.
        """
        listener, peer = self._receiving(link)

        def job() -> T:
            try:
                with transport_errors():
                    listener.revoke(peer, room)
            except TandemError as error:
                self._control.post(partial(self.drop, link, error))
                listener.fence(peer)
            return look()

        link.worker.submit(job, then, failed)

    def send(self, link: PrefillLink, message: Message) -> None:
        """Send a message after the jobs queued before it.

        If sending fails, the link is dropped, because messages are not resent.
        """
        link.worker.after(partial(self._send, link, message))

    def turn(self, waker: Waker) -> None:
        """Wait briefly, handle all received messages, send pings, and drop silent links."""
        links = list(self.links.values())
        sockets = [link.socket for link in links if link.socket is not None]
        is_connecting = any(link.socket and not link.is_greeted for link in links)
        wait(sockets, CONNECTING_TURN_S if is_connecting else TURN_S, waker)
        # Read everything before judging a link silent: this thread may have been slow.
        for link in links:
            while (message := self._next(link)) is not None:
                link.last_heard_s = self._clock()
                try:
                    with transport_errors():
                        self._hear(link, message)
                except TandemError as error:
                    self.drop(link, error)  # the link's rooms then end after its fence
        self._keep_alive(self._clock())

    def drop(self, link: PrefillLink, error: TandemError) -> None:
        """Drop a link and start to fence it; no-op if it is already dropped."""
        if not self._is_kept(link):
            return
        log.warning("kv_link.lost", address=link.address, reason=str(error))
        del self.links[link.address]
        if link.socket is not None:
            link.socket.close()
        try:
            self._lost(link, error)
        finally:
            link.worker.submit(
                partial(self._cut_off, link),
                lambda _none: self._fenced(link),
                lambda _error: None,  # only after close(): nothing to report to
            )
            link.worker.end()

    def close(self) -> None:
        """Close the sockets and, with them, all listeners."""
        self._closing.set()
        for link in self.links.values():
            if link.socket is not None:
                link.socket.close()
            link.worker.end()
        for listener in self._listeners.values():
            listener.close()

    def _offer(self, link: PrefillLink) -> str:
        """Resolve the link's host and collect an offer from each transport. Runs on the worker."""
        ip, reasons = resolve(link.host), []
        for name, listener in self._listeners.items():
            try:
                with transport_errors():
                    link.admissions[name] = listener.admit(ip)
            except TandemError as error:  # the other transports are still offered
                log.warning("kv_transport.not_offered", transport=name, reason=str(error))
                reasons.append(str(error))
        if not link.admissions:
            raise TransferRefused("; ".join(reasons))
        return ip

    def _connect(self, link: PrefillLink, ip: str) -> None:
        if self._is_kept(link):
            link.ip, link.deadline_s = ip, self._clock() + self._connect_timeout_s
            link.socket = self._socket(ip, link.port)

    def _socket(self, ip: str, port: int) -> Link[FromPrefill]:
        return Link(tcp_address(ip, port), FromPrefill, self._key, self._heartbeat)

    def _receiving(self, link: PrefillLink) -> tuple[Listener, PeerKey]:
        """Return the listener that prefill writes through, and prefill's key there. The link must be up."""
        return self._listeners[link.transport], link.admissions[link.transport].peer

    def _send(self, link: PrefillLink, message: Message) -> None:
        if link.socket is None or not self._is_kept(link):
            return
        try:
            with transport_errors():
                link.socket.send(message)
        except TandemError as error:
            # Posted, so that the message's room finishes its transition before it loses the link.
            self._control.post(partial(self.drop, link, error))

    def _is_kept(self, link: PrefillLink) -> bool:
        return self.links.get(link.address) is link

    def _next(self, link: PrefillLink) -> FromPrefill | None:
        """Return the next message, or None. Handling a message may drop the link or replace its socket."""
        return link.socket.receive() if link.socket and self._is_kept(link) else None

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
        num_own = self._hello.layout.num_kv_heads
        num_heads = num_own if welcome.num_heads is None else welcome.num_heads
        has_such_heads = welcome.first_head >= 0 and 0 <= num_heads <= num_own - welcome.first_head
        if link.is_up or welcome.transport not in link.admissions or not has_such_heads:
            self.num_refused += 1
            return self.drop(
                link, PeerLost("prefill sent Welcome twice, or for another offer or rank")
            )
        # A prefill that knows no strips would write elsewhere.
        oldest = STRIPS_PROTOCOL if self._hello.layout.strips else OLDEST_PROTOCOL
        if not oldest <= welcome.protocol <= PROTOCOL:
            self.num_refused += 1
            return self.drop(link, ProtocolMismatch(welcome.protocol, oldest, PROTOCOL))
        link.epoch, link.transport = welcome.epoch, welcome.transport
        if not link.is_redirected:
            link.more_ports = welcome.more_ports
        link.heads = range(welcome.first_head, welcome.first_head + num_heads)
        log.info(
            "kv_link.up",
            address=link.address,
            transport=link.transport,
            num_heads=len(link.heads),
        )
        self._up(link)
        if self._is_kept(link):  # after the permits of waiting rooms
            # Offers that cannot be fenced now are fenced with the link.
            fence = partial(self._fence, link, link.transport)
            link.worker.submit(fence, lambda _none: None, lambda _error: None)
        return None

    def _redirect(self, link: PrefillLink, redirect: Redirect) -> None:
        if link.is_up or link.is_redirected:
            self.num_refused += 1
            return self.drop(link, PeerLost("prefill redirected twice"))
        try:
            socket = self._socket(link.ip, redirect.port)
        except PeerLost as error:
            return self.drop(link, error)
        if link.socket is not None:
            link.socket.close()
        link.socket, link.is_redirected, link.is_greeted = socket, True, False
        link.more_ports = redirect.more_ports
        return None

    def _cut_off(self, link: PrefillLink) -> None:
        """Fence a lost link, and retry until it succeeds. Runs on the worker.

        Raises:
            TandemError: Every attempt until `close` failed.
        """
        while True:
            try:
                return self._fence(link)
            except TandemError:
                if self._closing.wait(FENCE_RETRY_S):
                    raise

    def _fence(self, link: PrefillLink, kept: str = "") -> None:
        """Fence all offers except that of transport `kept`. Runs on the worker.

        Raises:
            TandemError: An offer could not be fenced. Fenced offers are removed.
        """
        failure = None
        for name in [each for each in link.admissions if each != kept]:
            try:
                with transport_errors():
                    self._listeners[name].fence(link.admissions[name].peer)
                del link.admissions[name]
            except TandemError as error:
                failure = error
                log.warning(
                    "kv_fence.failed",
                    address=link.address,
                    transport=name,
                    reason=str(error),
                    effect="it is tried again with the end of the link; pages it may still "
                    "write into stay in quarantine",
                )
        if failure is not None:
            raise failure

    def _keep_alive(self, now_s: float) -> None:
        is_ping_due = self._rhythm.is_ping_due(now_s)
        for link in list(self.links.values()):
            try:
                self._keep_one_alive(link, now_s, is_ping_due=is_ping_due)
            except PeerLost as error:
                self.drop(link, error)

    def _keep_one_alive(self, link: PrefillLink, now_s: float, *, is_ping_due: bool) -> None:
        if not link.is_up and now_s >= link.deadline_s:
            raise _no_answer(link)
        if link.socket is None:
            return None
        if not link.is_greeted:
            return self._greet(link, link.socket)
        if link.is_up:
            self._rhythm.check("prefill", link.last_heard_s, now_s)
        if is_ping_due:
            link.socket.send(LinkPing(epoch=self._hello.epoch))
        return None

    def _greet(self, link: PrefillLink, socket: Link[FromPrefill]) -> None:
        offers = [admission.offer for admission in link.admissions.values()]
        with contextlib.suppress(PeerLost):  # there is no connection yet
            socket.send(msgspec.structs.replace(self._hello, offers=offers))
            link.is_greeted = True


def _no_answer(link: PrefillLink) -> PeerLost:
    if link.socket is None:
        return PeerLost(f"no offer for {link.address} was ready in {OPEN_TIMEOUT_S:g} s")
    why = f": {refusal}" if (refusal := link.socket.refusal) else ""
    return PeerLost(f"no answer from {link.socket.address}{why}")
