"""A directory of pages, of this node or shared: where files are, whose store it is, and whether it is still that.

```
 PATH/tandem-kv-1/store-id                 who it is: random, made by the first node that comes
                 /3f/a/3fa9…               a page, by its key in hex; 4,096 folders, so that 10 million pages are
                                           2,500 a folder
                 /3f/a/.…                  one that is being written
     /tandem-kv-1-rank-0-of-2/…            the same, where each rank of a node keeps its part of a page
```

A rank has a directory, and with it a limit, of its own: ranks that evicted from one would each make room for what
all of them write, and choose the same files for it.
All below PATH is opened step by step, and no link there is followed.
"""

import errno
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.kvtier.disk_entry import FORMAT_VERSION, TEMPORARY, remove, write_temporary
from tandem.kvtier.tier import TierFailed
from tandem.wire.errors import ConfigInvalid

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_STORE_ID = "store-id"
_PAGE_NAME = re.compile(r"[0-9a-f]{64}")
_STALE_S = 3600.0  # no write of one page takes that long


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A file that a scan met."""

    digest: bytes
    size_bytes: int
    used_s: float


class PageDirectory:
    """The directory behind a path. Any thread may call it.

    Args:
        path: Is made where it is missing.
        shard: Of which rank; see `PageSpace`.

    Attributes:
        store: Who it is: the same for all that have it.
        generation: Grows when another directory is found behind the path.

    Raises:
        ConfigInvalid: It cannot be made, read or written.
    """

    def __init__(self, path: Path, shard: str = "0/1") -> None:
        self.store, self.generation = "", 0
        rank, _, num_ranks = shard.partition("/")
        suffix = "" if num_ranks == "1" else f"-rank-{rank}-of-{num_ranks}"
        self._path, self._top = path, path / f"tandem-kv-{FORMAT_VERSION}{suffix}"
        # The directory as it was last looked at: device, number, which may be used again, time of change.
        self._seen: tuple[int, int, int] | None = None
        self._device: int | None = None
        self._lock = threading.Lock()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.opened() as top:
                mode = os.fstat(top).st_mode
                remove(top, write_temporary(top, []))
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
        try:
            top = self._open_top()
        except OSError as error:
            raise TierFailed(f"{self._top}: {_reason(error)}") from error
        try:
            self._recognise(top)
            yield top
        except OSError as error:
            raise TierFailed(f"{self._top}: {_reason(error)}") from error
        finally:
            os.close(top)

    @contextmanager
    def folder(self, top: int, name: str, *, make: bool = False) -> Iterator[int]:
        """Give the descriptor of the folder of a page.

        Raises:
            FileNotFoundError: There is none, and none is to be made.
            OSError: It cannot be entered.
        """
        with (
            _entered(top, name[:2], make=make) as outer,
            _entered(outer, name[2], make=make) as inner,
        ):
            yield inner

    def scan(self) -> Iterator[FoundPage]:
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
        # It was removed, or what was mounted here is not; then pages would fill the disk below.
        device = self._path.stat().st_dev
        if self._device not in {None, device}:
            raise FileNotFoundError(errno.ENOENT, "what was mounted here is not any more")
        with suppress(FileExistsError):
            self._top.mkdir(mode=0o700)
        self._seen = None
        return os.open(self._top, _FOLDER_FLAGS)

    def _recognise(self, top: int) -> None:
        """Find out whose store it is, when it is not the directory of the last time."""
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
        remove(directory, name)
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
    name = write_temporary(top, [memoryview(secrets.token_hex(16).encode())])
    try:
        with suppress(FileExistsError):
            os.link(name, _STORE_ID, src_dir_fd=top, dst_dir_fd=top)
    except OSError:  # a file system without links: the last that makes one wins
        os.rename(name, _STORE_ID, src_dir_fd=top, dst_dir_fd=top)
    finally:
        remove(top, name)
    return _read_id(top)


def _read_id(top: int) -> str:
    file = os.open(_STORE_ID, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    with open(file, encoding="ascii", errors="replace") as lines:
        text = lines.read(64).strip()
    if not re.fullmatch("[0-9a-f]{32}", text):
        raise OSError(errno.EIO, f"its {_STORE_ID} is damaged; remove that file")
    return text


def _scan_folder(folder: int, stale_s: float) -> Iterator[FoundPage]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if _PAGE_NAME.fullmatch(entry.name):
                    yield FoundPage(bytes.fromhex(entry.name), status.st_size, status.st_mtime)
                elif entry.name.startswith(TEMPORARY) and status.st_mtime < stale_s:
                    remove(folder, entry.name)


def _folders(directory: int, num_digits: int) -> list[str]:
    pattern = re.compile(f"[0-9a-f]{{{num_digits}}}")
    return sorted(name for name in os.listdir(directory) if pattern.fullmatch(name))


def _reason(error: OSError | TierFailed) -> str:
    return error.message if isinstance(error, TierFailed) else error.strerror or str(error)
