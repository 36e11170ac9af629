"""A transport with both ends in one process, and faults on demand: what most tests of hand-offs run on.

One `LoopbackTransport` is given to both ends; offers name listeners in it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import PeerAdmission, PeerKey, Permits, Pool, new_peer_key
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

FaultKind = Literal["fail", "break", "hang", "corrupt", "duplicate", "late"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one write: number `at_write`, counted from 0 over all connections.

    `fail` raises PeerLost before anything is copied. `break` raises what no contract names, as a
    transport's library may. `hang` copies, and waits for `release` before it returns. `corrupt` flips a
    bit of the first byte. `duplicate` copies twice. `late` returns at once and copies only at `release`,
    as a careless one-sided transport may: a fence or a revocation must still hold.
    """

    kind: FaultKind
    at_write: int = 0


class LoopbackTransport:
    """Copies within the process, with the faults given."""

    name = "loopback"

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._faults = {fault.at_write: fault.kind for fault in faults}
        self._listeners: dict[PeerKey, LoopbackListener] = {}
        self.num_writes = 0
        self._late: list[tuple[LoopbackConnection, Room, CopyPlan]] = []
        self._released = threading.Event()
        self.hanging = threading.Event()  # set when a write hangs, for tests to wait for

    def listen(self, pool: Pool) -> "LoopbackListener":
        return LoopbackListener(pool, self._listeners, self.name)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> "LoopbackConnection":
        peer = PeerKey(str(offer.descriptor.get("peer")))
        listener = self._listeners.get(peer)
        if listener is None:
            raise TransferRefused("the offer is from another process")
        return LoopbackConnection(self, listener, peer, region)

    def next_fault(self) -> FaultKind | None:
        self.num_writes += 1
        return self._faults.get(self.num_writes - 1)

    def hang(self, connection: "LoopbackConnection") -> None:
        """Block until `release` or until the connection is closed."""
        self.hanging.set()
        while not self._released.wait(0.005):
            if connection.is_closed:
                raise PeerLost("the connection was closed in the middle of a write")

    def postpone(self, connection: "LoopbackConnection", room: Room, plan: CopyPlan) -> None:
        self._late.append((connection, room, plan))

    def release(self) -> None:
        """Let what hangs go on, and do the late writes now: raises of the first that is not let in."""
        self._released.set()
        late, self._late = self._late, []
        for connection, room, plan in late:
            connection.copy(room, plan)


class LoopbackListener:
    """Receives from connections of the same process."""

    def __init__(
        self, pool: Pool, listeners: dict[PeerKey, "LoopbackListener"], name: str = "loopback"
    ) -> None:
        self._pool, self._name = pool, name
        self._all = listeners
        self._permits: dict[PeerKey, Permits] = {}
        self._lock = threading.Lock()
        self.num_violations = 0

    def admit(self, toward_host: str) -> PeerAdmission:
        del toward_host
        peer = new_peer_key()
        self._permits[peer] = Permits(self._pool)
        self._all[peer] = self
        return PeerAdmission(peer, TransportOffer(name=self._name, descriptor={"peer": peer}))

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        with self._lock:
            self._permits[peer].permit(room, page_ids)

    def revoke(self, peer: PeerKey, room: Room) -> None:
        with self._lock:
            if permits := self._permits.get(peer):
                permits.revoke(room)

    @contextmanager
    def writing(self, peer: PeerKey, room: Room, plan: CopyPlan) -> Iterator[MemoryRegion]:
        """Hold the pool open for one checked copy: a fence waits for it."""
        with self._lock:
            if (permits := self._permits.get(peer)) is None:
                raise PeerLost("this peer was fenced")
            try:
                permits.check(room, plan)
            except TransferRefused:
                self.num_violations += 1
                raise
            yield self._pool.region

    def fence(self, peer: PeerKey) -> None:
        with self._lock:
            self._permits.pop(peer, None)
            self._all.pop(peer, None)

    def close(self) -> None:
        for peer in list(self._permits):
            self.fence(peer)


class LoopbackConnection:
    """Writes to one listener of the same process."""

    def __init__(
        self,
        transport: LoopbackTransport,
        listener: LoopbackListener,
        peer: PeerKey,
        region: MemoryRegion,
    ) -> None:
        self._transport, self._listener, self._peer = transport, listener, peer
        self._source = region
        self.is_closed = False

    def write(self, room: Room, plan: CopyPlan) -> None:
        match self._transport.next_fault():
            case "fail":
                raise PeerLost("scripted: the peer is gone")
            case "break":
                raise RuntimeError("scripted: the library broke")
            case "late":
                return self._transport.postpone(self, room, plan)
            case "hang":
                self.copy(room, plan)
                self._transport.hang(self)
            case "duplicate":
                self.copy(room, plan)
                self.copy(room, plan)
            case kind:
                self.copy(room, plan, flip=int(kind == "corrupt"))
        return None

    def post(self, room: Room, plan: CopyPlan) -> Callable[[], None]:
        """Return what does the whole write: so late does a transport that posts."""
        return partial(self.write, room, plan)

    def copy(self, room: Room, plan: CopyPlan, flip: int = 0) -> None:
        """Copy for real; `flip` is xored into the first byte."""
        if self.is_closed:
            raise PeerLost("the connection is closed")
        with self._listener.writing(self._peer, room, plan) as pool:
            source, destination = self._source.array(), pool.array()
            for begin, to, size in plan.copies():
                destination[to : to + size] = source[begin : begin + size]
            if len(plan):
                destination[int(plan.destination_offset[0])] ^= flip

    def close(self) -> None:
        self.is_closed = True
