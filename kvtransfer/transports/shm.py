"""One host, CPU memory: prefill maps decode's pool file, and the push is one memcpy.

The write is one-sided, so the fence is a lock. It is in a file beside the pool, one for each peer,
through which the pool's owner allows and forbids writes:

```
 byte 0     1 once the peer is fenced
 byte 16    nonce: both ends look at the same /dev/shm exactly when they find the same 16 bytes
 byte 32    int32: process id of a writer whose device is copying, else 0 (`cuda_ipc`)
 byte 64    int64 a page: the room that may write it (`Permits`)
```

The writer takes the file's lock (flock), looks at byte 0 and at the rooms, copies one batch, unlocks.
The fence sets byte 0 and then takes the lock: once it has it no copy is under way and every later
one sees the byte. A writer stopped in the middle of a copy keeps the lock, and the pages with it; the
kernel gives it up when the writer dies. A device may go on copying for a moment after that, until its
driver has cleared up behind the process: so a fence that finds a process id waits for its end, too.
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
    Admission,
    Paged,
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

# 4 ms of copying: the longest a fence waits for a healthy writer, and 1,000 times the lock's cost.
BATCH_BYTES = 32 << 20
BATCH_COPIES = 8192
NONCE_BYTES = 16
ROOMS_AT = 64


class ControlOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What every descriptor has. It names files, so nothing in it may climb out of /dev/shm.

    Attributes:
        pool: The file that the pool's owner keeps locked as long as it lives.
        page_bytes: Of a pool whose pages lie one after the other.
        strips: Of another pool: base, stride and width of each, as in `Strips`.
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
            raise TransferRefused(f"no pool has such strips: {self.strips[:100]}")
        return places


def _strips(places: Strips) -> str:
    if len(places.base) == 1 and places.base[0] == 0 and places.stride[0] == places.width[0]:
        return ""
    rows = zip(places.base.tolist(), places.stride.tolist(), places.width.tolist(), strict=True)
    return ",".join(f"{base}:{stride}:{width}" for base, stride, width in rows)


def control_path(pool_path: Path, peer: str) -> Path:
    """Return where the control file of one peer of a pool is."""
    return pool_path.with_suffix(f".{peer}.ctl")


class Control:
    """One end's view of a control file.

    Args:
        nonce: Creates the file when given; else it is opened.

    Raises:
        OSError: It cannot be.
        ValueError: It is smaller than a pool of so many pages needs.

    Attributes:
        permits: The rooms in the file.
    """

    def __init__(self, path: Path, pool: Paged, nonce: bytes | None = None) -> None:
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
        """What tells this file from one of the same name elsewhere."""
        return self._bytes[16:32].tobytes()

    def set_fenced(self) -> None:
        """Let no later copy begin."""
        self._bytes[0] = 1

    def try_lock(self) -> bool:
        """Take the lock if no copy is under way."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_writer_ending(self) -> bool:
        """Tell whether a device may still copy for a writer that died. Only under the lock."""
        if (pid := int(self._writer[0])) <= 0:
            return False
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        except OSError:  # no descriptor is free: one may be, later
            return True
        with open(fd, "rb", buffering=0):
            # Readable once every thread is gone and what they had open is released.
            return not select.select([fd], [], [], 0)[0]

    @contextmanager
    def turn(self, pool_fd: int) -> Iterator[None]:
        """Hold the lock for one batch.

        Args:
            pool_fd: Of the file that the pool's owner keeps locked as long as it lives.

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
        """Mark that a device copies for this process. Inside a turn; ends when the device is done."""
        self._writer[0] = os.getpid()
        yield
        # Not after an error: the device may still be at it, and a fence then waits for our end.
        self._writer[0] = 0

    def close(self) -> None:
        """Close the file; the mapping goes with the last array that looks at it."""
        os.close(self._fd)


class ControlListener:
    """Keeps the control files of the peers of one pool.

    Args:
        path: The file that the pool's owner keeps locked; control files lie beside it.
        name: Of the transport.
        facts: What its descriptors have beside those of `ControlOffer`.
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

    def admit(self, toward_host: str) -> Admission:
        """Make a control file for one more peer."""
        del toward_host
        peer, nonce, places = new_peer_key(), secrets.token_bytes(NONCE_BYTES), self._pool.places
        path = control_path(self._path, peer)
        try:
            self._controls[peer] = Control(path, self._pool, nonce)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise TransferRefused(f"cannot make {path}: {error.strerror}") from error
        if self._closed.is_set():  # after the look for files to remove, perhaps
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
        return Admission(peer, TransportOffer(name=self._name, descriptor=descriptor))

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Mark the pages as this room's."""
        self._controls[peer].permits.permit(room, page_ids)

    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Unmark the pages of this room."""
        # Without the lock: the writer has sent its last word on this room, and waiting for another
        # room's copy would let a stopped peer stop us.
        if control := self._controls.get(peer):
            control.permits.revoke(room)

    def fence(self, peer: PeerKey) -> None:
        """Set the byte, then wait for the lock, and for the end of a writer that died copying."""
        if (control := self._controls.get(peer)) is None:
            return
        control.set_fenced()
        with control.fencing:
            if peer not in self._controls:
                return
            # Not a blocking flock: `close` must be able to end the wait.
            while not control.try_lock() and not self._closed.wait(0.005):
                pass
            while control.is_writer_ending() and not self._closed.wait(0.005):
                pass
            del self._controls[peer]
            control.path.unlink(missing_ok=True)
            control.close()

    def close(self) -> None:
        """Fence all peers as far as that goes without waiting, and remove their files."""
        self._closed.set()
        for peer in list(self._controls):
            self.fence(peer)
        self._closing()


class ControlConnection(ABC):
    """The sending end: a writer's view of its control file and of the owner's life.

    Raises:
        TransferRefused: The files are not in this /dev/shm, or are not those of the offer.
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
                raise TransferRefused("the pool in this /dev/shm is another one")
            self._open_pool(facts, region, opened)
            self._opened = opened.pop_all()

    @abstractmethod
    def _open_pool(self, facts: Any, region: MemoryRegion, opened: ExitStack) -> None:
        """Map the pool; `opened` gives it back. Raises TransferRefused."""

    @abstractmethod
    def _copy(self, batch: CopyPlan) -> None:
        """Copy a batch, and return when it is done. In a turn."""

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
            TransferRefused: The pages are not this room's, or not in the pool.
        """
        with self._mutex:
            if self._is_closed:
                raise PeerLost("the connection is closed")
            with self._control.turn(self._pool_fd):
                self._control.permits.check(room, batch)
                yield

    def close(self) -> None:
        """Hang up after the batch under way."""
        self._is_closed = True
        # A batch takes milliseconds. Longer means that the far end was stopped while it held the
        # lock: then the files stay open until it goes on, and our caller does not wait with them.
        if self._mutex.acquire(timeout=0.1):
            self._opened.close()
            self._mutex.release()


class ShmTransport:
    """Shared memory of one host and user."""

    name = "shm"

    def __init__(self, config: TransportConfig | None = None) -> None:
        del config

    def listen(self, pool: Pool) -> ControlListener:
        """Begin to receive."""
        if pool.region.path is None:
            raise ConfigInvalid("transport shm needs a pool in shared memory")
        return ControlListener(pool, pool.region.path, self.name)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> "ShmConnection":
        """Map the pool that `offer` names."""
        return ShmConnection(read_offer(offer, ControlOffer), region)


class ShmConnection(ControlConnection):
    """Copies into the mapped pool."""

    @override
    def _open_pool(self, facts: Any, region: MemoryRegion, opened: ExitStack) -> None:
        try:  # the mapping goes when nothing looks at it
            memory = mmap.mmap(self._pool_fd, self._pool_bytes)
        except (OSError, OverflowError, ValueError) as error:
            raise TransferRefused(f"the pool is smaller than its offer says: {error}") from error
        self._source, self._pool = region.array(), np.frombuffer(memory, np.uint8)
        copying.kernel()  # compiled here and not under the lock

    @override
    def _copy(self, batch: CopyPlan) -> None:
        copying.copy(batch, self._source, self._pool)
