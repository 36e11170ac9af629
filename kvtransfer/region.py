"""Memory that holds a pool: shared, so that another process of this host can map it, private, or a GPU's.

A shared region is a file in /dev/shm, locked (flock) by its owner for as long as it lives. The kernel
drops the lock when the owner dies, however it dies: so a file that can be locked is stale, and each
start removes the stale ones.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer, override

from tandem.wire.errors import ConfigInvalid, TransferRefused

if TYPE_CHECKING:
    import torch

SHM_DIR = Path("/dev/shm")  # noqa: S108 - names in it are random and files are ours alone
HEADER = struct.Struct("@NN")  # of glibc's malloc
POOL_NAME = re.compile(r"tandem-[\w-]{1,64}-[0-9a-f]{16}\.pool")

Read = Callable[[Sequence[slice]], Iterable[Buffer]]
"""Returns what is at some places of a region."""


class MemoryRegion:
    """One contiguous piece of memory. Its maker closes it.

    Attributes:
        path: The file another process can map; None for private memory.
        device: Whose memory it is: `cpu`, or torch's name of a GPU.
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
            size_bytes: Taken at once, so that a full /dev/shm is an error here and not a SIGBUS later.
            name_hint: Letters and digits that help a person who lists /dev/shm.

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
                f"{SHM_DIR} has no room for {size_bytes >> 20} MiB of KV: {error.strerror}; make it "
                "larger (docker: --shm-size), lower --max-total-tokens or use --transfer-backend tcp",
                topic="troubleshooting#too-little-memory",
            ) from error
        return cls(mmap.mmap(fd, size_bytes), path, fd)

    @classmethod
    def private(cls, size_bytes: int) -> "MemoryRegion":
        """Make a region that only this process sees. All bytes are 0."""
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Copies of pages at random places take an eighth less time. A kernel without large pages refuses.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return cls(memory)

    @classmethod
    def adopted(cls, address: int, size_bytes: int, *, is_shared: bool) -> "MemoryRegion":
        """Make a region of memory that this process has already, and keeps as long as it lives.

        Args:
            is_shared: Whether processes of this host and user can map it. The memory then becomes a file's, at
                the same address and with the same content, and the region has whole pages of the system.
                No other thread may write there meanwhile. Memory that may lie on pages with other objects stays
                private.

        Raises:
            ConfigInvalid: /dev/shm is too small.
        """
        if not (is_shared and _has_own_pages(address, size_bytes)):
            return _AdoptedRegion(_memory_at(address, size_bytes))
        begin = address // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(address + size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        with cls.shared(end - begin) as file:
            memory = _memory_at(begin, end - begin)
            file.array()[:] = np.frombuffer(memory, np.uint8)
            _map_at(begin, end - begin, file._owner_fd)  # noqa: SLF001 - of the same class
            region = _AdoptedRegion(memory, file.path, file._owner_fd)  # noqa: SLF001
            file._owner_fd = -1  # noqa: SLF001 - the file is the new region's
        return region

    @property
    def buffer(self) -> memoryview:
        """The bytes.

        Raises:
            TransferRefused: A device has them.
        """
        return self._buffer

    @property
    def size_bytes(self) -> int:
        """Bytes in the region."""
        return len(self._memory)

    @property
    def address(self) -> int:
        """Where the region begins in this process."""
        return self.array().ctypes.data

    def array(self) -> NDArray[np.uint8]:
        """Return the bytes as a writable array that shares them.

        Raises:
            TransferRefused: A device has them.
        """
        return np.frombuffer(self._memory, np.uint8)

    def read(self, extents: Sequence[slice]) -> Iterable[Buffer]:
        """Return some of the bytes where the CPU can look at them: a copy if a device has them."""
        return (self._buffer[extent] for extent in extents)

    def close(self) -> None:
        """Remove the file and unmap. Safe to call twice.

        Where a tensor still looks at the memory, the mapping stays until that is gone.
        """
        self._buffer.release()
        if self._owner_fd >= 0:
            assert self.path is not None
            self.path.unlink(missing_ok=True)
            os.close(self._owner_fd)
            self._owner_fd = -1
        self._unmap()

    def _unmap(self) -> None:
        assert isinstance(self._memory, mmap.mmap)
        with contextlib.suppress(BufferError):
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    @override
    def __repr__(self) -> str:
        return f"MemoryRegion({self.path or 'private'}, {self.size_bytes >> 20} MiB)"


class _AdoptedRegion(MemoryRegion):
    """Memory that others gave and that stays mapped."""

    @override
    def _unmap(self) -> None:
        """Leave the memory to those that use it."""


def _has_own_pages(address: int, size_bytes: int) -> bool:
    """Tell whether glibc's malloc gave this piece whole pages of the system, which nothing else is on.

    A piece of the heap may be as large. Its pages would stay a file's when it is freed, and forks would share them.
    """
    if size_bytes < mmap.PAGESIZE:
        return False
    # Before each piece: where its mapping begins, if it has one, and its size with three flags. Another malloc may have
    # nothing there, which ends a process that looks.
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            before, size = HEADER.unpack(os.pread(memory.fileno(), HEADER.size, address - 16))
    except (OSError, struct.error):
        return False
    is_mapped, first, last = size & 2, address - 16 - before, address - 16 + (size & ~7)
    is_aligned = not (first % mmap.PAGESIZE or last % mmap.PAGESIZE)
    return bool(is_mapped and is_aligned and last >= address + size_bytes)


def _memory_at(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")


def _map_at(address: int, size_bytes: int, fd: int) -> None:
    """Map a file in place of what is at `address`; both are multiples of the system's page size."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    map_fixed = 0x10  # of Linux; Python has no name for it
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = libc.mmap(address, size_bytes, protection, mmap.MAP_SHARED | map_fixed, fd, 0)
    if mapped != address:
        raise OSError(ctypes.get_errno(), "the KV memory cannot be mapped from a file")


class DeviceRegion(MemoryRegion):
    """Memory of a tensor on a device, which the CPU does not look into.

    Args:
        tensor: Stays alive as long as the region.
        read: Copies bytes to the CPU, at once and on any thread; None: nobody is going to ask.

    Raises:
        ValueError: The tensor has gaps.

    Attributes:
        tensor: What it is the memory of; None once it is closed.
    """

    def __init__(self, tensor: "torch.Tensor", read: Read | None = None) -> None:
        if not tensor.is_contiguous():
            raise ValueError("a region is contiguous, and this tensor is not")
        self.tensor: torch.Tensor | None = tensor
        self._read = read
        self._size_bytes, self._address = tensor.nbytes, tensor.data_ptr()
        self.device = str(tensor.device)
        self.path = None

    @classmethod
    def of_bytes(cls, memory: "torch.Tensor") -> "DeviceRegion":
        """Return the region of a GPU's bytes, which may be read."""
        import torch

        # Not the stream of the forwards: a checksum would wait for all work queued there.
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
        raise TransferRefused(f"memory of {self.device} is not the CPU's to read")

    @override
    def array(self) -> NDArray[np.uint8]:
        raise TransferRefused(f"memory of {self.device} is not the CPU's to read")

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
            raise TransferRefused(f"memory of {self.device} is not the CPU's to read")
        return self._read(extents)

    @override
    def close(self) -> None:
        self.tensor = self._read = None

    @override
    def __repr__(self) -> str:
        return f"MemoryRegion({self.device}, {self.size_bytes >> 20} MiB)"


def sweep_stale() -> list[Path]:
    """Remove pool files (and what belongs to them) whose owners are dead; return the pools."""
    for belonging in SHM_DIR.glob("tandem-*.ctl"):
        # Its owner died after it had removed the pool: nobody else would ever look for it.
        if not (SHM_DIR / f"{belonging.name.partition('.')[0]}.pool").exists():
            with contextlib.suppress(OSError):  # gone, or another user's
                belonging.unlink()
    return [
        path
        for path in SHM_DIR.glob("tandem-*.pool")
        if POOL_NAME.fullmatch(path.name) and _remove_if_stale(path)
    ]


def _remove_if_stale(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # gone, or another user's
        return False
    try:
        # Held until the file is gone: an owner that is just being born then sees that it is.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        for belonging in SHM_DIR.glob(path.stem + ".*"):
            belonging.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def is_unlocked(pool_fd: int) -> bool:
    """Tell whether the owner of an open pool file is dead. The lock is not kept."""
    try:
        # Shared: two who look at once must not take each other for the owner.
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
        os.close(fd)  # another process's sweep came between creation and lock
