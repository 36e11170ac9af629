"""`python -m tandem.doctor.probe`: one end of one transport, in a process of its own.

So a native library that crashes, hangs or prints harms one row of a table, and no two that bring the same
symbols meet. The first message tells which end this is; the process ends when its standard input does.

```
 parent ──▶ Receive ─▶ Opened, then for each Check a Checked        or NotOpened
 parent ──▶ Send    ─▶ Measured                                     or NotOpened, Broke
```
"""

import os
import sys
import threading
from typing import Annotated, Literal

import msgspec

from tandem.doctor.pipe import RankPipe
from tandem.kvtransfer import measure
from tandem.kvtransfer.bare_stream import BareStreamTransport
from tandem.kvtransfer.measure import scattered_pages
from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Admission, Listener, Pool, Transport, TransportConfig
from tandem.kvtransfer.transports.registry import transports
from tandem.node.process import claim_stdout
from tandem.telemetry import log as logs
from tandem.wire.errors import ConfigInvalid, TandemError
from tandem.wire.hand_off import TransportOffer
from tandem.wire.ids import Room
from tandem.wire.messages import Message

# Limits that are measured as if they were transports.
MEMCPY, SOCKET = "memcpy", "socket"
ROOM = Room(1)

# A peer says how large a pool to make for it: no more than a machine that serves models has to spare.
PageBytes = Annotated[int, msgspec.Meta(ge=4096, le=16 << 20, multiple_of=8)]
NumPages = Annotated[int, msgspec.Meta(ge=1, le=1 << 14)]
MAX_POOL_BYTES = 1 << 30

Stage = Literal["library", "listen", "connect"]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The pool at either end."""

    page_bytes: PageBytes
    num_pages: NumPages

    def __post_init__(self) -> None:
        if self.pool_bytes > MAX_POOL_BYTES:
            raise ValueError(f"a pool of {self.pool_bytes} bytes")

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pages."""
        return self.page_bytes * self.num_pages


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """What transports are told of this host; see `TransportConfig`."""

    host: str
    interface: str = ""
    directory: str = ""


class Receive(Message, frozen=True, kw_only=True):
    """Make a pool and let one peer write into it."""

    transport: str
    shape: Shape
    where: Where
    toward_host: str


class Send(Message, frozen=True, kw_only=True):
    """Write to whoever made `offer` (None for memcpy), for about so long."""

    transport: str
    shape: Shape
    where: Where
    rate_s: float
    latency_s: float
    offer: TransportOffer | None = None


class Check(Message, frozen=True, kw_only=True):
    """Hash where the first copies were to go."""

    num_copies: int


class Opened(Message, frozen=True, kw_only=True):
    """The far end may connect."""

    offer: TransportOffer


class NotOpened(Message, frozen=True, kw_only=True):
    """This transport cannot be used, at which stage, and why."""

    stage: Stage
    reason: str


class Broke(Message, frozen=True, kw_only=True):
    """A write failed although both ends had agreed."""

    reason: str


class Measured(Message, frozen=True, kw_only=True):
    """What came of the writing.

    Attributes:
        num_copies: So many of the plan's copies are there now, and hash to `digest`.
        round_trip_us: Of an empty write, on a bare stream only.
    """

    bytes_per_s: float
    latency_us: float
    num_copies: int
    digest: str
    round_trip_us: float | None = None


class Checked(Message, frozen=True, kw_only=True):
    """The hash that was asked for."""

    digest: str


ToProbe = Receive | Send | Check
FromProbe = Opened | NotOpened | Broke | Measured | Checked


class Unusable(Exception):
    """Ends a probe with a `NotOpened`."""

    def __init__(self, stage: Stage, error: Exception) -> None:
        super().__init__(str(error))
        self.answer = NotOpened(stage=stage, reason=str(error) or type(error).__name__)


def main() -> int:
    """Do what the first message says; return the exit status."""
    pipe: RankPipe[ToProbe] = RankPipe(sys.stdin.buffer, claim_stdout(), ToProbe)
    logs.configure("error", "json")
    try:
        match pipe.receive():
            case Receive() as task:
                _receive(pipe, task)
            case Send() as task:
                threading.Thread(target=_end_with_parent, daemon=True).start()
                pipe.send(_send(task))
            case _:
                return 2
    except Unusable as unusable:
        pipe.send(unusable.answer)
    return 0


def _end_with_parent() -> None:
    # Not the pipe's reader: a thread inside of that at our own end would make Python abort.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)  # the main thread may be inside a library that waits for ever


def _receive(pipe: RankPipe[ToProbe], task: Receive) -> None:
    transport = make_transport(task.transport, task.where)
    region, listener, admission = _listen(transport, task)
    with region:
        listener.permit(admission.peer, ROOM, range(task.shape.num_pages))
        pipe.send(Opened(offer=admission.offer))
        plan = scattered_pages(task.shape.num_pages, task.shape.page_bytes)
        while isinstance(check := pipe.receive(), Check):
            part = plan[: max(0, check.num_copies)]
            pipe.send(Checked(digest=measure.digest_of_destination(region, part)))
        listener.close()


def _listen(transport: Transport, task: Receive) -> tuple[MemoryRegion, Listener, Admission]:
    """Listen with private memory or, where the transport wants a file to map, with shared memory."""
    shape, reason = task.shape, ConfigInvalid("no memory")
    for make in (MemoryRegion.private, MemoryRegion.shared):
        try:
            region = make(shape.pool_bytes)
        except ConfigInvalid as error:
            raise Unusable("listen", error) from error
        try:
            listener = transport.listen(Pool(region, shape.page_bytes, shape.num_pages))
        except ConfigInvalid as error:
            reason = error
            region.close()
            continue
        try:
            return region, listener, listener.admit(task.toward_host)
        except TandemError as error:
            region.close()
            raise Unusable("listen", error) from error
    raise Unusable("listen", reason)


def make_transport(name: str, where: Where) -> Transport:
    """Return a transport, or the limit of a socket in the form of one.

    Raises:
        Unusable: What it stands on is not installed.
    """
    config = TransportConfig(host=where.host, interface=where.interface, directory=where.directory)
    if name == SOCKET:
        return BareStreamTransport(config)
    try:
        [transport] = transports(name, config)
    except (TandemError, ImportError) as error:
        raise Unusable("library", error) from error
    return transport


def _send(task: Send) -> Measured | Broke:
    shape = task.shape
    plan = scattered_pages(shape.num_pages, shape.page_bytes)
    with MemoryRegion.private(shape.pool_bytes) as source:
        measure.fill_with_noise(source)
        if task.offer is None:
            with MemoryRegion.private(shape.pool_bytes) as here:
                return _measured(
                    lambda part: measure.copy_within(part, source, here), plan, task, source
                )
        transport = make_transport(task.transport, task.where)
        try:
            connection = transport.connect(task.offer, source)
        except TandemError as error:
            raise Unusable("connect", error) from error
        try:
            return _measured(lambda part: connection.write(ROOM, part), plan, task, source)
        except TandemError as error:
            return Broke(reason=str(error))
        finally:
            connection.close()


def _measured(write: measure.Write, plan: CopyPlan, task: Send, source: MemoryRegion) -> Measured:
    rate = measure.measure_rate(write, plan, task.rate_s)
    latency_s = measure.measure_latency_s(write, plan, task.latency_s)
    round_trip_us = None
    if task.transport == SOCKET:
        round_trip_us = 1e6 * measure.measure_latency_s(write, plan[:0], task.latency_s)
    return Measured(
        bytes_per_s=rate.bytes_per_s,
        latency_us=1e6 * latency_s,
        num_copies=rate.num_copies,
        digest=measure.digest_of_source(source, plan[: rate.num_copies]),
        round_trip_us=round_trip_us,
    )


if __name__ == "__main__":
    sys.exit(main())
