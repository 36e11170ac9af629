"""A directory of pages, of this node or shared: its files, whose store it is, and whether it is still that one.

```
 PATH/tandem-kv-1/store-id                 the store's identity: random, made by the first node
                 /3f/a/3fa9…               a page, by its key in hex; 4,096 folders, so that 10 million pages are
                                           2,500 a folder
                 /3f/a/.…                  a file that is being written
     /tandem-kv-1-rank-0-of-2/…            the same, where each rank of a node keeps its part of a page
```

A rank has a directory of its own, and with it a limit: ranks that shared one would each make room for what all of
them write, and choose the same files for it. Everything below PATH is opened step by step; no link is followed.
Pages are written under another name and renamed, so no half of one is ever seen. Nothing is synced: what a power
cut leaves of a file does not pass for a page.
"""

import errno
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.kvtier.entry import FILE_HEADER_BYTES, FILE_VERSION, FileChecksum, file_header
from tandem.kvtier.tier import TierFailed
from tandem.wire.errors import ConfigInvalid

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | _SAFE
# Not blocking: the other end of a pipe by this name might never be opened.
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | _SAFE
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
# Errors of opening a link, a file that we may not read, a socket.
_NOT_OURS = {errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO}
# Read, then hashed while a core's cache has it: hashing costs a third of the speed otherwise, and so a seventh.
# Smaller ones cost more calls than they save (2 MiB pages, 1 MiB of L2 cache).
_PIECE_BYTES = 512 << 10
_TEMPORARY = "."
_STORE_ID = "store-id"
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

    Methods that take `top`, from `opened`, raise FileNotFoundError where there is no such page and OSError where
    the file system does not answer as it should.

    Args:
        path: Is made where it is missing.
        shard: Of which rank; see `PageSpace`.

    Attributes:
        store: The identity of the store, the same for all that have it.
        generation: Grows when another directory is found behind the path.

    Raises:
        ConfigInvalid: It cannot be made, read or written.
    """

    def __init__(self, path: Path, shard: str = "0/1") -> None:
        self.store, self.generation = "", 0
        rank, _, num_ranks = shard.partition("/")
        suffix = "" if num_ranks == "1" else f"-rank-{rank}-of-{num_ranks}"
        self._path, self._top = path, path / f"tandem-kv-{FILE_VERSION}{suffix}"
        # The directory as it was last seen: device, inode, which may be used again, time of change.
        self._seen: tuple[int, int, int] | None = None
        self._device: int | None = None
        self._lock = threading.Lock()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.opened() as top:
                mode = os.fstat(top).st_mode
                _unlink(top, _write_temporary(top, []))
        except (OSError, TierFailed) as error:
            raise ConfigInvalid(
                f"--kv-tier disk:{path}: {_reason(error)}; make it a directory that the user of this node "
                "may read, write and enter, or name another"
            ) from error
        if mode & stat.S_IWOTH:
            raise ConfigInvalid(
                f"--kv-tier disk:{path}: everybody may write to {self._top}, and so put pages there that are "
                f"no model's; chmod 700 {self._top}"
            )

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Give the descriptor of the directory that pages are below.

        Raises:
            TierFailed: It is away: not mounted, or not to be entered.
        """
        top: int | None = None
        try:
            top = self._open_top()
            self._recognise(top)
            yield top
        except OSError as error:
            raise TierFailed(f"{self._top}: {_reason(error)}") from error
        finally:
            if top is not None:
                os.close(top)

    def find(self, top: int, digest: bytes) -> PageFile | None:
        """Return a page's file; None where a folder or a link is in its place.

        Raises:
            FileNotFoundError: There is none.
        """
        with _folder(top, digest) as (folder, name):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            return None
        return PageFile(digest, status.st_size, status.st_mtime)

    def read(self, top: int, digest: bytes, into: memoryview) -> float:
        """Read a page straight into memory; return when it was last used.

        Args:
            into: As long as the page.

        Raises:
            EntryCorrupted: The file is not that page, or cannot be read.
        """
        with _folder(top, digest) as (folder, name):
            return _read_page(folder, name, digest, into)

    def write(self, top: int, digest: bytes, page: memoryview) -> None:
        """Write a page in place of what is there; when this raises, nothing is left of it."""
        header = file_header(digest, len(page), FileChecksum(page).digest())
        with _folder(top, digest, make=True) as (folder, name):
            temporary = _write_temporary(folder, [memoryview(header), page])
            try:
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                _unlink(folder, temporary)
                raise

    def touch(self, top: int, digest: bytes, now_s: float) -> None:
        """Note for all nodes that a page was used."""
        with _folder(top, digest) as (folder, name):
            os.utime(name, (now_s, now_s), dir_fd=folder, follow_symlinks=False)

    def remove(self, top: int, digest: bytes) -> None:
        """Remove a file or link, not what it leads to."""
        with _folder(top, digest) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def scan(self) -> Iterator[PageFile]:
        """Yield all pages, and remove what writers that died left behind.

        Raises:
            TierFailed: The directory is away.
        """
        stale_s = time.time() - _STALE_S
        with self.opened() as top:
            yield from _scan_folder(top, stale_s)
            for outer in _folders(top, 2):
                with suppress(FileNotFoundError), _entered(top, outer) as directory:
                    for inner in _folders(directory, 1):
                        with suppress(FileNotFoundError), _entered(directory, inner) as folder:
                            yield from _scan_folder(folder, stale_s)

    def _open_top(self) -> int:
        with suppress(FileNotFoundError):
            return os.open(self._top, _FOLDER_FLAGS)
        # It was removed, or its mount is gone; then pages would fill the disk below.
        device = self._path.stat().st_dev
        if self._device not in {None, device}:
            raise FileNotFoundError(errno.ENOENT, "what was mounted here is not any more")
        with suppress(FileExistsError):
            self._top.mkdir(mode=0o700)
        self._seen = None
        return os.open(self._top, _FOLDER_FLAGS)

    def _recognise(self, top: int) -> None:
        """Find out which store it is, when it is not the directory of the last time."""
        status = os.fstat(top)
        seen = (status.st_dev, status.st_ino, status.st_ctime_ns)
        if seen == self._seen:
            return
        with self._lock:
            store = _identify(top)
            if store != self.store:
                self.generation += 1
            self.store, self._seen, self._device = store, seen, status.st_dev


def find_directory(limit_s: float, path: Path, shard: str) -> PageDirectory:
    """Return the directory behind a path; a thread finds it, since a call of a mount that hangs never ends.

    Raises:
        ConfigInvalid: It cannot be used, or nothing answers there in time.
    """
    found: Future[PageDirectory] = Future()

    def find() -> None:
        try:
            found.set_result(PageDirectory(path, shard))
        except ConfigInvalid as error:
            found.set_exception(error)

    threading.Thread(target=find, name="kv-disk-start", daemon=True).start()
    try:
        return found.result(limit_s)
    except TimeoutError:
        raise ConfigInvalid(
            f"--kv-tier disk:{path}: nothing answers there within {limit_s:g} s; look at the mount, or name "
            "another directory"
        ) from None


@contextmanager
def _folder(top: int, digest: bytes, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Give the descriptor of the folder of a page, and the page's name in it."""
    name = digest.hex()
    with (
        _entered(top, name[:2], make=make) as outer,
        _entered(outer, name[2], make=make) as inner,
    ):
        yield inner, name


@contextmanager
def _entered(directory: int, name: str, *, make: bool = False) -> Iterator[int]:
    inner = _enter(directory, name, make=make)
    try:
        yield inner
    finally:
        os.close(inner)


def _enter(directory: int, name: str, *, make: bool) -> int:
    try:
        return os.open(name, _FOLDER_FLAGS, dir_fd=directory)
    except NotADirectoryError:  # a link, or a file: not ours, and in our place
        _unlink(directory, name)
        if not make:
            raise FileNotFoundError(errno.ENOENT, "no directory", name) from None
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=directory)
    return os.open(name, _FOLDER_FLAGS, dir_fd=directory)


def _identify(top: int) -> str:
    """Return the id of the store, making one if there is none; the first that makes one wins."""
    with suppress(FileNotFoundError):
        return _read_id(top)
    name = _write_temporary(top, [memoryview(secrets.token_hex(16).encode())])
    try:
        with suppress(FileExistsError):
            os.link(name, _STORE_ID, src_dir_fd=top, dst_dir_fd=top)
    except OSError:  # a file system without links: the last that makes one wins
        os.rename(name, _STORE_ID, src_dir_fd=top, dst_dir_fd=top)
    finally:
        _unlink(top, name)
    return _read_id(top)


def _read_id(top: int) -> str:
    file = os.open(_STORE_ID, os.O_RDONLY | _SAFE, dir_fd=top)
    with open(file, encoding="ascii", errors="replace") as lines:
        text = lines.read(64).strip()
    if not re.fullmatch("[0-9a-f]{32}", text):
        raise OSError(errno.EIO, f"its {_STORE_ID} is damaged; remove that file")
    return text


def _scan_folder(folder: int, stale_s: float) -> Iterator[PageFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if _PAGE_NAME.fullmatch(entry.name):
                    yield PageFile(bytes.fromhex(entry.name), status.st_size, status.st_mtime)
                elif entry.name.startswith(_TEMPORARY) and status.st_mtime < stale_s:
                    _unlink(folder, entry.name)


def _folders(directory: int, num_digits: int) -> list[str]:
    pattern = re.compile(f"[0-9a-f]{{{num_digits}}}")
    return sorted(name for name in os.listdir(directory) if pattern.fullmatch(name))


def _read_page(folder: int, name: str, digest: bytes, into: memoryview) -> float:
    try:
        file = os.open(name, _READ_FLAGS, dir_fd=folder)
    except OSError as error:
        if error.errno in _NOT_OURS:
            raise EntryCorrupted(error.strerror) from error
        raise
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != FILE_HEADER_BYTES + len(into):
            raise EntryCorrupted(f"no regular file of {FILE_HEADER_BYTES + len(into)} bytes")
        _read_all(file, digest, into)
    except OSError as error:
        if error.errno == errno.EIO:  # a bad sector
            raise EntryCorrupted(error.strerror) from error
        if error.errno == errno.ESTALE:  # another node of an NFS removed it since it was opened
            raise FileNotFoundError(errno.ENOENT, error.strerror) from error
        raise
    finally:
        os.close(file)
    return status.st_mtime


def _read_all(file: int, digest: bytes, into: memoryview) -> None:
    header, checksum = bytearray(FILE_HEADER_BYTES), FileChecksum()
    _read_exactly(file, [memoryview(header), into[:_PIECE_BYTES]], 0)
    checksum.update(into[:_PIECE_BYTES])
    for first in range(_PIECE_BYTES, len(into), _PIECE_BYTES):
        piece = into[first : first + _PIECE_BYTES]
        _read_exactly(file, [piece], FILE_HEADER_BYTES + first)
        checksum.update(piece)
    if header != file_header(digest, len(into), checksum.digest()):
        raise EntryCorrupted("its bytes are not what was written under this name")


def _read_exactly(file: int, parts: list[memoryview], offset: int) -> None:
    while parts:
        count = os.preadv(file, parts, offset)
        if not count:
            raise EntryCorrupted(f"ends after {offset} bytes")
        offset += count
        parts = _rest(parts, count)


def _write_temporary(directory: int, parts: Sequence[memoryview]) -> str:
    """Write a file that only its user can read; return its name. When this raises, nothing is left of it."""
    name = _TEMPORARY + secrets.token_hex(16)
    file = os.open(name, _WRITE_FLAGS, 0o600, dir_fd=directory)
    try:
        try:
            left = list(parts)
            while left:
                left = _rest(left, os.writev(file, left))
        finally:
            os.close(file)  # where NFS reports that the disk is full
    except OSError:
        _unlink(directory, name)
        raise
    return name


def _rest(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of some memory behind its first bytes."""
    rest = []
    for part in parts:
        if len(part) > count:
            rest.append(part[count:])
        count = max(0, count - len(part))
    return rest


def _unlink(directory: int, name: str) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=directory)


def _reason(error: OSError | TierFailed) -> str:
    return error.message if isinstance(error, TierFailed) else error.strerror or str(error)
