"""Shared memory on one host: prefill maps decode's pool file, and a push is a memcpy.

Writes are one-sided, so the fence is a lock. Each peer has a control file next to the pool, in which the pool's
owner permits and forbids writes:

```
 byte 0     1 once the peer is fenced
 byte 16    nonce of 16 bytes: proves that both ends use the same /dev/shm
 byte 32    int32: process id of a writer whose device is copying, else 0 (`cuda_ipc`)
 byte 64    one int64 per page: the room that may write it (`Permits`)
```

For each batch the writer locks the file (flock), checks byte 0 and the rooms, copies, and unlocks. The fence
sets byte 0 and then takes the lock: from then on no copy is in flight, and every later one sees the byte. A
writer that is stopped in the middle of a copy keeps the lock, and so the pages; the kernel releases the lock
when the writer dies. A device may continue to copy until its driver has cleaned up the dead process, so a fence
that finds a process id also waits for the end of that process.
"""

import fcntl
import mmap
import os
import secrets
import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from typing_extensions import override

from tandem.kvtransfer import copying
from tandem.kvtransfer.layout import MAX_POOL_BYTES, Strips
from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import POOL_NAME, SHM_DIR, MemoryRegion, is_unlocked
from tandem.kvtransfer.transports.base import (
    NO_ROOM,
    HasPlaces,
    PeerAdmission,
    PeerKey,
    Permits,
    Pool,
    TransportConfig,
    check_bounds,
    new_peer_key,
    read_offer,
)
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

# About 7 ms of copying: the longest that a fence waits for a running writer, and 1,000 times the cost of the lock.
BATCH_BYTES = 32 << 20
BATCH_COPIES = 8192
NONCE_BYTES = 16
ROOMS_AT = 64


class ControlOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Common fields of all descriptors. They name files, so the patterns exclude paths out of /dev/shm.

    Attributes:
        pool: Name of the file that the pool's owner keeps locked while it lives.
        page_bytes: Page size of a pool with contiguous pages.
        strips: Base, stride and width of each strip of any other pool, as in `Strips`.
    """

    pool: Annotated[str, msgspec.Meta(pattern=f"^{POOL_NAME.pattern}$")]
    peer: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    nonce: str
    page_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_POOL_BYTES)]
    num_pages: Annotated[int, msgspec.Meta(ge=1, le=MAX_POOL_BYTES)]
    strips: Annotated[str, msgspec.Meta(pattern=r"^(\d{1,15}:\d{1,15}:\d{1,15}(,|$))*$")] = ""

    @property
    def places(self) -> Strips:
        """Where the pages lie in the pool."""
        if not self.strips:
            return Strips.packed(self.num_pages, self.page_bytes)
        columns = np.array([each.split(":") for each in self.strips.split(",")], np.int64).T
        places = Strips(self.num_pages, *columns)
        if (places.width < 1).any() or (places.stride < places.width).any():
            raise TransferRefused(f"invalid strips in the offer: {self.strips[:100]}")
        return places


def _strips(places: Strips) -> str:
    if len(places.base) == 1 and places.base[0] == 0 and places.stride[0] == places.width[0]:
        return ""
    rows = zip(places.base.tolist(), places.stride.tolist(), places.width.tolist(), strict=True)
    return ",".join(f"{base}:{stride}:{width}" for base, stride, width in rows)


def control_path(pool_path: Path, peer: str) -> Path:
    """Return the path of a peer's control file."""
    return pool_path.with_suffix(f".{peer}.ctl")


class Control:
    """A control file, mapped by one end.

    Args:
        nonce: If set, the file is created with it; None opens an existing file.

    Raises:
        OSError: The file cannot be created or opened.
        ValueError: The file is too small for the pool's number of pages.

    Attributes:
        permits: The rooms in the file.
    """

    def __init__(self, path: Path, pool: HasPlaces, nonce: bytes | None = None) -> None:
        flags = os.O_CREAT | os.O_EXCL if nonce is not None else 0
        num_pages = pool.places.num_pages
        size_bytes = ROOMS_AT + 8 * num_pages
        self.path = path
        self.fencing = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
        try:
            if nonce is not None:
                os.posix_fallocate(self._fd, 0, size_bytes)
            memory = mmap.mmap(self._fd, size_bytes)
        except (OSError, OverflowError, ValueError):
            os.close(self._fd)
            raise
        self._bytes = np.frombuffer(memory, np.uint8, ROOMS_AT)
        self._writer = np.frombuffer(memory, np.int32, 1, 32)
        rooms = np.frombuffer(memory, np.int64, num_pages, ROOMS_AT)
        self.permits = Permits(pool, rooms)
        if nonce is not None:
            self._bytes[16:32] = np.frombuffer(nonce, np.uint8)
            rooms[:] = NO_ROOM

    @property
    def nonce(self) -> bytes:
        """Distinguishes this file from one of the same name in a different /dev/shm."""
        return self._bytes[16:32].tobytes()

    def set_fenced(self) -> None:
        """Forbid all later copies."""
        self._bytes[0] = 1

    def try_lock(self) -> bool:
        """Take the lock unless a copy is in flight; return whether it was taken."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_writer_ending(self) -> bool:
        """Return whether a device may still copy for a writer that died. Call it under the lock."""
        if (pid := int(self._writer[0])) <= 0:
            return False
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        except OSError:  # no descriptor is free now
            return True
        with open(fd, "rb", buffering=0):
            # Readable once all threads have ended and their files are closed.
            return not select.select([fd], [], [], 0)[0]

    @contextmanager
    def turn(self, pool_fd: int) -> Iterator[None]:
        """Hold the lock for one batch.

        Args:
            pool_fd: Descriptor of the file that the pool's owner keeps locked while it lives.

        Raises:
            PeerLost: The owner has fenced this writer, or died.
        """
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            if self._bytes[0] or is_unlocked(pool_fd):
                raise PeerLost("the owner of the pool fenced this writer, or died")
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    @contextmanager
    def device_busy(self) -> Iterator[None]:
        """Mark that a device copies for this process, until the block ends. Call it inside a turn."""
        self._writer[0] = os.getpid()
        yield
        # Not after an error: the device may still copy, and a fence must wait for the end of this process.
        self._writer[0] = 0

    def close(self) -> None:
        """Close the file; the mapping ends with the last array that uses it."""
        os.close(self._fd)


class ControlListener:
    """The receiving end: the control files of all peers of one pool.

    Args:
        path: The file that the pool's owner keeps locked; control files are next to it.
        name: Name of the transport in offers.
        facts: Descriptor fields in addition to those of `ControlOffer`.
        closing: Called at the end of `close`.
    """

    def __init__(
        self,
        pool: Pool,
        path: Path,
        name: str,
        facts: Mapping[str, str | int] | None = None,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool, self._path = pool, path
        self._name, self._facts, self._closing = name, dict(facts or {}), closing
        self._controls: dict[PeerKey, Control] = {}
        self._closed = threading.Event()

    def admit(self, toward_host: str) -> PeerAdmission:
        """Make a control file for one more peer."""
        del toward_host
        peer, nonce, places = new_peer_key(), secrets.token_bytes(NONCE_BYTES), self._pool.places
        path = control_path(self._path, peer)
        try:
            self._controls[peer] = Control(path, self._pool, nonce)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise TransferRefused(f"cannot make {path}: {error.strerror}") from error
        if self._closed.is_set():  # `close` may already have removed the files
            self.fence(peer)
            raise TransferRefused("the pool's owner is closing")
        offer = ControlOffer(
            pool=self._path.name,
            peer=peer,
            nonce=nonce.hex(),
            page_bytes=self._pool.page_bytes,
            num_pages=places.num_pages,
            strips=_strips(places),
        )
        descriptor = msgspec.structs.asdict(offer) | self._facts
        return PeerAdmission(peer, TransportOffer(name=self._name, descriptor=descriptor))

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Let `room` write these pages."""
        self._controls[peer].permits.permit(room, page_ids)

    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Close the pages of `room`."""
        # Without the lock: the writer has sent its last message of this room, and a wait for a copy of a
        # different room would let a stopped peer block this process.
        if control := self._controls.get(peer):
            control.permits.revoke(room)

    def fence(self, peer: PeerKey) -> None:
        """Set byte 0, then wait for the lock, and for the end of a writer that died while copying."""
        if (control := self._controls.get(peer)) is None:
            return
        control.set_fenced()
        with control.fencing:
            if peer not in self._controls:
                return
            # Poll instead of a blocking flock, so that `close` can end the wait.
            while not control.try_lock() and not self._closed.wait(0.005):
                pass
            while control.is_writer_ending() and not self._closed.wait(0.005):
                pass
            del self._controls[peer]
            control.path.unlink(missing_ok=True)
            control.close()

    def close(self) -> None:
        """Fence all peers without waiting for stopped writers, and remove their files."""
        self._closed.set()
        for peer in list(self._controls):
            self.fence(peer)
        self._closing()


class ControlConnection(ABC):
    """The sending end: maps the control file and checks that the pool's owner lives.

    Raises:
        TransferRefused: The files are not in this /dev/shm, or do not match the offer.
    """

    def __init__(self, facts: ControlOffer, region: MemoryRegion) -> None:
        self._source_bytes, self._pool_bytes = region.size_bytes, facts.places.end
        self._mutex = threading.Lock()
        self._is_closed = False
        with ExitStack() as opened:
            try:
                path = SHM_DIR / facts.pool
                self._pool_fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                opened.callback(os.close, self._pool_fd)
                self._control = Control(control_path(path, facts.peer), facts)
                opened.callback(self._control.close)
            except (OSError, OverflowError, ValueError) as error:
                raise TransferRefused(f"no such pool in this /dev/shm: {error}") from error
            if self._control.nonce.hex() != facts.nonce:
                raise TransferRefused("the pool in this /dev/shm is not the offered one")
            self._open_pool(facts, region, opened)
            self._opened = opened.pop_all()

    @abstractmethod
    def _open_pool(self, facts: Any, region: MemoryRegion, opened: ExitStack) -> None:
        """Map the pool; `opened` unmaps it. Raises TransferRefused."""

    @abstractmethod
    def _copy(self, batch: CopyPlan) -> None:
        """Copy a batch, and return when it is complete. Called inside a turn."""

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Copy batch by batch, each under the lock."""
        check_bounds(self._source_bytes, plan.source_offset, plan.size_bytes)
        for batch in plan.batches(BATCH_BYTES, BATCH_COPIES):
            with self.turn(room, batch):
                self._copy(batch)

    @contextmanager
    def turn(self, room: Room, batch: CopyPlan) -> Iterator[None]:
        """Hold the lock while one batch is copied.

        Raises:
            PeerLost: The connection is closed, or the owner has fenced it or died.
            TransferRefused: The pages are not granted to this room, or not in the pool.
        """
        with self._mutex:
            if self._is_closed:
                raise PeerLost("the connection is closed")
            with self._control.turn(self._pool_fd):
                self._control.permits.check(room, batch)
                yield

    def close(self) -> None:
        """Close the connection after the batch in flight."""
        self._is_closed = True
        # A batch takes milliseconds. If it takes longer, the far end was stopped while it held the lock: the
        # files then stay open instead of blocking the caller.
        if self._mutex.acquire(timeout=0.1):
            self._opened.close()
            self._mutex.release()


class ShmTransport:
    """Shared memory of one host and user."""

    name = "shm"

    def __init__(self, config: TransportConfig | None = None) -> None:
        del config

    def listen(self, pool: Pool) -> ControlListener:
        """Start receiving."""
        if pool.region.path is None:
            raise ConfigInvalid("transport shm needs a pool in shared memory; use tcp")
        return ControlListener(pool, pool.region.path, self.name)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> "ShmConnection":
        """Map the pool that `offer` names."""
        return ShmConnection(read_offer(offer, ControlOffer), region)


class ShmConnection(ControlConnection):
    """Copies into the mapped pool."""

    @override
    def _open_pool(self, facts: Any, region: MemoryRegion, opened: ExitStack) -> None:
        try:  # the mapping ends with the last array that uses it
            memory = mmap.mmap(self._pool_fd, self._pool_bytes)
        except (OSError, OverflowError, ValueError) as error:
            raise TransferRefused(f"the pool is smaller than in its offer: {error}") from error
        self._source, self._pool = region.array(), np.frombuffer(memory, np.uint8)

    @override
    def _copy(self, batch: CopyPlan) -> None:
        copying.copy(batch, self._source, self._pool)
