"""Pages as files in a local or shared directory (NFS, Ceph, any POSIX file system).

```
 put ──▶ evict down to the limit ──▶ write a temporary file ──▶ rename     disk full: pause writing
 get ──▶ read into host memory ──▶ verify ──▶ lend                         corrupted: count, remove, report a miss
```

A node tracks the directory's content through its own puts and gets and through periodic scans (`DiskIndex`). Other
nodes may add and remove files at any time: a file may be removed right after a read, and a missing file is a miss. A
file's mtime is the time of its last use by any node, and determines the order of eviction.
"""

import errno
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import random

from tandem.kvtier.disk_files import EntryCorrupted, PageDirectory, PageFile
from tandem.kvtier.entry import HEADER_BYTES, KnownPages
from tandem.kvtier.guard import Workers
from tandem.kvtier.memory import Loan, PageMemory
from tandem.kvtier.spec import TierSpec
from tandem.kvtier.tier import NEVER_S, PoolPages, TierFailed
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.messages import TierLoad
from tandem.wire.prefixes import PageKey, PageSpace

log = get_logger("kvtier.disk")

# A file's mtime is refreshed at most this often, because each refresh is a write.
TOUCH_S = 60.0
# Pause of writing after the disk was full.
FULL_S = 60.0
# Interval of scans, each of which stats every file. Between scans, other nodes' new files are unknown.
SCAN_S = 600.0
# Time limit for a mount to respond at the start.
START_S = 10.0
CLOSE_S = 1.0
# Fraction of the files to evict at a time, when the disk is full before the limit is reached.
_FULL_SHARE = 0.02
_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT}


def open_tier(spec: TierSpec, pages: PoolPages, space: PageSpace) -> "DiskTier":
    """Return the tier of a `--kv-tier disk:PATH:SIZE`."""
    return DiskTier(Path(spec.path), spec.limit_bytes, pages, space, name=spec.name)


class DiskTier:
    """A tier in a directory. Any thread may call it; any number of nodes and processes may share the directory.

    Args:
        path: Directory; created if it is missing.
        limit_bytes: Limit for all files in the directory, whichever node wrote them. If nodes have different limits,
            the largest applies, because a node with a small limit would evict the pages of all others.
        clock: Returns seconds since the Unix epoch, like mtimes.

    Raises:
        ConfigInvalid: The directory cannot be used, or the limit is smaller than a page.
    """

    lends_own_memory = False

    def __init__(
        self,
        path: Path,
        limit_bytes: int,
        pages: PoolPages,
        space: PageSpace,
        *,
        name: str = "disk",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._known = KnownPages()
        self.journal = self._known.journal
        self._file_bytes = HEADER_BYTES + pages.page_bytes
        self._own_limit_bytes = self._limit_bytes = limit_bytes
        if limit_bytes < self._file_bytes:
            raise ConfigInvalid(
                f"--kv-tier disk:{path}:{limit_bytes}: a KV page takes {self._file_bytes} bytes; "
                "use a larger size"
            )
        self._directory = _open_directory(path)
        # Other ranks, and nodes with other models, may share the directory; their keys differ.
        self._space_name = space.name
        self._memory = PageMemory(pages.host_memory, pages.page_bytes)
        self._clock = clock
        self._index = DiskIndex(self._known)
        self._scan_lock = threading.Lock()
        self._full_until_s = 0.0
        self._stopping = threading.Event()
        self._scanner = threading.Thread(target=self._run, name=f"kv-{name}-scan", daemon=True)
        self._scanner.start()

    def get(self, keys: Sequence[PageKey], deadline_s: float = NEVER_S) -> Loan:
        """Read the leading pages that are stored here into host memory."""
        pieces: list[memoryview] = []
        used: list[tuple[PageKey, float]] = []
        try:
            with self._answering():
                for key in keys:
                    if time.monotonic() >= deadline_s:
                        break
                    pieces.append(self._memory.take())
                    if (used_s := self._read(key, pieces[-1])) is None:
                        self._memory.release([pieces.pop()])
                        break
                    used.append((key, used_s))
                # Last page first, so that parents outlive their children.
                for key, used_s in reversed(used):
                    self._touch(key, used_s)
        except BaseException:
            self._memory.release(pieces)
            raise
        return self._memory.lend(pieces, pieces)

    def put(self, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> int:
        """Write the pages that are missing.

        While the disk is full nothing is written. This is not a failure: existing pages can still be read.
        """
        num_new = 0
        with self._answering():
            # Last page first: parents get the newer mtime and outlive their children.
            for key, page in reversed(list(zip(keys, pages, strict=True))):
                if self._is_full:
                    break
                if (file := self._find(key)) is not None:
                    self._touch(key, file.used_s)
                else:
                    num_new += self._write(key, page)
        return num_new

    def load(self) -> TierLoad:
        """Return the tier's gauges, as far as this node knows the directory."""
        index = self._index
        return TierLoad(
            name=self.name,
            store=f"{self._directory.store}-{self._space_name}",
            state="full" if self._is_full else "up",
            num_pages=len(index),
            num_bytes=index.num_bytes,
            limit_bytes=self._limit_bytes,
            num_evicted=index.num_evicted,
            num_corrupted=index.num_corrupted,
        )

    def close(self) -> None:
        """Stop scanning. The files stay."""
        self._stopping.set()
        self._scanner.join(CLOSE_S)

    def scan(self) -> None:
        """Read the directory's list of files, and evict down to the limit."""
        begin_s = self._clock()
        with self._scan_lock, self._answering():
            self._index.begin_scan()
            self._limit_bytes = self._directory.largest_limit(self._own_limit_bytes)
            for found in self._directory.scan():
                if self._stopping.is_set():
                    return
                self._index.record(found)
            self._index.end_scan()
            num_pages, num_bytes = len(self._index), self._index.num_bytes
            # A file that is missing by now was evicted by another node's scan, for the same excess.
            self._evict(num_bytes - self._limit_bytes, is_shared=True)
        duration_s = round(self._clock() - begin_s, 3)
        log.info("kv_tier.scanned", num_pages=num_pages, num_bytes=num_bytes, duration_s=duration_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.scan()
            except TierFailed as error:
                log.warning("kv_tier.scan_failed", tier=self.name, reason=error.message)
            # Jitter, so that nodes that share a directory do not scan it together.
            self._stopping.wait(SCAN_S * (0.8 + 0.4 * random()))

    @property
    def _is_full(self) -> bool:
        # If the clock is set back, the pause must not get longer.
        return 0 < self._full_until_s - self._clock() <= FULL_S

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TierFailed(f"{self._directory.top}: {error.strerror or error}") from error

    def _find(self, key: PageKey) -> PageFile | None:
        """Return a page's file, or None if it is missing or has the wrong size."""
        try:
            file = self._directory.find(key.digest)
        except FileNotFoundError:
            self._index.forget(key.digest)
            return None
        return file if file is not None and file.size_bytes == self._file_bytes else None

    def _read(self, key: PageKey, into: memoryview) -> float | None:
        """Read a page; return when it was last used, or None if it is missing or corrupted."""
        try:
            return self._directory.read(key.digest, into)
        except FileNotFoundError:
            self._directory.make_top()  # the page may be missing, or the whole directory
        except EntryCorrupted as error:
            with suppress(OSError):
                self._directory.remove(key.digest)
            self._index.count(corrupted=1)
            name = key.digest.hex()
            log.warning("kv_tier.corrupted", tier=self.name, name=name, reason=str(error))
        self._index.forget(key.digest)
        return None

    def _touch(self, key: PageKey, used_s: float) -> None:
        """Refresh a page's mtime for all nodes, unless it is recent."""
        now_s = self._clock()
        if now_s - used_s >= TOUCH_S:
            try:
                self._directory.touch(key.digest, now_s)
            except FileNotFoundError:
                self._index.forget(key.digest)
                return
            except OSError:
                pass  # the file is read-only for this user: its mtime stays
            used_s = now_s
        self._record(key, used_s)

    def _record(self, key: PageKey, used_s: float) -> None:
        self._index.record(PageFile(key.digest, self._file_bytes, used_s))
        self._known.record([key])

    def _write(self, key: PageKey, page: memoryview) -> bool:
        """Write a page; return False if the disk is full even after an eviction."""
        num_bytes = self._index.num_bytes
        excess_bytes = num_bytes + self._file_bytes - self._limit_bytes
        for is_full in (False, True):
            if not self._evict(excess_bytes) and not is_full:
                break
            try:
                self._directory.write(key.digest, page)
            except OSError as error:
                if error.errno not in _FULL_ERRORS:
                    raise
                excess_bytes = max(4 * self._file_bytes, int(num_bytes * _FULL_SHARE))
            else:
                self._record(key, self._clock())
                return True
        self._full_until_s = self._clock() + FULL_S
        log.warning("kv_tier.full", tier=self.name, pause_s=FULL_S)
        return False

    def _evict(self, num_bytes: int, *, is_shared: bool = False) -> bool:
        """Remove the least recently used files; return whether that many bytes were freed.

        If a file cannot be removed, the `OSError` is raised and the file stays in the index.

        Args:
            is_shared: Other nodes free the same bytes: files that they removed count as freed. Otherwise other nodes
                presumably wrote files of about the same size in place of those that they removed.
        """
        for _ in range(2 * len(self._index)):
            if num_bytes <= 0:
                break
            if (known := self._index.take_oldest()) is not None:
                num_bytes -= self._evict_one(known, is_shared=is_shared)
        return num_bytes <= 0

    def _evict_one(self, known: PageFile, *, is_shared: bool) -> int:
        """Remove a file. Return the bytes freed: 0 if a different node has used the file since."""
        try:
            file = self._directory.find(known.digest)
            if file is not None and file.used_s > known.used_s:
                self._index.record(file)
                return 0
            self._directory.remove(known.digest)
        except FileNotFoundError:
            self._index.forget(known.digest, is_replaced=not is_shared)
            return known.size_bytes if is_shared else 0
        self._index.count(evicted=1)
        self._index.forget(known.digest)
        return known.size_bytes


class DiskIndex:
    """The files that this node knows of in the directory. Thread-safe.

    ```
     scanned, put, read ──▶ KNOWN ──evicted, missing, absent from a complete scan──▶ forgotten
    ```

    Attributes:
        num_bytes: Total size of all known files, and of files assumed to have replaced known ones since the last scan.
    """

    def __init__(self, known: KnownPages) -> None:
        self.num_bytes = self.num_evicted = self.num_corrupted = 0
        self._known, self._lock = known, threading.RLock()
        # Least recently used first, as of the last scan and this node's own uses since.
        self._files: OrderedDict[bytes, PageFile] = OrderedDict()
        self._unseen: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._files)

    def begin_scan(self) -> None:
        """Start a scan. Files that are not recorded before `end_scan` no longer exist."""
        with self._lock:
            self._unseen = set(self._files)

    def end_scan(self) -> None:
        """Forget the files that the scan did not find: other nodes removed them."""
        with self._lock:
            for digest in self._unseen:
                self.forget(digest)
            self._files = OrderedDict(sorted(self._files.items(), key=lambda item: item[1].used_s))
            self._sum()

    def record(self, file: PageFile) -> None:
        """Record that a file exists."""
        with self._lock:
            self._unseen.discard(file.digest)
            before = self._files.get(file.digest)
            if before is None or file.used_s > before.used_s:
                self.num_bytes += file.size_bytes - (before.size_bytes if before else 0)
                self._files[file.digest] = file
                self._files.move_to_end(file.digest)

    def forget(self, digest: bytes, *, is_replaced: bool = False) -> None:
        """Record that a file is gone.

        Args:
            is_replaced: A different node evicted it, presumably for a file of about this size: `num_bytes` stays.
        """
        with self._lock:
            if (file := self._files.pop(digest, None)) is not None and not is_replaced:
                self.num_bytes -= file.size_bytes
        self._known.forget(digest)

    def _sum(self) -> None:
        self.num_bytes = sum(file.size_bytes for file in self._files.values())

    def take_oldest(self) -> PageFile | None:
        """Return the least recently used file, and move it to the end of the order."""
        with self._lock:
            if not self._files:
                self._sum()
                return None
            digest, file = next(iter(self._files.items()))
            self._files.move_to_end(digest)
            return file

    def count(self, *, evicted: int = 0, corrupted: int = 0) -> None:
        """Count files that were removed."""
        with self._lock:
            self.num_evicted += evicted
            self.num_corrupted += corrupted


def _open_directory(path: Path) -> PageDirectory:
    """Open the directory on a thread, because a call to a hanging mount never returns."""

    def opened() -> PageDirectory | OSError:
        try:
            return PageDirectory(path)
        except OSError as error:
            return error

    opener = Workers("kv-disk-start", 1)
    try:
        found = opener.submit(opened).result(START_S)
    except TimeoutError:
        raise ConfigInvalid(
            f"--kv-tier disk:{path}: the file system does not respond within {START_S:g} s; check the mount, or use "
            "a different directory"
        ) from None
    finally:
        opener.stop()
    if isinstance(found, OSError):
        where = f"{found.filename}: " if found.filename else ""
        raise ConfigInvalid(
            f"--kv-tier disk:{path}: {where}{found.strerror or found}; use a directory that the "
            "node's user may read, write and enter"
        ) from found
    if found.top.stat().st_mode & stat.S_IWOTH:
        raise ConfigInvalid(
            f"--kv-tier disk:{path}: every user may write to {found.top} and could plant false pages; "
            f"run chmod 700 {found.top}"
        )
    return found
