"""A directory of pages, of this node or shared: its files, and whose store it is.

```
 PATH/tandem-kv-1/store-id                 the store's identity: random, made by the first node
                 /3f/a/3fa9…               a page, by its key in hex; 4,096 folders, so that 10 million pages are
                                           2,500 a folder
                 /3f/a/.…                  a file that is being written
     /tandem-kv-1-rank-0-of-2/…            the same, where each rank of a node keeps its part of a page
```

Ranks that shared a directory and its limit would each make room for what all of them write. Pages are written under
another name and renamed, so no half of one is ever seen. Nothing is synced: what a power cut leaves does not pass for
a page.
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

# Not blocking: the other end of a pipe by this name might never be opened.
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# Of a link, a file that we may not read, a socket, a directory, a bad sector.
_NOT_OURS = {errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EISDIR, errno.EIO}
# Read, then hashed while a core's cache has it: hashing costs a third of the speed otherwise, and so a seventh.
# Smaller ones cost more calls than they save (2 MiB pages, 1 MiB of L2 cache).
_PIECE_BYTES = 512 << 10
_PAGE_NAME = re.compile(r"[0-9a-f]{64}")
_STALE_S = 3600.0  # no write of one page takes that long


class EntryCorrupted(Exception):
    """A file is not the page that its name promises."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it was found.

    Attributes:
        used_s: When any node last used it: its time of change.
    """

    digest: bytes
    size_bytes: int
    used_s: float


class PageDirectory:
    """The directory behind a path. Any thread may call it.

    Methods raise FileNotFoundError where there is no such page, and OSError where the file system fails.

    Args:
        path: Is made where it is missing.
        shard: Of which rank; see `PageSpace`.

    Attributes:
        top: The folder that pages are below.
        store: The identity of the store, the same for all that have it; read anew by `scan`.
    """

    def __init__(self, path: Path, shard: str = "0/1") -> None:
        rank, _, num_ranks = shard.partition("/")
        suffix = "" if num_ranks == "1" else f"-rank-{rank}-of-{num_ranks}"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self.top = path, path / f"tandem-kv-{VERSION}{suffix}"
        self._device = path.stat().st_dev
        self.make_top()
        self.store = _identity(self.top)
        _unlink(_write_temporary(self.top))

    def path_of(self, digest: bytes) -> Path:
        """Return where a page lies."""
        name = digest.hex()
        return self.top / name[:2] / name[2] / name

    def find(self, digest: bytes) -> PageFile | None:
        """Return a page's file; None where a folder or a link is in its place."""
        status = self.path_of(digest).lstat()
        if not stat.S_ISREG(status.st_mode):
            return None
        return PageFile(digest, status.st_size, status.st_mtime)

    def read(self, digest: bytes, into: memoryview) -> float:
        """Read a page straight into memory as long as the page; return when it was last used.

        Raises:
            EntryCorrupted: The file is not that page, or cannot be read.
        """
        try:
            # Larger reads bypass the buffer.
            path = self.path_of(digest)
            with open(path, "rb", buffering=HEADER_BYTES, opener=_open_page) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size != HEADER_BYTES + len(into):
                    raise EntryCorrupted(f"no regular file of {HEADER_BYTES + len(into)} bytes")
                _read_page(cast("BufferedReader", file), digest, into)
        except OSError as error:
            if error.errno in _NOT_OURS:
                raise EntryCorrupted(error.strerror) from error
            if error.errno == errno.ESTALE and error.filename is None:
                # It was open: another node of an NFS has removed it since.
                raise FileNotFoundError(errno.ENOENT, error.strerror) from error
            raise
        return status.st_mtime

    def write(self, digest: bytes, page: memoryview) -> None:
        """Write a page in place of what is there; when this raises, nothing is left of it."""
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
        """Note for all nodes that a page was used."""
        os.utime(self.path_of(digest), (now_s, now_s), follow_symlinks=False)

    def remove(self, digest: bytes) -> None:
        """Remove a file or link, not what it leads to."""
        self.path_of(digest).unlink()

    def scan(self) -> Iterator[PageFile]:
        """Yield all pages, and remove what writers that died left behind."""
        self.make_top()
        self.store = _identity(self.top)
        stale_s = time.time() - _STALE_S
        yield from _scan_folder(self.top, stale_s)
        for outer in _folders(self.top, 2):
            for inner in _folders(outer, 1):
                yield from _scan_folder(inner, stale_s)

    def make_top(self) -> None:
        """Make the folder that pages are below, unless what was mounted is gone: pages would fill the disk below."""
        if not self.top.is_dir():
            if self._path.stat().st_dev != self._device:
                raise FileNotFoundError(errno.ENOENT, "what was mounted here is not any more")
            self.top.mkdir(mode=0o700, exist_ok=True)


def _identity(top: Path) -> str:
    """Return the id of the store, making one if there is none; the first that makes one wins."""
    path = top / "store-id"
    if not path.exists():
        temporary = _write_temporary(top, secrets.token_hex(16).encode())
        try:
            with suppress(FileExistsError):
                path.hardlink_to(temporary)
        except OSError:  # a file system without links: the last that makes one wins
            temporary.rename(path)
        finally:
            _unlink(temporary)
    text = path.read_text(encoding="ascii", errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{32}", text):
        raise OSError(errno.EIO, f"its {path.name} is damaged; remove that file")
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
        raise EntryCorrupted("its bytes are not what was written under this name")


def _write_temporary(directory: Path, *parts: bytes | memoryview) -> Path:
    """Write a file that only its user can read; return its path. When this raises, nothing is left of it."""
    path = directory / f".{secrets.token_hex(16)}"
    descriptor = os.open(path, _WRITE_FLAGS, 0o600)
    try:
        with os.fdopen(
            descriptor, "wb"
        ) as file:  # its end is where NFS reports that the disk is full
            file.writelines(parts)
    except OSError:
        _unlink(path)
        raise
    return path


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
