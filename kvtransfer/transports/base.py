"""The seam: what a way of writing into another process's pool must do.

```
 decode: transport.listen(pool) ─▶ Listener ── admit ─▶ offer ──(Hello)──▶ prefill: connect(offer)
           permit(peer, room, pages) ◀─ before Grant                         └─▶ Connection
           revoke(peer, room)        ◀─ after Landed, Released                     write(room, plan)
           fence(peer)               ◀─ when the peer is lost                      close()
```

A peer is one life of one link: each Hello carries an offer made for it alone, with a secret, so that
fencing it takes nothing from anybody else and a restarted peer starts clean. Third parties add a
transport by an entry point of group `tandem.transports` that names a `TransportFactory`.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np

from tandem.kvtransfer.control import Look
from tandem.kvtransfer.layout import KVLayout, Strips
from tandem.kvtransfer.plan import CopyPlan, Int64s
from tandem.kvtransfer.region import MemoryRegion
from tandem.wire.errors import ConfigInvalid, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

PeerKey = NewType("PeerKey", str)
"""Names one admitted peer at its listener. Not a secret."""


def new_peer_key() -> PeerKey:
    """Return a fresh peer key: 16 hexadecimal digits."""
    return PeerKey(secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of pages as a transport sees it: bytes, and where the pages lie in them.

    Attributes:
        region: Holds at least `size_bytes` bytes.
    """

    region: MemoryRegion
    places: Strips

    @classmethod
    def packed(cls, region: MemoryRegion, page_bytes: int, num_pages: int) -> "Pool":
        """Return a pool whose pages lie one after the other."""
        return cls(region, Strips.packed(num_pages, page_bytes))

    @classmethod
    def of_layout(cls, region: MemoryRegion, layout: KVLayout) -> "Pool":
        """Return a pool of this layout."""
        return cls(region, layout.places)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return int(self.places.width.sum())

    @property
    def num_pages(self) -> int:
        """How many pages there are."""
        return self.places.num_pages

    @property
    def size_bytes(self) -> int:
        """Bytes up to the end of the last page."""
        return self.places.end


@dataclass(frozen=True, slots=True)
class Admission:
    """A peer that may connect. The offer holds its secret: it travels on the link only."""

    peer: PeerKey
    offer: TransportOffer


Facts = TypeVar("Facts", bound=msgspec.Struct)


def read_offer(offer: TransportOffer, kind: type[Facts]) -> Facts:
    """Return what the descriptor of an offer holds.

    Raises:
        TransferRefused: It is not of this kind.
    """
    try:
        return msgspec.convert(offer.descriptor, kind)
    except msgspec.ValidationError as error:
        raise TransferRefused(f"an invalid offer of {offer.name}: {error}") from error


def need_cpu_memory(name: str, pool: Pool) -> None:
    """Refuse a pool that transport `name` cannot copy into.

    Raises:
        ConfigInvalid: It is in a device's memory.
    """
    if pool.region.device != "cpu":
        raise ConfigInvalid(
            f"transport {name} needs a pool in CPU memory, not {pool.region.device}"
        )


class Listener(Protocol):
    """The receiving end: owns who may write where. Every method may be called from any thread.

    What concerns one peer is called in the order of the protocol, by a worker of its link.

    A listener that sees the writes checks each against its grant (`Permits`), and may count in
    `num_violations` those that it refused. A one-sided listener sees none: its `permit` and `revoke` check
    nothing, and only its fence keeps a peer out that breaks the protocol.
    """

    def admit(self, toward_host: str) -> Admission:
        """Let one more peer connect. Ends with `fence`.

        Args:
            toward_host: The peer's host as this process reaches it: the offer names the address
                on the way to it where the listener is bound to all of them.

        Raises:
            TransferRefused: This machine has no room for one more.
        """
        ...

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Accept writes of `room` from `peer` into these pages, as far as the listener sees writes."""
        ...

    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Accept no more writes of `room`. Does not block on a peer that keeps the protocol."""
        ...

    def fence(self, peer: PeerKey) -> None:
        """Cut the peer off. After it returns, no write of that peer can arrive any more.

        Blocks for as long as that takes (a writer stopped in the middle of a copy holds it up
        until it goes on or dies), unless the listener is closed. Fencing the unknown does nothing.
        After an error the peer's pages stay in quarantine, and it is called again until it returns.
        """
        ...

    def close(self) -> None:
        """Stop listening and cut everybody off. Safe to call twice."""
        ...


class Connection(Protocol):
    """The sending end, to one peer. One write at a time."""

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Copy from the own region into the peer's pool; return when all of it is there.

        Raises:
            TransferRefused: The pages are not granted to this room, and no byte of the write is under
                way any more.
            PeerLost: The peer is gone, has fenced us, or `close` was called meanwhile. Bytes may still
                be under way. Any other exception is taken for this one: the link is given up, and the
                listener fences us.
        """
        ...

    def close(self) -> None:
        """Hang up; a write under way raises `PeerLost`. Any thread may call it, and twice."""
        ...


@runtime_checkable
class PostingConnection(Connection, Protocol):
    """A connection whose writes go on by themselves, so that several can be under way. All in one thread."""

    def post(self, room: Room, plan: CopyPlan) -> Look:
        """Begin what `write` does; return what looks for its end, and raises as `write` does."""
        ...


class Transport(Protocol):
    """One kind of link. The name is what `--transfer-backend` and offers call it."""

    name: str

    def listen(self, pool: Pool) -> Listener:
        """Begin to receive into `pool`.

        Raises:
            ConfigInvalid: This pool, or this machine, cannot be written this way.
        """
        ...

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> Connection:
        """Connect to the listener that made `offer`, to write from `region`. May block for seconds.

        Raises:
            TransferRefused: The offer cannot be used from here (another host, say).
        """
        ...


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Settings of transports.

    Attributes:
        host: Address to listen on; 0.0.0.0 and :: mean all.
        interface: Name of the network interface to listen on and to send from, where the transport
            knows such; empty for the one of `host`.
        directory: What transports that go through files share; empty for none.
    """

    host: str = "127.0.0.1"
    interface: str = ""
    directory: str = ""


TransportFactory = Callable[[TransportConfig], Transport]


class Paged(Protocol):
    """What is known of a pool beside its bytes."""

    @property
    def places(self) -> Strips:
        """Where its pages lie."""
        ...


# No request has this room: it is what a page without a grant holds.
NO_ROOM = -(1 << 63)


class Permits:
    """The room that may write each page of a pool, for one peer. Guarded by its owner's lock.

    Args:
        rooms: Where the rooms are kept, an int64 for each page; None: in memory of their own.
    """

    def __init__(self, pool: Paged, rooms: Int64s | None = None) -> None:
        self._places = places = pool.places
        self._rooms = np.full(places.num_pages, NO_ROOM, np.int64) if rooms is None else rooms

    def permit(self, room: Room, page_ids: Sequence[int]) -> None:
        """Open these pages for `room`."""
        self._rooms[np.asarray(page_ids, np.int64)] = room

    def revoke(self, room: Room) -> None:
        """Close the pages of `room`; closing the unknown does nothing."""
        self._rooms[self._rooms == room] = NO_ROOM

    def check(self, room: Room, plan: CopyPlan) -> None:
        """Refuse a plan that leaves the pages of `room`. Room and sizes may be lies.

        Raises:
            TransferRefused: Naming the first page outside.
        """
        check_bounds(self._places.end, plan.destination_offset, plan.size_bytes)
        try:
            pages = self._places.pages(plan.destination_offset, plan.size_bytes)
        except ValueError as error:
            raise TransferRefused(f"a copy leaves the pages of the pool: {error}") from error
        outside = pages[(self._rooms[pages] != room) | (room == NO_ROOM)]
        if len(outside):
            raise TransferRefused(f"page {outside.min()} is not granted to room {room}")


def check_bounds(pool_bytes: int, offset: Int64s, size_bytes: Int64s) -> None:
    """Refuse runs of bytes that leave a pool, or together are larger than it.

    Raises:
        TransferRefused: The runs are not of this pool.
    """
    # In this order nothing overflows: once size and offset are inside, their sum fits easily.
    is_inside = (
        (size_bytes > 0) & (size_bytes <= pool_bytes) & (offset >= 0) & (offset < pool_bytes)
    )
    if not is_inside.all() or (offset + size_bytes > pool_bytes).any():
        raise TransferRefused("a copy leaves the pool")
    if size_bytes.sum() > pool_bytes:
        raise TransferRefused("more bytes than the pool has")
