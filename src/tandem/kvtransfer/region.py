"""The memory of a pool: shared with other processes of this host, private, or on a GPU.

A shared region is a file in /dev/shm, which its owner keeps locked (flock) while it lives. The kernel releases the
lock when the owner dies, so a file that can be locked is stale. Each start removes stale files.
"""

import contextlib
import fcntl
import mmap
import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer, override

from tandem.wire.errors import ConfigInvalid, TransferRefused

if TYPE_CHECKING:
    import torch

SHM_DIR = Path("/dev/shm")  # noqa: S108 - file names are random, and only the owner can open the files
POOL_NAME = re.compile(r"tandem-[\w-]{1,64}-[0-9a-f]{16}\.pool")

Read = Callable[[Sequence[slice]], Iterable[Buffer]]
"""Returns the bytes at the given ranges of a region."""


class MemoryRegion:
    """A contiguous range of memory. Its creator closes it.

    Args:
        memory: A mapping, which the region unmaps, or a view of memory that a different owner frees.

    Attributes:
        path: File that other processes can map; None for private memory.
        device: Device that holds the memory: `cpu`, or torch's name of a GPU.
    """

    device = "cpu"

    def __init__(
        self, memory: mmap.mmap | memoryview, path: Path | None = None, owner_fd: int = -1
    ) -> None:
        self._memory = memory
        self._owner_fd = owner_fd
        self.path = path
        self._buffer = memoryview(memory).cast("B")

    @classmethod
    def shared(cls, size_bytes: int, name_hint: str = "kv") -> "MemoryRegion":
        """Make a region that processes of this host and user can map. All bytes are 0.

        Args:
            size_bytes: Allocated at once, so that a full /dev/shm is an error here and not a SIGBUS later.
            name_hint: Letters and digits that identify the file in a listing of /dev/shm.

        Raises:
            ConfigInvalid: /dev/shm is too small.
        """
        sweep_stale()
        path, fd = _create_locked(name_hint)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            path.unlink()
            os.close(fd)
            raise ConfigInvalid(
                f"{SHM_DIR} has no space for {size_bytes >> 20} MiB of KV: {error.strerror}; make it "
                "larger (docker: --shm-size), lower --max-total-tokens or use --transfer-backend tcp",
                topic="docs/troubleshooting.md#too-little-memory",
            ) from error
        return cls(mmap.mmap(fd, size_bytes), path, fd)

    @classmethod
    def private(cls, size_bytes: int) -> "MemoryRegion":
        """Make a region that only this process can access. All bytes are 0."""
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Huge pages make copies of random pages 12 % faster. A kernel without them raises an error.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return cls(memory)

    @property
    def buffer(self) -> memoryview:
        """The bytes.

        Raises:
            TransferRefused: They are in a device's memory.
        """
        return self._buffer

    @property
    def size_bytes(self) -> int:
        """Size of the region."""
        return len(self._memory)

    @property
    def address(self) -> int:
        """Start address of the region in this process."""
        return self.array().ctypes.data

    def array(self) -> NDArray[np.uint8]:
        """Return the bytes as a writable array that shares the memory.

        Raises:
            TransferRefused: They are in a device's memory.
        """
        return np.frombuffer(self._memory, np.uint8)

    def read(self, extents: Sequence[slice]) -> Iterable[Buffer]:
        """Return ranges of the bytes in CPU memory: views, or copies if a device holds them."""
        return (self._buffer[extent] for extent in extents)

    def close(self) -> None:
        """Remove the file and unmap. Safe to call twice.

        The mapping ends with the last array or tensor that uses the memory.
        """
        self._buffer.release()
        if self._owner_fd >= 0:
            assert self.path is not None
            self.path.unlink(missing_ok=True)
            os.close(self._owner_fd)
            self._owner_fd = -1
        if isinstance(self._memory, mmap.mmap):
            with contextlib.suppress(BufferError):
                self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    @override
    def __repr__(self) -> str:
        return f"MemoryRegion({self.path or 'private'}, {self.size_bytes >> 20} MiB)"


class DeviceRegion(MemoryRegion):
    """Memory of a tensor on a device, which the CPU cannot access.

    Args:
        tensor: Kept alive by the region.
        read: Copies bytes to the CPU; synchronous, callable from any thread. None: the region is never read.

    Raises:
        ValueError: The tensor is not contiguous.

    Attributes:
        tensor: The tensor; None once the region is closed.
    """

    def __init__(self, tensor: "torch.Tensor", read: Read | None = None) -> None:
        if not tensor.is_contiguous():
            raise ValueError("a region needs a contiguous tensor")
        self.tensor: torch.Tensor | None = tensor
        self._read = read
        self._size_bytes, self._address = tensor.nbytes, tensor.data_ptr()
        self.device = str(tensor.device)
        self.path = None

    @classmethod
    def of_bytes(cls, memory: "torch.Tensor") -> "DeviceRegion":
        """Return a readable region of a tensor of bytes on a GPU."""
        import torch

        # A separate stream: on the stream of the forwards a checksum would wait for all work queued there.
        stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]

        def read(extents: Sequence[slice]) -> Iterable[Buffer]:
            if not extents:
                return []  # `torch.cat` rejects an empty list
            with torch.cuda.stream(stream):
                gathered = torch.cat([memory[extent] for extent in extents]).cpu()
            sizes = [extent.stop - extent.start for extent in extents]
            return [piece.numpy().data for piece in torch.split(gathered, sizes)]

        return cls(memory, read)

    @property
    @override
    def buffer(self) -> memoryview:
        raise TransferRefused(f"the CPU cannot access the memory of {self.device}")

    @override
    def array(self) -> NDArray[np.uint8]:
        raise TransferRefused(f"the CPU cannot access the memory of {self.device}")

    @property
    @override
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    @override
    def address(self) -> int:
        return self._address

    @override
    def read(self, extents: Sequence[slice]) -> Iterable[Buffer]:
        if self._read is None:
            raise TransferRefused(f"the CPU cannot access the memory of {self.device}")
        return self._read(extents)

    @override
    def close(self) -> None:
        self.tensor = self._read = None

    @override
    def __repr__(self) -> str:
        return f"MemoryRegion({self.device}, {self.size_bytes >> 20} MiB)"


def sweep_stale() -> list[Path]:
    """Remove the pool files of dead owners, with their control files; return the pools."""
    for control in SHM_DIR.glob("tandem-*.ctl"):
        # The owner died after it had removed the pool, so the sweep of pools below does not find this file.
        if not (SHM_DIR / f"{control.name.partition('.')[0]}.pool").exists():
            with contextlib.suppress(OSError):  # removed meanwhile, or owned by a different user
                control.unlink()
    return [
        path
        for path in SHM_DIR.glob("tandem-*.pool")
        if POOL_NAME.fullmatch(path.name) and _remove_if_stale(path)
    ]


def _remove_if_stale(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # removed meanwhile, or owned by a different user
        return False
    try:
        # Keep the lock until the file is removed: an owner that is creating it notices the removal.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        for each in SHM_DIR.glob(path.stem + ".*"):
            each.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def is_unlocked(pool_fd: int) -> bool:
    """Return whether the owner of an open pool file is dead. The lock is not kept."""
    try:
        # A shared lock: two processes that check at the same time must not mistake each other for the owner.
        fcntl.flock(pool_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(pool_fd, fcntl.LOCK_UN)
    return True


def _create_locked(name_hint: str) -> tuple[Path, int]:
    while True:
        path = SHM_DIR / f"tandem-{name_hint}-{secrets.token_hex(8)}.pool"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if path.exists():
            return path, fd
        os.close(fd)  # a sweep of a different process removed the file before it was locked
