"""What transports share whose library writes into a pool without its owner looking on.

```
 decode: OneSidedListener                                   prefill: OneSidedConnection
   peer a ── ReceivingEnd (own sockets, own registration) ◀──── SendingEnd
   peer b ── ReceivingEnd                                 ◀──── SendingEnd of another node
```

Such a library knows memory and no rooms, so each peer has a table beside the pool, an int64 a page: the
room that may write it. The sending end reads the entries of the pages it is about to write, from the
owner's memory and in every `write`, and refuses what is not its room's.

What holds against whom:

- *A write after the fence* is impossible for anybody. Each peer writes through a receiving end made for
  it alone, and the fence destroys that end: its sockets and queues, and its registration. What each
  library leaves for that is in the docstring of its module.
- *A write outside the pool and the table* is refused by the library where it checks registrations.
- *A write outside the grant, or after it was revoked*, is refused by the sending end itself. A peer that
  keeps the protocol cannot do it, also not in a race: it says `Landed` or `Released`, which is what a
  revocation waits for, when nothing of the room is under way. A peer that lies can until it is fenced.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

import msgspec
import numpy as np

from tandem.kvtransfer.plan import CopyPlan, Int64s, touched_pages
from tandem.kvtransfer.region import DeviceRegion, MemoryRegion
from tandem.kvtransfer.transports.base import Admission, PeerKey, Pool, check_bounds, new_peer_key
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.hand_off import TransportOffer
from tandem.wire.ids import Room

NO_ROOM = -1
CONNECT_TIMEOUT_S = 5.0
# A look at a library's queue that takes longer has moved bytes: an idle one takes 1 to 3 µs.
BUSY_S = 10e-6
# Socket buffers hold what comes meanwhile. Idle and granted, the longest costs 4 % of a core.
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 200e-6
# From the shortest to the longest in 4 ms: a pause inside a stream of bytes must not grow.
GROWTH = 1.05
# In which threads that waited for the interpreter have it: each takes half a millisecond at most.
BREATH_S = 0.01
# 128 MiB of table, and a terabyte of pool in pages of 64 KiB.
MAX_PAGES = 1 << 24
ADDRESS_END = 1 << 57  # of what a process can have on any 64-bit machine


@dataclass(frozen=True, slots=True)
class Memory:
    """A piece to register. Whoever registers it holds it, so that it stays mapped meanwhile.

    Attributes:
        owner: An array or tensor over it.
        device: `cpu`, or torch's name of a GPU.
    """

    owner: object
    address: int
    size_bytes: int
    device: str = "cpu"

    @classmethod
    def of_pool(cls, pool: Pool) -> "Memory":
        """Return what peers may write."""
        return replace(cls.of_region(pool.region), size_bytes=pool.size_bytes)

    @classmethod
    def of_region(cls, region: MemoryRegion) -> "Memory":
        """Return all of a region."""
        owner = region.tensor if isinstance(region, DeviceRegion) else region.array()
        return cls(owner, region.address, region.size_bytes, region.device)

    @classmethod
    def of_table(cls, rooms: Int64s) -> "Memory":
        """Return a table of rooms, or a copy of one."""
        return cls(rooms, rooms.ctypes.data, rooms.nbytes)


class Destroyer:
    """Destroys the ends of one transport, one at a time.

    A library's destructor may hold the interpreter, for a second at worst. Heartbeats go out before it
    and after it, and two in a row would last longer than a peer waits for one.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()

    def destroy(self, end: "ReceivingEnd | SendingEnd") -> None:
        """Destroy an end, or wait until another thread has. Safe to call twice."""
        with self._turn:
            end.close()
            time.sleep(BREATH_S)


Address = Annotated[int, msgspec.Meta(ge=1, lt=ADDRESS_END)]


class Pace:
    """How long to wait between two looks at a queue: longer and longer while nothing happens."""

    def __init__(self) -> None:
        self._pause_s = SHORTEST_PAUSE_S

    def next_pause_s(self, look_s: float) -> float:
        """Return the next pause, after a look that took `look_s`."""
        self._pause_s = (
            SHORTEST_PAUSE_S if look_s > BUSY_S else min(self._pause_s * GROWTH, LONGEST_PAUSE_S)
        )
        return self._pause_s


class ReceivingEnd(Protocol):
    """A library's object that lets one peer write into the pool, and read its table.

    Not for several threads at once, but for `expect_writes`.
    """

    @property
    def facts(self) -> Mapping[str, str | int]:
        """What the peer needs to connect, beside the addresses."""
        ...

    def expect_writes(self, *, are_expected: bool) -> None:
        """Say whether any room is granted: without one nothing is urgent."""
        ...

    def close(self) -> None:
        """Destroy it. After this returns nothing of that peer can be written. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class _Peer:
    rooms: Int64s
    end: ReceivingEnd


class OneSidedListener:
    """A receiving end, and a table of rooms, for each peer.

    Args:
        pool: Where peers write.
        name: Of the transport, for offers.
        open_end: Makes the end for the peer at this host, around the pool and this table.
        destroyer: Of the transport's ends.
    """

    def __init__(
        self,
        pool: Pool,
        name: str,
        open_end: Callable[[str, Int64s], ReceivingEnd],
        destroyer: Destroyer,
    ) -> None:
        self._pool, self._name, self._open_end = pool, name, open_end
        self._destroyer = destroyer
        self._peers: dict[PeerKey, _Peer] = {}

    def admit(self, toward_host: str) -> Admission:
        """Make an end for one more peer.

        Raises:
            TransferRefused: The library cannot.
        """
        key, rooms = new_peer_key(), np.full(self._pool.num_pages, NO_ROOM, np.int64)
        end = self._open_end(toward_host, rooms)
        self._peers[key] = _Peer(rooms, end)
        places = Places(
            pool_address=self._pool.region.address,
            table_address=rooms.ctypes.data,
            page_bytes=self._pool.page_bytes,
            num_pages=self._pool.num_pages,
        )
        descriptor = {**end.facts, **msgspec.structs.asdict(places)}
        return Admission(key, TransportOffer(name=self._name, descriptor=descriptor))

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Mark the pages as this room's."""
        if page_ids:
            known = self._peers[peer]
            known.rooms[np.asarray(page_ids)] = room
            known.end.expect_writes(are_expected=True)

    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Unmark the pages of this room: its writer has said that nothing is under way."""
        if known := self._peers.get(peer):
            known.rooms[known.rooms == room] = NO_ROOM
            known.end.expect_writes(are_expected=bool((known.rooms != NO_ROOM).any()))

    def fence(self, peer: PeerKey) -> None:
        """Destroy the peer's end. Waits for nobody outside this process."""
        if known := self._peers.get(peer):
            self._destroyer.destroy(known.end)  # a second fence returns no sooner than the first
            self._peers.pop(peer, None)

    def close(self) -> None:
        """Fence everybody."""
        for peer in list(self._peers):
            self.fence(peer)


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an offer that all have: where pool and table are in the owner's process."""

    pool_address: Address
    table_address: Address
    page_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]
    num_pages: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGES)]


class SendingEnd(Protocol):
    """A library's object that writes to one receiving end. Not for several threads at once.

    A transfer that was begun has a number, which is over when it is done or has failed.
    """

    def read(self, address: int, into: Int64s) -> int:
        """Begin to read from the peer. The array is the connection's copy of the table."""
        ...

    def writes(self, plan: CopyPlan) -> Iterable[int]:
        """Begin one write after another; the plan's offsets are addresses on both sides."""
        ...

    def is_done(self, transfer: int) -> bool:
        """Look at a transfer, and move it along; true once all of it is in place.

        Raises:
            PeerLost: It failed.
        """
        ...

    def close(self) -> None:
        """Destroy it, with what is under way. Safe to call twice."""
        ...


class OneSidedConnection:
    """Looks at the table, then writes.

    Args:
        places: From the offer.
        region: What is written from.
        open_end: Makes the end, around the region and the array that will hold the table.
        max_under_way: Transfers begun before the first of them is waited for.
        destroyer: Of the transport's ends.

    Raises:
        TransferRefused: Nobody answers.
    """

    def __init__(
        self,
        places: Places,
        region: MemoryRegion,
        open_end: Callable[[Int64s], SendingEnd],
        max_under_way: int,
        destroyer: Destroyer,
    ) -> None:
        self._places, self._max_under_way = places, max_under_way
        self._destroyer = destroyer
        self._source = Memory.of_region(region)
        self._mutex = threading.Lock()
        self._is_closed = False
        self._rooms = np.full(_bounded(places), NO_ROOM, np.int64)
        self._end = open_end(self._rooms)
        try:
            self._read_rooms(0, places.num_pages, time.monotonic() + CONNECT_TIMEOUT_S)
        except PeerLost as error:
            self.close()
            raise TransferRefused(f"the owner of the pool does not answer: {error}") from error

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Check the room of every page, then write, a few transfers at a time."""
        pool_bytes = self._places.page_bytes * self._places.num_pages
        check_bounds(self._source.size_bytes, plan.source_offset, plan.size_bytes)
        check_bounds(pool_bytes, plan.destination_offset, plan.size_bytes)
        with self._mutex:
            if self._is_closed:
                raise PeerLost("the connection is closed")
            if len(plan):
                self._check(room, plan)
                self._write(plan)

    def _check(self, room: Room, plan: CopyPlan) -> None:
        pages = touched_pages(plan.destination_offset, plan.size_bytes, self._places.page_bytes)
        self._read_rooms(int(pages.min()), int(pages.max()) + 1)
        outside = pages[self._rooms[pages] != room]
        if len(outside):
            raise TransferRefused(f"page {outside[0]} is not granted to room {room}")

    def _read_rooms(self, begin: int, end: int, deadline_s: float = float("inf")) -> None:
        address = self._places.table_address + begin * self._rooms.itemsize
        self._wait(self._end.read(address, self._rooms[begin:end]), deadline_s)

    def _write(self, plan: CopyPlan) -> None:
        addresses = CopyPlan(
            plan.source_offset + self._source.address,
            plan.destination_offset + self._places.pool_address,
            plan.size_bytes,
        )
        under_way: deque[int] = deque()
        for transfer in self._end.writes(addresses):
            under_way.append(transfer)
            if len(under_way) == self._max_under_way:
                self._wait(under_way.popleft())
        for transfer in under_way:
            self._wait(transfer)

    def _wait(self, transfer: int, deadline_s: float = float("inf")) -> None:
        pace = Pace()
        while True:
            now_s = time.monotonic()
            if self._is_closed or now_s > deadline_s:
                raise PeerLost("closed, or too late, with bytes under way")
            if self._end.is_done(transfer):
                return
            time.sleep(pace.next_pause_s(time.monotonic() - now_s))

    def close(self) -> None:
        """End a write under way at its next look, then destroy the end."""
        self._is_closed = True
        with self._mutex:
            self._destroyer.destroy(self._end)


def _bounded(places: Places) -> int:
    """Return the number of pages, if a process can have such a pool."""
    pool_end = places.pool_address + places.page_bytes * places.num_pages
    table_end = places.table_address + 8 * places.num_pages
    if max(pool_end, table_end) > ADDRESS_END:
        raise TransferRefused("the offer's pool is larger than memory can be")
    return places.num_pages
