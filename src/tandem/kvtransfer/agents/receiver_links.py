"""Decode's links: one to each requested bootstrap port, made on demand.

`link_session.py` has the states of a link. A Redirect sends a rank to the prefill rank that holds its heads.
Each Hello offers one transport, best first; if prefill refuses it, the next Hello offers the next one. Making an offer
may register the whole pool, so offers are made only when they are needed. A link is lost when prefill is silent, refuses the
last offer, or the connection breaks; the next `link_to` makes a new one.

Every transport call is a job of the link's worker. Jobs run in order, and a message follows the jobs
queued before it. The last job of a lost link is its fence, which may wait for a stopped writer.
Everything else runs on the agent's control thread. Links are independent of rooms.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from tandem.kvtransfer.agents.control import TURN_S, ControlThread, HeartbeatSchedule, LinkWorker
from tandem.kvtransfer.link_session import (
    LinkAction,
    LinkEvent,
    LinkSession,
    ReceiverLink,
    receiver_link,
)
from tandem.kvtransfer.threads import transport_errors
from tandem.kvtransfer.transports.base import Listener, PeerAdmission, PeerKey
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
    PROTOCOL,
    FromPrefill,
    Hello,
    Landed,
    LinkPing,
    RankAddress,
    Redirect,
    Refused,
    Released,
    Welcome,
)
from tandem.wire.hosts import is_address, resolve
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import Message

log = get_logger("kvtransfer.links")

T = TypeVar("T")

# A failed fence is retried, because nothing else makes its pages safe.
FENCE_RETRY_S = 1.0
# Polling interval while connecting, which takes a millisecond on one host.
CONNECTING_TURN_S = 0.002
# Time for either end to register its pool: decode from `link_to` to its offers, prefill from these to Welcome. Pinning a
# terabyte for RDMA takes most of this time; an unreachable resolver takes 20 s.
REGISTRATION_TIMEOUT_S = 60.0

# States in which the socket is open and Hello has not been sent over it.
HELLO_IS_DUE = (ReceiverLink.CONNECTING, ReceiverLink.REDIRECTED)


@dataclass(eq=False, slots=True)
class PrefillLink:
    """A link to one bootstrap port.

    Attributes:
        session: The link's state; only the control thread uses it, and `close` after that thread.
        ip: Address of `host`, once resolved, or the one that a Redirect named.
        port: Port of the socket: the requested one, or the one that a Redirect named.
        address: The requested address.
        untried: Names of the transports not yet offered, best first.
        transport: The last one offered. Only the worker changes `transport` and `untried`, while no socket is open.
        admissions: By transport name. The worker adds them before the socket is opened, and removes
            them once fenced.
        refusals: Why the earlier offers did not work.
        epoch: Prefill's epoch, once Welcome has arrived.
        more_addresses: Addresses of prefill's other ranks that hold our heads; known once the link is up.
        heads: Heads sent over this link, as indices in our pages; known once the link is up.
        heartbeat_s: Interval of prefill's pings; 0: the same as ours.
        num_lost: Connections of the socket that were lost before Hello.
        is_closed_by_peer: Whether prefill announced that it closes the link.
        deadline_s: Until the link is up: when the next step must be done.
        welcome_deadline_s: When Welcome must have arrived, if prefill sends pings until then.
    """

    host: str
    port: int
    address: str
    worker: LinkWorker
    untried: list[str]
    deadline_s: float
    last_received_s: float
    session: LinkSession[ReceiverLink] = field(default_factory=receiver_link)
    ip: str = ""
    transport: str = ""
    admissions: dict[str, PeerAdmission] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    socket: Link[FromPrefill] | None = None
    epoch: Epoch | None = None
    more_addresses: Sequence[RankAddress] = ()
    heads: range = range(0)
    heartbeat_s: float = 0.0
    num_lost: int = 0
    welcome_deadline_s: float = 0.0
    is_closed_by_peer: bool = False

    @property
    def is_up(self) -> bool:
        """Whether prefill sent Welcome and the link is not lost."""
        return self.session.state is ReceiverLink.UP


class PrefillLinks:
    """All links of a decode node.

    Args:
        hello: Describes this node; each link adds its offer.
        listeners: By transport name, best first.
        control: Runs everything here except the workers' jobs.
        key: The cluster's secret, which proves to prefill nodes that this node may connect.
        connect_timeout_s: See `ReceiverTimeouts.connect_s`.
        heartbeat: Heartbeat settings of the links.
        on_up: Called when a link is up.
        on_last_message: Called with every Landed and Released from a link that is up.
        on_lost: Called once when a link is lost, before its fence begins.
        on_fenced: Called when no write can arrive over a lost link any more.

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
        on_up: Callable[[PrefillLink], None],
        on_last_message: Callable[[PrefillLink, Landed | Released], None],
        on_lost: Callable[[PrefillLink, TandemError], None],
        on_fenced: Callable[[PrefillLink], None],
    ) -> None:
        self._hello, self._listeners = hello, listeners
        self._control, self._key, self._clock = control, key, clock
        self._connect_timeout_s, self._heartbeat = connect_timeout_s, heartbeat
        self._schedule = HeartbeatSchedule(heartbeat, clock())
        self._on_up, self._on_last_message = on_up, on_last_message
        self._on_lost, self._on_fenced = on_lost, on_fenced
        self.links: dict[str, PrefillLink] = {}
        self._closing = threading.Event()
        self.num_refused = 0

    @property
    def num_violations(self) -> int:
        """Number of rejected writes, summed over the listeners that count them."""
        return sum(getattr(each, "num_violations", 0) for each in self._listeners.values())

    def link_to(self, host: str, port: int) -> PrefillLink:
        """Return the link to a bootstrap port; make one if none exists."""
        address = tcp_address(host, port)
        if (link := self.links.get(address)) is None:
            now_s, worker = self._clock(), LinkWorker("kv-link", self._control)
            link = PrefillLink(host, port, address, worker, list(self._listeners), now_s, now_s)
            self.links[address] = link
            self._offer_next(link)
        return link

    def permit(self, link: PrefillLink, room: Room, page_ids: Sequence[int]) -> None:
        """Permit prefill's writes into these pages, before the next message is sent. The link must be up.

        If that fails, the link is dropped.
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
        check: Callable[[], T],
        then: Callable[[T], None],
        failed: Callable[[TandemError], None],
    ) -> None:
        """Revoke a room's pages, then call `check`, both on the worker; see `LinkWorker.submit` for the rest.

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
            return check()

        link.worker.submit(job, then, failed)

    def send(self, link: PrefillLink, message: Message) -> None:
        """Send a message after the jobs queued before it.

        If sending fails, the link is dropped, because messages are not resent.
        """
        link.worker.after(partial(self._send, link, message))

    def turn(self, waker: Waker) -> None:
        """Wait briefly, handle received messages, send pings, and drop silent links."""
        links = list(self.links.values())
        sockets = [link.socket for link in links if link.socket is not None]
        is_connecting = any(link.session.state in HELLO_IS_DUE for link in links)
        wait(sockets, CONNECTING_TURN_S if is_connecting else TURN_S, waker)
        # Read queued messages of every link before checking for silence: this thread may have been slow.
        for link in links:
            self._receive(link)
        self._keep_alive(self._clock())

    def drop(self, link: PrefillLink, error: TandemError) -> None:
        """Drop a link and start to fence it; no-op if it is already dropped."""
        self._apply(link, LinkEvent.LOST, error)

    def close(self) -> None:
        """Close the sockets and, with them, all listeners."""
        self._closing.set()
        for link in self.links.values():
            self._send(link, LinkPing(epoch=self._hello.epoch, is_last=True))
            self._apply(link, LinkEvent.SHUT_DOWN)
            link.worker.end()
        for listener in self._listeners.values():
            listener.close()

    def _apply(self, link: PrefillLink, event: LinkEvent, error: TandemError | None = None) -> None:
        actions = link.session.apply(event)
        with ExitStack() as stack:  # all actions run even if one raises: a lost link must be fenced
            for action in reversed(actions):
                stack.callback(self._act, link, action, error)

    def _act(self, link: PrefillLink, action: LinkAction, error: TandemError | None) -> None:
        match action:
            case LinkAction.OFFER_NEXT:
                self._offer_next(link)
            case LinkAction.OPEN_SOCKET:
                now_s = self._clock()
                link.deadline_s = now_s + self._connect_timeout_s
                link.welcome_deadline_s = now_s + REGISTRATION_TIMEOUT_S
                link.socket = self._socket(link.ip, link.port)
            case LinkAction.REOPEN_SOCKET:
                old, link.socket = link.socket, self._socket(link.ip, link.port)
                if old is not None:
                    old.close()
            case LinkAction.CLOSE_SOCKET:
                if link.socket is not None:
                    link.socket.close()
            case LinkAction.REMOVE:
                self._remove(link, error)
            case LinkAction.REPORT_UP:
                self._on_up(link)
            case LinkAction.REPORT_LOST:
                assert error is not None
                self._on_lost(link, error)
            case LinkAction.REPORT_FENCED:
                self._on_fenced(link)
            case LinkAction.FENCE:
                link.worker.submit(
                    partial(self._cut_off, link),
                    lambda _none: self._apply(link, LinkEvent.FENCED),
                    lambda _error: None,  # only after close(), when nobody receives reports
                )
                link.worker.end()
            case _:
                raise AssertionError(action)

    def _remove(self, link: PrefillLink, error: TandemError | None) -> None:
        if link.is_closed_by_peer:
            log.info("kv_link.closed", address=link.address)
        else:
            log.warning("kv_link.lost", address=link.address, reason=str(error))
        del self.links[link.address]

    def _offer_next(self, link: PrefillLink) -> None:
        """Make the next offer, then connect to the requested port."""
        if link.socket is not None:
            link.socket.close()
            link.socket = None
        link.port = int(link.address.rpartition(":")[2])  # of rank 0, which names the other ranks
        link.deadline_s = self._clock() + REGISTRATION_TIMEOUT_S
        link.worker.submit(
            partial(self._offer, link), partial(self._connect, link), partial(self.drop, link)
        )

    def _offer(self, link: PrefillLink) -> str:
        """Resolve the link's host, fence the refused offer, if any, and make the next one. Runs on the worker."""
        ip = resolve(link.host)
        with contextlib.suppress(
            TandemError
        ):  # an offer that cannot be fenced now is fenced with the link
            self._fence(link)
        while link.untried:
            link.transport = link.untried.pop(0)
            try:
                with transport_errors():
                    link.admissions[link.transport] = self._listeners[link.transport].admit(ip)
                    return ip
            except TandemError as error:  # the other transports are still offered
                log.warning("kv_transport.not_offered", transport=link.transport, reason=str(error))
                link.refusals.append(str(error))
        raise TransferRefused("; ".join(link.refusals))

    def _connect(self, link: PrefillLink, ip: str) -> None:
        link.ip = ip
        self._apply(link, LinkEvent.OFFER_READY)

    def _socket(self, ip: str, port: int) -> Link[FromPrefill]:
        return Link(tcp_address(ip, port), FromPrefill, self._key, self._heartbeat)

    def _receiving(self, link: PrefillLink) -> tuple[Listener, PeerKey]:
        """Return the listener that receives prefill's writes, and prefill's key there. The link must be up."""
        return self._listeners[link.transport], link.admissions[link.transport].peer

    def _send(self, link: PrefillLink, message: Message) -> None:
        if link.socket is None or not link.session.is_open:
            return
        try:
            with transport_errors():
                link.socket.send(message)
        except TandemError as error:
            # Posted, so that the message's room finishes its transition before it loses the link.
            self._control.post(partial(self.drop, link, error))

    def _receive(self, link: PrefillLink) -> None:
        for message in self._queued(link):
            link.last_received_s = self._clock()
            try:
                with transport_errors():
                    self._handle(link, message)
            except TandemError as error:
                self.drop(link, error)  # the link's rooms then end after its fence

    def _queued(self, link: PrefillLink) -> Iterator[FromPrefill]:
        """Yield the queued messages, until one of them drops the link or replaces its socket."""
        if (socket := link.socket) is None or not link.session.is_open:
            return
        for message in socket.queued():
            yield message
            if link.socket is not socket or not link.session.is_open:
                return

    def _handle(self, link: PrefillLink, message: FromPrefill) -> None:
        match message:
            case Refused(error=info):
                self._refused(link, error_from_info(info))
            case Welcome():
                self._welcome(link, message)
            case Redirect():
                self._redirect(link, message)
            case LinkPing(is_last=True):
                link.is_closed_by_peer = True
                self.drop(link, PeerLost("prefill closed the link"))
            case LinkPing():  # before Welcome, prefill is alive and registers its pool
                deadline_s = self._clock() + self._connect_timeout_s
                link.deadline_s = min(deadline_s, link.welcome_deadline_s)
            case Landed() | Released():
                if message.epoch == link.epoch:
                    self._on_last_message(link, message)
                else:
                    self.num_refused += 1

    def _refused(self, link: PrefillLink, error: TandemError) -> None:
        if error.code != TransferRefused.code or not link.session.expects(LinkEvent.OFFER_REFUSED):
            return self.drop(link, error)
        link.refusals.append(error.message)
        if not link.untried:
            return self.drop(link, TransferRefused("; ".join(link.refusals)))
        return self._apply(link, LinkEvent.OFFER_REFUSED)

    def _welcome(self, link: PrefillLink, welcome: Welcome) -> None:
        num_own = self._hello.layout.num_kv_heads
        num_heads = num_own if welcome.num_heads is None else welcome.num_heads
        has_such_heads = welcome.first_head >= 0 and 0 <= num_heads <= num_own - welcome.first_head
        is_expected = link.session.expects(LinkEvent.WELCOME_ARRIVED)
        if not is_expected or welcome.transport != link.transport or not has_such_heads:
            self.num_refused += 1
            return self.drop(
                link, PeerLost("prefill sent Welcome twice, or for a different offer or rank")
            )
        if welcome.protocol != PROTOCOL:
            self.num_refused += 1
            return self.drop(link, ProtocolMismatch(welcome.protocol, PROTOCOL))
        link.epoch, link.heartbeat_s = welcome.epoch, welcome.heartbeat_s
        if link.session.state is ReceiverLink.GREETED:  # else the Redirect named them
            link.more_addresses = welcome.more_addresses
        link.heads = range(welcome.first_head, welcome.first_head + num_heads)
        log.info(
            "kv_link.up",
            address=link.address,
            transport=link.transport,
            num_heads=len(link.heads),
        )
        self._apply(link, LinkEvent.WELCOME_ARRIVED)
        return None

    def _redirect(self, link: PrefillLink, redirect: Redirect) -> None:
        if not link.session.expects(LinkEvent.REDIRECT_ARRIVED):
            self.num_refused += 1
            return self.drop(link, PeerLost("prefill redirected twice"))
        if (host := redirect.address.host) and not is_address(host):
            self.num_refused += 1
            return self.drop(link, PeerLost("prefill redirected to a host that is no IP address"))
        link.ip, link.port = host or link.ip, redirect.address.port
        link.more_addresses = redirect.more_addresses
        self._apply(link, LinkEvent.REDIRECT_ARRIVED)
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

    def _fence(self, link: PrefillLink) -> None:
        """Fence all offers. Runs on the worker.

        Raises:
            TandemError: An offer could not be fenced. Fenced offers are removed.
        """
        failure = None
        for name in list(link.admissions):
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
                    effect="retried when the link ends; pages that prefill may still write stay in quarantine",
                )
        if failure is not None:
            raise failure

    def _keep_alive(self, now_s: float) -> None:
        is_ping_due = self._schedule.is_ping_due(now_s)
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
        if link.session.state in HELLO_IS_DUE:
            return self._greet(link, link.socket)
        if (socket := link.socket).num_lost > link.num_lost:
            self._receive(link)  # what came before the end
            if link.socket is not socket:  # Redirect came
                return None
            raise PeerLost(f"the connection to {socket.address} was lost")
        if link.is_up:
            self._schedule.check("prefill", link.heartbeat_s, link.last_received_s, now_s)
        if is_ping_due:
            link.socket.send(LinkPing(epoch=self._hello.epoch))
        return None

    def _greet(self, link: PrefillLink, socket: Link[FromPrefill]) -> None:
        offers = [link.admissions[link.transport].offer]
        link.num_lost = socket.num_lost
        with contextlib.suppress(PeerLost):  # there is no connection yet
            socket.send(msgspec.structs.replace(self._hello, offers=offers))
            self._apply(link, LinkEvent.HELLO_SENT)


def _no_answer(link: PrefillLink) -> PeerLost:
    if link.socket is None:
        return PeerLost(f"no offer for {link.address} was ready in {REGISTRATION_TIMEOUT_S:g} s")
    why = f": {refusal}" if (refusal := link.socket.refusal) else ""
    return PeerLost(f"no answer from {link.socket.address}{why}")
