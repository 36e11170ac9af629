"""Code shared by one-sided transports: the library writes into the pool without the owner's CPU.

```
 decode: OneSidedListener                                   prefill: OneSidedConnection
   peer a ── ReceivingEnd (own sockets, own registration) ◀──── SendingEnd
   peer b ── ReceivingEnd                                 ◀──── SendingEnd of another node
```

- *A write after the fence* is impossible. Each peer writes through its own receiving end, and the fence
  destroys that end: its sockets, queues and registration.
- *A write outside the pool* is refused by libraries that check registrations.
- *A write outside the grant, or after it was revoked*, is not detected. A peer that keeps the protocol makes
  none, because a revocation follows its last message of the room. A malicious peer can make one until it is fenced.

Each end has a token next to the pool: a random number that the offer contains. A writer reads the token when it
connects, which proves that the process that made the offer answers.
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

from tandem.kvtransfer.plan import CopyPlan, Int64s
from tandem.kvtransfer.region import DeviceRegion, MemoryRegion
from tandem.kvtransfer.threads import Poll, poll_until_done
from tandem.kvtransfer.transports.base import (
    PeerAdmission,
    PeerKey,
    Pool,
    check_bounds,
    new_peer_key,
)
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

CONNECT_TIMEOUT_S = 5.0
# A poll that takes longer has moved bytes; an idle poll takes 1 to 3 µs.
BUSY_S = 10e-6
# Socket buffers hold what arrives during a pause. With a grant and no traffic, the longest costs 4 % of a core.
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 200e-6
# Grows from the shortest to the longest in 4 ms, so that short gaps in a stream of bytes stay cheap.
GROWTH = 1.05
# Stands for the CPU where libraries number GPUs.
NO_GPU = -1
ADDRESS_END = 1 << 57  # end of the address space of a process on any 64-bit machine


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory to register. The end that registers it keeps a reference, so that it stays mapped.

    Attributes:
        owner: An array or tensor over the memory.
        device: `cpu`, or torch's name of a GPU.
    """

    owner: object
    address: int
    size_bytes: int
    device: str = "cpu"

    @classmethod
    def of_pool(cls, pool: Pool) -> "Memory":
        """Return the memory that peers may write."""
        return replace(cls.of_region(pool.region), size_bytes=pool.size_bytes)

    @classmethod
    def of_region(cls, region: MemoryRegion) -> "Memory":
        """Return all of a region."""
        owner = region.tensor if isinstance(region, DeviceRegion) else region.array()
        return cls(owner, region.address, region.size_bytes, region.device)

    @classmethod
    def of_token(cls, token: Int64s) -> "Memory":
        """Return the memory of a token, or of the array into which a writer reads it."""
        return cls(token, token.ctypes.data, token.nbytes)


MemoryAddress = Annotated[int, msgspec.Meta(ge=1, lt=ADDRESS_END)]


class PollInterval:
    """The pause between two polls of a queue, which grows while the queue is idle."""

    def __init__(self) -> None:
        self._pause_s = SHORTEST_PAUSE_S

    def next_pause_s(self, poll_s: float) -> float:
        """Return the next pause, after a poll that took `poll_s`."""
        self._pause_s = (
            SHORTEST_PAUSE_S if poll_s > BUSY_S else min(self._pause_s * GROWTH, LONGEST_PAUSE_S)
        )
        return self._pause_s


class ReceivingEnd(Protocol):
    """A library's object through which one peer writes the pool and reads the token."""

    @property
    def facts(self) -> Mapping[str, str | int]:
        """Descriptor fields that the peer needs to connect, in addition to the addresses."""
        ...

    def close(self) -> None:
        """Destroy the end. After this returns, the peer cannot write any more.

        Safe to call twice: the second call returns no sooner than the first.
        """
        ...


End = TypeVar("End", bound=ReceivingEnd)


class OneSidedListener(Generic[End]):
    """One receiving end per peer.

    Args:
        pool: The pool that peers write.
        name: Name of the transport in offers.
        open_end: Makes the end for a peer at the given host, with the given token.
    """

    def __init__(self, pool: Pool, name: str, open_end: Callable[[str, Int64s], End]) -> None:
        self._pool, self._name, self._open_end = pool, name, open_end
        self._ends: dict[PeerKey, End] = {}

    def admit(self, toward_host: str) -> PeerAdmission:
        """Make an end for one more peer.

        Raises:
            TransferRefused: The library cannot make one.
        """
        key, token = new_peer_key(), np.array([secrets.randbits(62)], np.int64)
        self._ends[key] = end = self._open_end(toward_host, token)
        places = PoolAddresses(
            pool_address=self._pool.region.address,
            pool_bytes=self._pool.size_bytes,
            token_address=token.ctypes.data,
            token=int(token[0]),
        )
        descriptor = {**end.facts, **msgspec.structs.asdict(places)}
        return PeerAdmission(key, TransportOffer(name=self._name, descriptor=descriptor))

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Do nothing: writes are not checked here."""

    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Do nothing: the writer has reported that no write of the room is in flight."""

    def fence(self, peer: PeerKey) -> None:
        """Destroy the peer's end. Does not wait for any other process."""
        if end := self._ends.get(peer):
            end.close()
            self._ends.pop(peer, None)

    def close(self) -> None:
        """Fence all peers."""
        for peer in list(self._ends):
            self.fence(peer)


class PoolAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """Common fields of all descriptors: addresses of pool and token in the owner's process."""

    pool_address: MemoryAddress
    pool_bytes: Annotated[int, msgspec.Meta(ge=1, lt=ADDRESS_END)]
    token_address: MemoryAddress
    token: int


class SendingEnd(Protocol):
    """A library's object that writes to one receiving end. Not thread-safe.

    Each transfer has a number, which is valid until the transfer is complete or has failed.
    """

    def read(self, address: int, into: Int64s, *, is_in_pool: bool = False) -> int:
        """Start a read from the peer into the array that was passed when the end was made.

        Args:
            is_in_pool: Whether the address is in the pool; else it is the token's.
        """
        ...

    def writes(self, plan: CopyPlan) -> Iterable[int]:
        """Start one write after another; the plan's offsets are addresses on both sides."""
        ...

    def is_done(self, transfer: int) -> bool:
        """Make progress on a transfer; return whether all its bytes are in place.

        Raises:
            PeerLost: The transfer failed.
        """
        ...

    def close(self) -> None:
        """Destroy the end and its transfers in flight. Safe to call twice."""
        ...


class OneSidedConnection:
    """Writes to one listener.

    Args:
        places: Addresses from the offer.
        region: Region to write from.
        open_end: Makes the end; the argument is the array into which it reads the token.
        max_in_flight: Maximum number of transfers of a write in flight.
        reads_back: Whether a read from the pool follows each write. An RDMA write is complete when the peer's adapter
            has its bytes, which may not have reached a GPU yet. PCIe delivers them before it answers the adapter's read.

    Raises:
        TransferRefused: The owner of the pool does not answer, or a different process does.
    """

    def __init__(
        self,
        places: PoolAddresses,
        region: MemoryRegion,
        open_end: Callable[[Int64s], SendingEnd],
        max_in_flight: int,
        *,
        reads_back: bool = False,
    ) -> None:
        if places.pool_address + places.pool_bytes > ADDRESS_END:
            raise TransferRefused("the offer's pool is larger than memory can be")
        self._places, self._max_in_flight = places, max_in_flight
        self._source, self._reads_back = Memory.of_region(region), reads_back
        self._mutex = threading.Lock()
        self._is_closed = False
        self._token = token = np.zeros(1, np.int64)
        self._end = open_end(token)
        try:
            self._read(places.token_address, token)
        except PeerLost as error:
            self.close()
            raise TransferRefused(f"the owner of the pool does not answer: {error}") from error
        if token[0] != places.token:
            self.close()
            raise TransferRefused("a process other than the owner of the pool answered")

    def _read(self, address: int, token: Int64s) -> None:
        reading, interval = self._end.read(address, token), PollInterval()
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while not self._end.is_done(reading):
            if time.monotonic() > deadline_s:
                raise PeerLost(f"no answer in {CONNECT_TIMEOUT_S:g} s")
            time.sleep(interval.next_pause_s(0.0))

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Start a write and wait until it is complete."""
        poll_until_done(self.post(room, plan))

    def post(self, room: Room, plan: CopyPlan) -> Poll:
        """Start the first transfers of a write; its poll starts the others as those complete."""
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
            in_flight = deque(itertools.islice(rest, self._max_in_flight))
        ends = addresses.destination_offset + addresses.size_bytes - self._token.nbytes
        unread = deque(ends[-1:].tolist() if self._reads_back else [])
        return partial(self._poll, in_flight, rest, unread, PollInterval())

    def _poll(
        self,
        in_flight: deque[int],
        rest: Iterator[int],
        unread: deque[int],
        interval: PollInterval,
    ) -> float | None:
        with self._mutex:
            while in_flight or unread:
                self._check_open()
                if not in_flight:
                    reading = self._end.read(unread.popleft(), self._token, is_in_pool=True)
                    in_flight.append(reading)
                now_s = time.monotonic()
                if not self._end.is_done(in_flight[0]):
                    return interval.next_pause_s(time.monotonic() - now_s)
                in_flight.popleft()
                in_flight.extend(itertools.islice(rest, 1))
        return None

    def _check_open(self) -> None:
        if self._is_closed:
            raise PeerLost("the connection is closed")

    def close(self) -> None:
        """Fail a write in flight at its next poll, then destroy the end."""
        self._is_closed = True
        with self._mutex:
            self._end.close()
