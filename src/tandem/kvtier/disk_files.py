"""The files of a directory with pages, its limit, and the identity of the store.

```
 PATH/tandem-kv-1/store-id                 the store's identity: random, made by the first node
                 /limit-200000000000       a limit in bytes; its mtime is the last scan of a node with this limit
                 /3f/a/3fa9…               a page, named by its key in hex; with 4,096 folders, 10 million pages are
                                           2,500 files a folder
                 /3f/a/.…                  a temporary file of a write in progress
```

All models and ranks use one folder: their keys differ, and a node that reaches the limit evicts the oldest files in the
folder. Files of a model or `--tp` that no node uses any more are therefore evicted first. A page is written under a
temporary name and renamed, so readers never see a partial page.
Nothing is fsynced: the checksum rejects pages that a power failure left incomplete.
"""

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import cast

from tandem.kvtier.entry import HEADER_BYTES, VERSION, Checksum, page_header

# Nonblocking: opening a FIFO with the name of a page would wait for a writer.
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# Errors for a symlink, an unreadable file, a socket, a directory or a bad sector.
_NOT_OURS = {errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EISDIR, errno.EIO}
# Hashing each piece while it is in the core's cache slows a read by a seventh; hashing the whole page afterwards, by a
# third. Smaller pieces cost more in calls than they save (2 MiB pages, 1 MiB of L2 cache).
_PIECE_BYTES = 512 << 10
_PAGE_NAME = re.compile(r"[0-9a-f]{64}")
_STALE_S = 3600.0  # no write of a page takes this long
# How long a limit applies after the last scan by a node with it, so that a restarted node still finds its pages.
LIMIT_S = 86_400.0


class EntryCorrupted(Exception):
    """A file does not contain the page that its name specifies."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """A page's file.

    Attributes:
        used_s: Time of the last use by any node: the file's mtime.
    """

    digest: bytes
    size_bytes: int
    used_s: float


class PageDirectory:
    """The store in one directory. Thread-safe.

    Methods raise FileNotFoundError if the page does not exist, and OSError if the file system fails.

    Args:
        path: Directory; created if it is missing.

    Attributes:
        top: The folder that contains the pages.
        store: The store's identity, the same on all nodes that share it; `scan` reads it again.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self.top = path, path / f"tandem-kv-{VERSION}"
        self._device = path.stat().st_dev
        self.make_top()
        self.store = _identity(self.top)
        _unlink(_write_temporary(self.top))

    def path_of(self, digest: bytes) -> Path:
        """Return the path of a page."""
        name = digest.hex()
        return self.top / name[:2] / name[2] / name

    def find(self, digest: bytes) -> PageFile | None:
        """Return a page's file, or None if its path is not a regular file."""
        status = self.path_of(digest).lstat()
        if not stat.S_ISREG(status.st_mode):
            return None
        return PageFile(digest, status.st_size, status.st_mtime)

    def read(self, digest: bytes, into: memoryview) -> float:
        """Read a page into `into`, which has the page's size; return the time of its last use.

        Raises:
            EntryCorrupted: The file does not contain that page, or cannot be read.
        """
        try:
            # Larger reads bypass the buffer.
            path = self.path_of(digest)
            with open(path, "rb", buffering=HEADER_BYTES, opener=_open_page) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size != HEADER_BYTES + len(into):
                    raise EntryCorrupted(f"not a regular file of {HEADER_BYTES + len(into)} bytes")
                _read_page(cast("BufferedReader", file), digest, into)
        except OSError as error:
            if error.errno in _NOT_OURS:
                raise EntryCorrupted(error.strerror) from error
            if error.errno == errno.ESTALE and error.filename is None:
                # The file was open; another NFS client has removed it since.
                raise FileNotFoundError(errno.ENOENT, error.strerror) from error
            raise
        return status.st_mtime

    def write(self, digest: bytes, page: memoryview) -> None:
        """Write a page, replacing any file with its name. On an error no temporary file is left."""
        header = page_header(digest, len(page), Checksum(page).digest())
        path = self.path_of(digest)
        self.make_top()
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        temporary = _write_temporary(path.parent, header, page)
        try:
            temporary.rename(path)
        except OSError:
            _unlink(temporary)
            raise

    def touch(self, digest: bytes, now_s: float) -> None:
        """Set a page's mtime, which all nodes read as its last use."""
        os.utime(self.path_of(digest), (now_s, now_s), follow_symlinks=False)

    def remove(self, digest: bytes) -> None:
        """Remove a page's file; a symlink itself, not its target."""
        self.path_of(digest).unlink()

    def scan(self) -> Iterator[PageFile]:
        """Yield all pages, and remove temporary files of dead writers."""
        self.make_top()
        self.store = _identity(self.top)
        stale_s = time.time() - _STALE_S
        yield from _scan_folder(self.top, stale_s)
        for outer in _folders(self.top, 2):
            for inner in _folders(outer, 1):
                yield from _scan_folder(inner, stale_s)

    def largest_limit(self, own_bytes: int) -> int:
        """Record this node's limit; return the largest limit that any node recorded in the last `LIMIT_S` seconds."""
        self.make_top()
        own = self.top / f"limit-{own_bytes}"
        own.touch(mode=0o600)
        now_s, largest = own.stat().st_mtime, own_bytes  # the file server's clock
        for path in self.top.glob("limit-*"):
            with suppress(FileNotFoundError, ValueError):
                limit_bytes = int(path.name.partition("-")[2])
                if now_s - path.stat().st_mtime <= LIMIT_S:
                    largest = max(largest, limit_bytes)
                else:
                    path.unlink()
        return largest

    def make_top(self) -> None:
        """Create the top folder, unless the mount is gone: pages would then fill the disk under the mount point."""
        if not self.top.is_dir():
            if self._path.stat().st_dev != self._device:
                raise FileNotFoundError(errno.ENOENT, "the file system is no longer mounted")
            self.top.mkdir(mode=0o700, exist_ok=True)


def _identity(top: Path) -> str:
    """Return the store's identity; create one if there is none. The first node to create it wins."""
    path = top / "store-id"
    if not path.exists():
        temporary = _write_temporary(top, secrets.token_hex(16).encode())
        try:
            with suppress(FileExistsError):
                path.hardlink_to(temporary)
        except OSError:  # a file system without hard links: the last node to create it wins
            temporary.rename(path)
        finally:
            _unlink(temporary)
    text = path.read_text(encoding="ascii", errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{32}", text):
        raise OSError(errno.EIO, f"{path.name} is damaged; remove that file")
    return text


def _scan_folder(folder: Path, stale_s: float) -> Iterator[PageFile]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if _PAGE_NAME.fullmatch(entry.name):
                    yield PageFile(bytes.fromhex(entry.name), status.st_size, status.st_mtime)
                elif entry.name.startswith(".") and status.st_mtime < stale_s:
                    _unlink(Path(entry.path))


def _folders(directory: Path, num_digits: int) -> list[Path]:
    pattern = re.compile(f"[0-9a-f]{{{num_digits}}}")
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        ours = [e for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        return sorted(Path(entry.path) for entry in ours)
    return []


def _open_page(path: str, _flags: int) -> int:
    return os.open(path, _READ_FLAGS)


def _read_page(file: BufferedReader, digest: bytes, into: memoryview) -> None:
    header, checksum = file.read(HEADER_BYTES), Checksum()
    for first in range(0, len(into), _PIECE_BYTES):
        piece = into[first : first + _PIECE_BYTES]
        file.readinto(piece)
        checksum.update(piece)
    if header != page_header(digest, len(into), checksum.digest()):
        raise EntryCorrupted("the checksum does not match")


def _write_temporary(directory: Path, *parts: bytes | memoryview) -> Path:
    """Write a temporary file with mode 0600; return its path. On an error it is removed."""
    path = directory / f".{secrets.token_hex(16)}"
    descriptor = os.open(path, _WRITE_FLAGS, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:  # NFS reports a full disk when the file is closed
            file.writelines(parts)
    except OSError:
        _unlink(path)
        raise
    return path


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
