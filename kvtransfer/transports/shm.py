"""One host, CPU memory: prefill maps decode's pool file and the push is one memcpy.

The write is one-sided, so the fence is a lock. Each peer has a control file beside the pool:

```
 byte 0     1 once the peer is fenced
 byte 16    nonce: both ends look at the same /dev/shm exactly when they find the same 16 bytes
 byte 64    int64 a page: the room that may write it, -1 for none
```

Prefill takes the file's lock (flock), looks at byte 0 and at the rooms, copies one batch, unlocks.
The fence sets byte 0 and then takes the lock: once it has it no copy is under way and every later
one sees the byte. A writer stopped in the middle of a copy keeps the lock, and the pages with it; the
kernel gives it up when the writer dies.
"""

import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from kvtransfer.plan import CopyPlan, touched_pages
from kvtransfer.region import POOL_NAME, SHM_DIR, MemoryRegion, is_unlocked
from kvtransfer.transports.base import (
    Admission,
    PeerKey,
    Pool,
    TransportConfig,
    check_bounds,
    new_peer_key,
)
from wire.errors import ConfigInvalid, PeerLost, TransferRefused
from wire.ids import Room
from wire.messages import TransportOffer

# 4 ms of copying: the longest a fence waits for a healthy writer, and 1,000 times the lock's cost.
BATCH_BYTES = 32 << 20
BATCH_COPIES = 8192
NO_ROOM = -1
ROOMS_AT = 64


def control_path(pool_path: Path, peer: str) -> Path:
    """Return where the control file of one peer of a pool is."""
    return pool_path.with_suffix(f".{peer}.ctl")


class _Control:
    """One end's view of a control file."""

    def __init__(self, path: Path, num_pages: int, nonce: bytes | None = None) -> None:
        """Create the file when a nonce is given, else open it."""
        flags = os.O_CREAT | os.O_EXCL if nonce is not None else 0
        size_bytes = ROOMS_AT + 8 * num_pages
        self.path = path
        self.fencing = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
        try:
            if nonce is not None:
                os.posix_fallocate(self._fd, 0, size_bytes)
            memory = mmap.mmap(self._fd, size_bytes)
        except (OSError, ValueError):
            os.close(self._fd)
            raise
        self._bytes = np.frombuffer(memory, np.uint8, ROOMS_AT)
        self.rooms = np.frombuffer(memory, np.int64, num_pages, ROOMS_AT)
        if nonce is not None:
            self._bytes[16:32] = np.frombuffer(nonce, np.uint8)
            self.rooms[:] = NO_ROOM

    @property
    def nonce(self) -> bytes:
        return self._bytes[16:32].tobytes()

    @property
    def is_fenced(self) -> bool:
        return bool(self._bytes[0])

    def set_fenced(self) -> None:
        self._bytes[0] = 1

    def lock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def try_lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._fd)  # the mapping goes with the last array that looks at it


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The descriptor. It names files, so nothing in it may climb out of /dev/shm."""

    pool: Annotated[str, msgspec.Meta(pattern=f"^{POOL_NAME.pattern}$")]
    peer: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    nonce: str
    page_bytes: Annotated[int, msgspec.Meta(ge=1)]
    num_pages: Annotated[int, msgspec.Meta(ge=1)]


class ShmTransport:
    """Shared memory of one host and user."""

    name = "shm"

    def __init__(self, config: TransportConfig | None = None) -> None:
        del config

    def listen(self, pool: Pool) -> "ShmListener":
        """Begin to receive.

        Raises:
            ConfigInvalid: The pool is private memory.
        """
        if pool.region.path is None:
            raise ConfigInvalid("transport shm needs a pool in shared memory")
        return ShmListener(pool, pool.region.path)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> "ShmConnection":
        """Map the pool that `offer` names.

        Raises:
            TransferRefused: It is not in this /dev/shm, or not what the offer says.
        """
        return ShmConnection(offer, region)


class ShmListener:
    """Keeps the control files of its peers."""

    def __init__(self, pool: Pool, path: Path) -> None:
        self._pool, self._path = pool, path
        self._controls: dict[PeerKey, _Control] = {}
        self._closed = threading.Event()

    def admit(self, toward_host: str) -> Admission:
        """Make a control file for one more peer."""
        del toward_host
        peer, nonce = new_peer_key(), secrets.token_bytes(16)
        path = control_path(self._path, peer)
        try:
            self._controls[peer] = _Control(path, self._pool.num_pages, nonce)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise TransferRefused(f"cannot make {path}: {error.strerror}") from error
        offer = _Offer(
            pool=self._path.name,
            peer=peer,
            nonce=nonce.hex(),
            page_bytes=self._pool.page_bytes,
            num_pages=self._pool.num_pages,
        )
        return Admission(peer, TransportOffer(name="shm", descriptor=msgspec.structs.asdict(offer)))

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Mark the pages as this room's."""
        if page_ids:
            self._controls[peer].rooms[np.asarray(page_ids)] = room

    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Unmark the pages of this room."""
        # Without the lock: the writer has said its last word on this room, and waiting for another
        # room's copy would let a stopped peer stop us.
        if control := self._controls.get(peer):
            control.rooms[control.rooms == room] = NO_ROOM

    def fence(self, peer: PeerKey) -> None:
        """Set the byte, then wait for the lock."""
        if (control := self._controls.get(peer)) is None:
            return
        control.set_fenced()
        with control.fencing:
            # Not a blocking flock: `close` must be able to end the wait.
            while not control.try_lock() and not self._closed.wait(0.005):
                pass
            if self._controls.pop(peer, None):
                control.path.unlink(missing_ok=True)
                control.close()

    def close(self) -> None:
        """Fence all peers as far as that goes without waiting, and remove their files."""
        self._closed.set()
        for peer in list(self._controls):
            self.fence(peer)


class ShmConnection:
    """Maps the pool and the control file of one listener."""

    def __init__(self, offer: TransportOffer, region: MemoryRegion) -> None:
        self._mutex = threading.Lock()
        self._source = region.array()
        with ExitStack() as opened:
            try:
                facts = msgspec.convert(offer.descriptor, _Offer)
                path = SHM_DIR / facts.pool
                self._pool_fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                opened.callback(os.close, self._pool_fd)
                self._control = _Control(control_path(path, facts.peer), facts.num_pages)
                opened.callback(self._control.close)
                self._page_bytes = facts.page_bytes
                memory = mmap.mmap(self._pool_fd, facts.page_bytes * facts.num_pages)
                self._pool = np.frombuffer(memory, np.uint8)
            except (msgspec.ValidationError, OSError, ValueError) as error:
                raise TransferRefused(f"no such pool in this /dev/shm: {error}") from error
            if self._control.nonce.hex() != facts.nonce:
                raise TransferRefused("the pool in this /dev/shm is another one")
            self._files = opened.pop_all()
        self._is_closed = False

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Copy batch by batch, each under the lock."""
        source, pool = self._source, self._pool
        check_bounds(len(source), plan.source_offset, plan.size_bytes)
        check_bounds(len(pool), plan.destination_offset, plan.size_bytes)
        for batch in plan.batches(BATCH_BYTES, BATCH_COPIES):
            with self._turn():
                self._check(room, batch)
                # Array slices, not memoryviews: as fast from 64 KiB up, and the GIL is released.
                for begin, to, size in batch.copies():
                    pool[to : to + size] = source[begin : begin + size]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._mutex:
            if self._is_closed:
                raise PeerLost("the connection is closed")
            self._control.lock()
            try:
                if self._control.is_fenced or is_unlocked(self._pool_fd):
                    raise PeerLost("the owner of the pool fenced this writer, or died")
                yield
            finally:
                self._control.unlock()

    def _check(self, room: Room, batch: CopyPlan) -> None:
        pages = touched_pages(batch.destination_offset, batch.size_bytes, self._page_bytes)
        outside = pages[self._control.rooms[pages] != room]
        if len(outside):
            raise TransferRefused(f"page {outside[0]} is not granted to room {room}")

    def close(self) -> None:
        """Hang up after the batch under way. The mapping goes when nothing looks at it."""
        self._is_closed = True
        # A batch takes milliseconds. Longer means that the far end was stopped while it held the
        # lock: then the files stay open until it goes on, and our caller does not wait with them.
        if self._mutex.acquire(timeout=0.1):
            self._files.close()
            self._mutex.release()
