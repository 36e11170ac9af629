"""The interface of a transport: a way to write into another process's pool.

```
 decode: transport.listen(pool) ─▶ Listener ── admit ─▶ offer ──(Hello)──▶ prefill: connect(offer)
           permit(peer, room, pages) ◀─ before Grant                         └─▶ Connection
           revoke(peer, room)        ◀─ after Landed, Released                     write(room, plan)
           fence(peer)               ◀─ when the peer is lost                      close()
```

A peer exists for one link: each Hello carries an offer made for that link only, with its own secret. Fencing a
peer therefore affects no other link, and a restarted node is a new peer. Third parties add a transport with an
entry point of the group `tandem.transports` that names a `TransportFactory`.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NewType, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np

from tandem.kvtransfer.layout import KVLayout, Strips
from tandem.kvtransfer.plan import CopyPlan, Int64s
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.threads import Poll
from tandem.wire.errors import ConfigInvalid, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

PeerKey = NewType("PeerKey", str)
"""Identifies an admitted peer at its listener. Not a secret."""


def new_peer_key() -> PeerKey:
    """Return a fresh peer key: 16 hexadecimal digits."""
    return PeerKey(secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of pages as transports see it: its bytes, and where the pages lie in them.

    Attributes:
        region: Holds at least `size_bytes` bytes.
    """

    region: MemoryRegion
    places: Strips

    @classmethod
    def packed(cls, region: MemoryRegion, page_bytes: int, num_pages: int) -> "Pool":
        """Return a pool of contiguous pages."""
        return cls(region, Strips.packed(num_pages, page_bytes))

    @classmethod
    def of_layout(cls, region: MemoryRegion, layout: KVLayout) -> "Pool":
        """Return the pool of a layout."""
        return cls(region, layout.places)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return int(self.places.width.sum())

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return self.places.num_pages

    @property
    def size_bytes(self) -> int:
        """Bytes up to the end of the last page."""
        return self.places.end


@dataclass(frozen=True, slots=True)
class PeerAdmission:
    """A peer that may connect. The offer contains its secret, so send it over the link only."""

    peer: PeerKey
    offer: TransportOffer


Facts = TypeVar("Facts", bound=msgspec.Struct)


def read_offer(offer: TransportOffer, kind: type[Facts]) -> Facts:
    """Return the descriptor of an offer as a `kind`.

    Raises:
        TransferRefused: The descriptor is invalid.
    """
    try:
        return msgspec.convert(offer.descriptor, kind)
    except msgspec.ValidationError as error:
        raise TransferRefused(f"invalid {offer.name} offer: {error}") from error


def require_cpu_memory(name: str, pool: Pool) -> None:
    """Refuse a pool that transport `name` cannot copy into.

    Raises:
        ConfigInvalid: The pool is in a device's memory.
    """
    if pool.region.device != "cpu":
        raise ConfigInvalid(
            f"transport {name} needs a pool in CPU memory, not {pool.region.device}"
        )


class Listener(Protocol):
    """The receiving end: decides which peer may write where. Any thread may call any method.

    The calls for one peer come from the worker of its link, in the order of the protocol.

    A listener that sees the writes checks each one against its grant (`Permits`), and may count the refused ones
    in `num_violations`. A one-sided listener does not see the writes: its `permit` and `revoke` check nothing, and
    only its fence stops a peer that violates the protocol.
    """

    def admit(self, toward_host: str) -> PeerAdmission:
        """Admit one more peer, until `fence`.

        Args:
            toward_host: Address of the peer's host. A listener bound to all addresses offers the local
                address on the route to that host.

        Raises:
            TransferRefused: This machine cannot serve one more peer.
        """
        ...

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Accept writes of `room` from `peer` into these pages."""
        ...

    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Refuse further writes of `room`. Does not block unless the peer violates the protocol."""
        ...

    def fence(self, peer: PeerKey) -> None:
        """Cut the peer off: after this returns, no write of the peer can arrive.

        Blocks until then, unless the listener is closed. A writer that was stopped in the middle of a copy
        delays it until the writer continues or dies. No-op for an unknown peer. After an error the peer's
        pages stay in quarantine, and the call is retried until it succeeds.
        """
        ...

    def close(self) -> None:
        """Stop listening and fence all peers. Safe to call twice."""
        ...


class Connection(Protocol):
    """The sending end, to one peer. One write at a time."""

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Copy from the own region into the peer's pool; return when all bytes are there.

        Raises:
            TransferRefused: The pages are not granted to this room. No byte of the write is in flight.
            PeerLost: The peer is gone or has fenced this connection, or `close` was called. Bytes may still
                be in flight. Any other exception is treated alike: the link is dropped, and the listener
                fences this peer.
        """
        ...

    def close(self) -> None:
        """Close the connection; a write in flight raises `PeerLost`. Any thread may call it. Safe to call twice."""
        ...


@runtime_checkable
class PostingConnection(Connection, Protocol):
    """A connection with asynchronous writes, of which several may be in flight. One thread posts and polls them."""

    def post(self, room: Room, plan: CopyPlan) -> Poll:
        """Start a write and return its poll. Both raise the same errors as `write`."""
        ...


class Transport(Protocol):
    """A kind of connection between pools. `--transfer-backend` and offers use its name."""

    name: str

    def listen(self, pool: Pool) -> Listener:
        """Start receiving into `pool`.

        Raises:
            ConfigInvalid: The transport does not support this pool or this machine.
        """
        ...

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> Connection:
        """Connect to the listener that made `offer`, to write from `region`. May block for seconds.

        Raises:
            TransferRefused: The offer cannot be used from this process, for example on a different host.
        """
        ...


RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Settings of transports.

    Attributes:
        host: Address to listen on; 0.0.0.0 and :: mean all.
        interface: IP network interface to listen on and send from, if the transport supports one; empty
            means the interface of `host`.
        devices: RDMA devices of this rank, such as mlx5_0 or mlx5_0:1, if the transport supports them; empty: any.
        port: TCP port of this rank for `tcp`; 0: any free port.
    """

    host: str = "127.0.0.1"
    interface: str = ""
    devices: tuple[str, ...] = ()
    port: int = 0

    @property
    def ucx_devices(self) -> str:
        """The devices in UCX's notation, which requires the port of an RDMA device."""
        return ",".join(
            f"{name}:1" if (RDMA_DEVICES / name).exists() else name for name in self.devices
        )


TransportFactory = Callable[[TransportConfig], Transport]


class HasPlaces(Protocol):
    """Anything that knows where the pages of a pool lie."""

    @property
    def places(self) -> Strips:
        """Where the pages lie in the pool."""
        ...


# Marks a page without a grant; no request has this room.
NO_ROOM = -(1 << 63)


class Permits:
    """The room that may write each page of a pool, for one peer. The owner's lock guards it.

    Args:
        rooms: Array that holds the room of each page; None: a new one.
    """

    def __init__(self, pool: HasPlaces, rooms: Int64s | None = None) -> None:
        self._places = places = pool.places
        self._rooms = np.full(places.num_pages, NO_ROOM, np.int64) if rooms is None else rooms

    def permit(self, room: Room, page_ids: Sequence[int]) -> None:
        """Let `room` write these pages."""
        self._rooms[np.asarray(page_ids, np.int64)] = room

    def revoke(self, room: Room) -> None:
        """Close the pages of `room`; no-op if it has none."""
        self._rooms[self._rooms == room] = NO_ROOM

    def check(self, room: Room, plan: CopyPlan) -> None:
        """Refuse a plan that writes outside the pages of `room`. Room and sizes come from the peer.

        Raises:
            TransferRefused: The plan leaves the pages; the message names the first page outside.
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
    """Refuse byte ranges that leave a pool, or whose total is larger than the pool.

    Raises:
        TransferRefused: The ranges do not fit into the pool.
    """
    # In this order nothing overflows: once size and offset are in range, their sum fits into an int64.
    is_inside = (
        (size_bytes > 0) & (size_bytes <= pool_bytes) & (offset >= 0) & (offset < pool_bytes)
    )
    if not is_inside.all() or (offset + size_bytes > pool_bytes).any():
        raise TransferRefused("a copy leaves the pool")
    if size_bytes.sum() > pool_bytes:
        raise TransferRefused("the copies have more bytes than the pool")
