"""What transports share whose library writes into a pool without its owner looking on.

```
 decode: OneSidedListener                                   prefill: OneSidedConnection
   peer a ── ReceivingEnd (own sockets, own registration) ◀──── SendingEnd
   peer b ── ReceivingEnd                                 ◀──── SendingEnd of another node
```

- *A write after the fence* is impossible. Each peer writes through a receiving end made for it alone,
  and the fence destroys that end: its sockets, queues and registration.
- *A write outside the pool* is refused by the library where it checks registrations.
- *A write outside the grant, or after it was revoked*, is seen by nobody. A peer that keeps the protocol
  makes none: a revocation follows its last word on the room. A peer that lies can until it is fenced.

Each end has a token beside the pool, a random number that the offer names. A writer reads it when it
connects: so it knows that the owner answers, and is the one that made the offer.
"""

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from tandem.kvtransfer.control import Look, finish
from tandem.kvtransfer.plan import CopyPlan, Int64s
from tandem.kvtransfer.region import DeviceRegion, MemoryRegion
from tandem.kvtransfer.transports.base import Admission, PeerKey, Pool, check_bounds, new_peer_key
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

CONNECT_TIMEOUT_S = 5.0
# A look at a library's queue that takes longer has moved bytes: an idle one takes 1 to 3 µs.
BUSY_S = 10e-6
# Socket buffers hold what comes meanwhile. Idle and granted, the longest costs 4 % of a core.
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 200e-6
# From the shortest to the longest in 4 ms: a pause inside a stream of bytes must not grow.
GROWTH = 1.05
ADDRESS_END = 1 << 57  # of what a process can have on any 64-bit machine


@dataclass(frozen=True, slots=True)
class Memory:
    """A piece to register. The end that registers it holds it, so that it stays mapped meanwhile.

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
    def of_token(cls, token: Int64s) -> "Memory":
        """Return an end's token, or a copy of one."""
        return cls(token, token.ctypes.data, token.nbytes)


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
    """A library's object that lets one peer write into the pool, and read its token."""

    @property
    def facts(self) -> Mapping[str, str | int]:
        """What the peer needs to connect, beside the addresses."""
        ...

    def close(self) -> None:
        """Destroy it. After this returns nothing of that peer can be written.

        Safe to call twice: the second call returns no sooner than the first.
        """
        ...


End = TypeVar("End", bound=ReceivingEnd)


class OneSidedListener(Generic[End]):
    """A receiving end for each peer.

    Args:
        pool: Where peers write.
        name: Of the transport, for offers.
        open_end: Makes the end for the peer at this host, around the pool and this token.
    """

    def __init__(self, pool: Pool, name: str, open_end: Callable[[str, Int64s], End]) -> None:
        self._pool, self._name, self._open_end = pool, name, open_end
        self._ends: dict[PeerKey, End] = {}

    def admit(self, toward_host: str) -> Admission:
        """Make an end for one more peer.

        Raises:
            TransferRefused: The library cannot.
        """
        key, token = new_peer_key(), np.array([secrets.randbits(62)], np.int64)
        self._ends[key] = end = self._open_end(toward_host, token)
        places = Places(
            pool_address=self._pool.region.address,
            pool_bytes=self._pool.size_bytes,
            token_address=token.ctypes.data,
            token=int(token[0]),
        )
        descriptor = {**end.facts, **msgspec.structs.asdict(places)}
        return Admission(key, TransportOffer(name=self._name, descriptor=descriptor))

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Do nothing: no write is seen here."""

    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Do nothing: its writer has reported that nothing of the room is under way."""

    def fence(self, peer: PeerKey) -> None:
        """Destroy the peer's end. Waits for nobody outside this process."""
        if end := self._ends.get(peer):
            end.close()
            self._ends.pop(peer, None)

    def close(self) -> None:
        """Fence everybody."""
        for peer in list(self._ends):
            self.fence(peer)


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an offer that all have: where pool and token are in the owner's process."""

    pool_address: Address
    pool_bytes: Annotated[int, msgspec.Meta(ge=1, lt=ADDRESS_END)]
    token_address: Address
    token: int


class SendingEnd(Protocol):
    """A library's object that writes to one receiving end. Not for several threads at once.

    A transfer that was begun has a number, which is over when it is done or has failed.
    """

    def read(self, address: int, into: Int64s) -> int:
        """Begin to read from the peer. The array is the one that the end was made around."""
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
    """Writes to one listener.

    Args:
        places: From the offer.
        region: What is written from.
        open_end: Makes the end, around the region and the array into which it reads the token.
        max_under_way: Transfers of a write begun before the first of them is waited for.

    Raises:
        TransferRefused: Nobody answers, or another process does.
    """

    def __init__(
        self,
        places: Places,
        region: MemoryRegion,
        open_end: Callable[[Int64s], SendingEnd],
        max_under_way: int,
    ) -> None:
        if places.pool_address + places.pool_bytes > ADDRESS_END:
            raise TransferRefused("the offer's pool is larger than memory can be")
        self._places, self._max_under_way = places, max_under_way
        self._source = Memory.of_region(region)
        self._mutex = threading.Lock()
        self._is_closed = False
        token = np.zeros(1, np.int64)
        self._end = open_end(token)
        try:
            self._read(places.token_address, token)
        except PeerLost as error:
            self.close()
            raise TransferRefused(f"the owner of the pool does not answer: {error}") from error
        if token[0] != places.token:
            self.close()
            raise TransferRefused("another process answers in place of the pool's owner")

    def _read(self, address: int, token: Int64s) -> None:
        reading, pace = self._end.read(address, token), Pace()
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while not self._end.is_done(reading):
            if time.monotonic() > deadline_s:
                raise PeerLost(f"no answer in {CONNECT_TIMEOUT_S:g} s")
            time.sleep(pace.next_pause_s(0.0))

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Begin a write, and wait for its end."""
        finish(self.post(room, plan))

    def post(self, room: Room, plan: CopyPlan) -> Look:
        """Begin the first transfers of a write; return what begins the rest as those before end."""
        del room
        check_bounds(self._source.size_bytes, plan.source_offset, plan.size_bytes)
        check_bounds(self._places.pool_bytes, plan.destination_offset, plan.size_bytes)
        addresses = CopyPlan(
            plan.source_offset + self._source.address,
            plan.destination_offset + self._places.pool_address,
            plan.size_bytes,
        )
        with self._mutex:
            self._check_open()
            rest = iter(self._end.writes(addresses) if len(plan) else ())
            under_way = deque(itertools.islice(rest, self._max_under_way))
        return partial(self._look, under_way, rest, Pace())

    def _look(self, under_way: deque[int], rest: Iterator[int], pace: Pace) -> float | None:
        with self._mutex:
            while under_way:
                self._check_open()
                now_s = time.monotonic()
                if not self._end.is_done(under_way[0]):
                    return pace.next_pause_s(time.monotonic() - now_s)
                under_way.popleft()
                under_way.extend(itertools.islice(rest, 1))
        return None

    def _check_open(self) -> None:
        if self._is_closed:
            raise PeerLost("the connection is closed")

    def close(self) -> None:
        """End a write under way at its next look, then destroy the end."""
        self._is_closed = True
        with self._mutex:
            self._end.close()
