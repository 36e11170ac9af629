"""Two hosts: one listens, the other connects, writes and measures. Both end with the same table.

```
 connecting ──▶ Begin                                             listening
            ◀── Welcome, or Refused
            ──▶ Open                     ┐
            ◀── Opened, NotOpened, Failed│ for each limit and transport; the bytes go past us,
            ──▶ Check                    │ from probe to probe
            ◀── Checked, Failed          │
            ──▶ Shut                     ┘
            ──▶ Finished
            ◀── Farewell
 Alive goes both ways meanwhile: sending to a peer that is gone fails.
```

All times are taken at the writing end; the two clocks are never compared.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tandem.doctor.measuring import PROBE_TIMEOUT_S, ReceivingProbe
from tandem.doctor.pair_messages import (
    Alive,
    Begin,
    Failed,
    Farewell,
    Finished,
    Open,
    Refused,
    Shut,
    ToConnecting,
    ToListening,
    Welcome,
)
from tandem.doctor.probe import SOCKET, Check, Checked, NotOpened, Opened, Shape, Where
from tandem.doctor.probe_process import WATCH_S
from tandem.kvtransfer.transports.registry import known
from tandem.wire.channel import Inbox, Link, Peer, tcp_address, wait
from tandem.wire.errors import (
    PeerLost,
    TandemError,
    TransferRefused,
    TransferTimeout,
    error_from_info,
)
from tandem.wire.heartbeat import Heartbeat
from tandem.wire.hosts import resolve
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import Message

# A connection on a local network takes milliseconds, and across the world less than one second. The rest is
# for a machine that stands still: whoever refuses us says so at once.
CONNECT_TIMEOUT_S = 10.0
# Both machines are at their limits while they are measured. A process that ends is noticed at once all the same.
HEARTBEAT = Heartbeat(interval_s=5.0)
# The far end answers when its probe did, or when that ran out of time and was ended.
ANSWER_TIMEOUT_S = PROBE_TIMEOUT_S + 10.0
FAREWELL_TIMEOUT_S = 10.0
POLL_S = 0.02

Answer = TypeVar("Answer", bound=Message)


@dataclass(frozen=True, slots=True)
class Session:
    """What the listening end knows when all is over."""

    peer: Begin
    finished: Finished


class Listening:
    """The end that receives: serves one session.

    Args:
        began: Called with what the other end says of itself.
    """

    def __init__(
        self, inbox: Inbox[ToListening], where: Where, me: Welcome, began: Callable[[Begin], None]
    ) -> None:
        self._inbox, self._where, self._me, self._began = inbox, where, me, began
        self._peer: Peer | None = None
        self._begin: Begin | None = None
        self._probe: ReceivingProbe | None = None

    def serve(self) -> Session:
        """Wait for the other end, for as long as it takes, and serve it.

        Raises:
            PeerLost: It went away before it was done.
        """
        try:
            while True:
                wait([self._inbox], WATCH_S)
                self._watch()
                while (envelope := self._inbox.receive()) is not None:
                    if finished := self._hear(envelope.peer, envelope.message):
                        assert self._begin is not None
                        return Session(self._begin, finished)
        finally:
            if self._probe is not None:
                self._probe.shut()

    def _watch(self) -> None:
        if self._peer is not None:
            self._answer(self._peer, Alive())

    def _answer(self, peer: Peer, message: Message) -> None:
        """Send; a stranger who is gone by now is not missed."""
        try:
            self._inbox.send(peer, message)
        except PeerLost as error:
            if peer == self._peer:
                assert self._begin is not None
                raise PeerLost(f"{self._begin.host} went away before it was done") from error

    def _hear(self, peer: Peer, message: ToListening) -> Finished | None:
        if peer != self._peer:
            self._meet(peer, message)
            return None
        assert self._probe is not None
        match message:
            case Open():
                self._answer(peer, self._open(self._probe, message.transport))
            case Check():
                self._answer(peer, _answered(lambda: _checked(self._probe, message), self._watch))
            case Shut():
                self._probe.shut()
            case Finished():
                self._answer(peer, Farewell())
                return message
            case Begin() | Alive():
                pass
        return None

    def _meet(self, peer: Peer, message: ToListening) -> None:
        if not isinstance(message, Begin):
            error: TandemError = TransferRefused("this end was started anew; run both again")
        elif self._peer is not None:
            error = TransferRefused("this end is being measured by another one")
        else:
            try:
                shape = msgspec.convert(
                    {"page_bytes": message.page_bytes, "num_pages": message.num_pages}, Shape
                )
            except msgspec.ValidationError as invalid:
                error = TransferRefused(f"no pool of that size is made here: {invalid}")
            else:
                return self._accept(peer, message, shape)
        return self._answer(peer, Refused(error=error.info()))

    def _accept(self, peer: Peer, begin: Begin, shape: Shape) -> None:
        self._peer, self._begin = peer, begin
        self._probe = ReceivingProbe(shape, self._where, begin.address, self._watch)
        self._answer(peer, self._me)
        self._began(begin)

    def _open(self, probe: ReceivingProbe, name: str) -> Message:
        if name not in (SOCKET, *known()):
            return NotOpened(stage="library", reason=f"the other end knows no transport {name!r}")
        return _answered(lambda: probe.open(name), self._watch)


def _checked(probe: ReceivingProbe | None, check: Check) -> Message:
    assert probe is not None
    return Checked(digest=probe.digest(check.num_copies))


def _answered(ask: Callable[[], Message], watch: Callable[[], None]) -> Message:
    """Return the probe's answer, or how it broke; raise when it is the peer that is gone."""
    try:
        return ask()
    except (PeerLost, TransferTimeout) as error:
        watch()
        return Failed(error=error.info())


class RemoteFarEnd:
    """The listening end, as a `FarEnd` of the connecting one.

    Raises:
        PeerLost: There is no such end, or it refuses us; the sentence says what to look at.
    """

    def __init__(self, host: str, port: int, key: ChannelKey | None, begin: Begin) -> None:
        self._name = tcp_address(host, port).removeprefix("tcp://")
        address = tcp_address(resolve(host), port)
        self._link: Link[ToConnecting] = Link(address, ToConnecting, key, HEARTBEAT)
        with contextlib.ExitStack() as undo:
            undo.callback(self._link.close)
            self._connect(host, port, begin, has_key=key is not None)
            self.peer = _is_a(Welcome, self._answer(CONNECT_TIMEOUT_S))
            undo.pop_all()

    def _connect(self, host: str, port: int, begin: Begin, *, has_key: bool) -> None:
        try:  # at once where nobody listens; the link would try again and again
            socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise PeerLost(
                f"nobody listens at {self._name} ({error.strerror or error}): start `tandem doctor "
                "--listen` there, and see that the port is open"
            ) from error
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            try:
                return self._link.send(begin)
            except PeerLost as error:
                if self._link.refusal or time.monotonic() > deadline_s:
                    raise PeerLost(
                        f"{self._name} answers and does not take us: TANDEM_CLUSTER_KEY must be the "
                        f"same at both ends (it is {'' if has_key else 'not '}set here), and `tandem "
                        "doctor --listen` what listens there"
                    ) from error
                wait([self._link], POLL_S)

    def open(self, name: str) -> Opened | NotOpened:
        """See `FarEnd.open`."""
        self._link.send(Open(transport=name))
        answer = self._answer()
        return answer if isinstance(answer, NotOpened) else _is_a(Opened, answer)

    def digest(self, num_copies: int) -> str:
        """See `FarEnd.digest`."""
        self._link.send(Check(num_copies=num_copies))
        return _is_a(Checked, self._answer()).digest

    def shut(self) -> None:
        """See `FarEnd.shut`; a far end that is gone is found out by the next question."""
        with contextlib.suppress(PeerLost):
            self._link.send(Shut())

    def watch(self) -> None:
        """See `FarEnd.watch`."""
        try:
            self._link.send(Alive())
        except PeerLost as error:
            raise PeerLost(f"{self._name} went away before it was done") from error

    def finish(self, finished: Finished) -> None:
        """Tell what came of it; a far end that is gone by now is not missed."""
        try:
            self._link.send(finished)
            self._answer(FAREWELL_TIMEOUT_S)
        except TandemError:
            return

    def close(self) -> None:
        """Hang up."""
        self._link.close()

    def _answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> ToConnecting:
        """Return the next message that says something.

        Raises:
            TandemError: The far end refused, failed, is gone or does not answer in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            wait([self._link], WATCH_S)
            while (message := self._link.receive()) is not None:
                if isinstance(message, Refused | Failed):
                    raise error_from_info(message.error)
                if not isinstance(message, Alive):
                    return message
            self.watch()
            if time.monotonic() > deadline_s:
                raise TransferTimeout(f"{self._name} does not answer")


def _is_a(kind: type[Answer], message: Message) -> Answer:
    if not isinstance(message, kind):
        raise PeerLost(f"the other end says {type(message).__name__} instead of {kind.__name__}")
    return message
