"""Pages as files of a directory, of this node or shared by many (NFS, Ceph, any POSIX file system).

```
 put ──▶ evict down to the limit ──▶ write by another name ──▶ rename          full: stop writing for a while
 get ──▶ read into host memory ──▶ check ──▶ lend                              wrong: count, remove, a miss
```

What a node knows of the directory comes from its own puts and gets and from a scan now and then (`DiskIndex`).
Others may add and remove files at any time: deleting what another just read is harmless, and what is gone is a miss.
A file's time of change is when any node last used it; eviction goes by that.
"""

import errno
import heapq
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import random

from tandem.wire.prefixes import PageKey, PageSpace, PrefixJournal
from typing_extensions import override

from tandem.kvtier.disk_files import EntryCorrupted, PageFile, find_directory
from tandem.kvtier.entry import FILE_HEADER_BYTES
from tandem.kvtier.memory import MemoryLoan, PageMemory
from tandem.kvtier.spec import TierSpec
from tandem.kvtier.tier import PoolPages, TierFailed
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.messages import TierLoad

log = get_logger("kvtier.disk")

# A use is noted once in this time: a note is a write.
TOUCH_S = 60.0
# A full disk is tried again after this time.
FULL_S = 60.0
# A scan of a shared directory asks the server for every file; what others wrote is not known before.
SCAN_S = 600.0
# A mount that does not answer at the start within this time will not soon.
START_S = 10.0
CLOSE_S = 1.0
# Fraction of the files to evict at a time, when the disk is full before the limit is reached.
_FULL_SHARE = 0.02
_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT}


def open_tier(spec: TierSpec, pages: PoolPages, space: PageSpace) -> "DiskTier":
    """Return the tier of a `--kv-tier disk:PATH:SIZE`."""
    # The limit is the node's, of which each rank has its share.
    limit_bytes = spec.limit_bytes // space.num_shards
    return DiskTier(Path(spec.path), limit_bytes, pages, space, name=spec.name)


class DiskTier:
    """A tier in a directory. Any thread may call it, and any number of nodes and processes share it.

    Args:
        path: Is made where it is missing.
        limit_bytes: Of all files of all nodes, as far as this node knows of them; of ranks, those of this one.
        clock: Seconds since 1970, as file systems have them.

    Raises:
        ConfigInvalid: The directory cannot be used, or the limit has no room for a page.
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
        self.journal = PrefixJournal()
        self._file_bytes, self._limit_bytes = FILE_HEADER_BYTES + pages.page_bytes, limit_bytes
        if limit_bytes < self._file_bytes:
            raise ConfigInvalid(
                f"--kv-tier disk:{path}:{limit_bytes}: a page of KV takes {self._file_bytes} bytes; "
                "give it room for many"
            )
        self._directory = find_directory(START_S, path, space.shard)
        # Nodes with other models share the directory, and get nothing of each other's.
        self._space_name = space.name
        self._memory = PageMemory(pages.host_memory, pages.page_bytes)
        self._clock = clock
        self._index, self._lock = DiskIndex(self.journal), threading.Lock()
        self._generation = self._directory.generation
        self._num_evicted = self._num_corrupted = 0
        self._full_until_s = 0.0
        self._stopping = threading.Event()
        self._scanner = threading.Thread(target=self._run, name=f"kv-{name}-scan", daemon=True)
        self._scanner.start()

    @override
    def __repr__(self) -> str:
        return f"<DiskTier {self.name} {self._index}>"

    def has(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading keys are here; too many, where one in the middle was evicted.

        Looks at a few files only: a run that has its n-th page has those before, as a rule.
        """
        with self._opened() as top:
            return num_leading(lambda index: self._is_here(top, keys[index]), len(keys))

    def get(self, keys: Sequence[PageKey]) -> MemoryLoan:
        """Read the leading pages that are here into host memory."""
        pieces: list[memoryview] = []
        times: list[float] = []
        loan = MemoryLoan(self._memory, pieces, pieces)
        try:
            with self._opened() as top:
                for key in keys:
                    pieces.append(self._memory.take())
                    if (used_s := self._read(top, key, pieces[-1])) is None:
                        self._memory.give_back([pieces.pop()])
                        break
                    times.append(used_s)
                # Last page first: parents outlive their children.
                for key, used_s in reversed(list(zip(keys, times, strict=False))):
                    self._touch(top, key, used_s)
        except BaseException:
            loan.close()
            raise
        return loan

    def put(self, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> int:
        """Write those that are not here.

        While the disk is full nothing is written, and that is no failure: what is there can be read.
        """
        num_new = 0
        with self._opened() as top:
            # Last page first, so that parents are the younger files and outlive their children.
            for key, page in reversed(list(zip(keys, pages, strict=True))):
                if self._is_full:
                    break
                if (file := self._find(top, key)) is not None:
                    self._touch(top, key, file.used_s)
                elif self._write(top, key, page):
                    num_new += 1
        return num_new

    def load(self) -> TierLoad:
        """Return what this node knows of it."""
        with self._lock:
            return TierLoad(
                name=self.name,
                store=f"{self._directory.store}-{self._space_name}",
                state="full" if self._is_full else "up",
                num_pages=len(self._index),
                num_bytes=self._index.num_bytes,
                limit_bytes=self._limit_bytes,
                num_evicted=self._num_evicted,
                num_corrupted=self._num_corrupted,
            )

    def close(self) -> None:
        """Stop scanning. The files stay."""
        self._stopping.set()
        self._scanner.join(CLOSE_S)

    def scan(self) -> None:
        """Take stock of the directory, and evict down to the limit.

        Raises:
            TierFailed: It is away.
        """
        begin_s = self._clock()
        with self._lock:
            self._index.begin_scan()
        for found in self._directory.scan():
            if self._stopping.is_set():
                return
            with self._lock:
                self._index.met(found)
        with self._lock:
            self._index.end_scan()
            num_pages, num_bytes = len(self._index), self._index.num_bytes
        with self._opened() as top:
            self._evict(top, num_bytes - self._limit_bytes)
        duration_s = round(self._clock() - begin_s, 3)
        log.info("kv_tier.scanned", num_pages=num_pages, num_bytes=num_bytes, duration_s=duration_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.scan()
            except TierFailed as error:
                log.warning("kv_tier.scan_failed", tier=self.name, reason=error.message)
            # Nodes that share a directory and started together come at different times.
            self._stopping.wait(SCAN_S * (0.8 + 0.4 * random()))

    @property
    def _is_full(self) -> bool:
        # A clock that was set back must not make the pause longer.
        return 0 < self._full_until_s - self._clock() <= FULL_S

    @contextmanager
    def _opened(self) -> Iterator[int]:
        with self._directory.opened() as top:
            with self._lock:
                if self._generation != self._directory.generation:
                    self._generation = self._directory.generation
                    self._index.forget_all()
            yield top

    def _is_here(self, top: int, key: PageKey) -> bool:
        with self._lock:
            if key.digest in self._index:
                return True
        return self._find(top, key) is not None

    def _find(self, top: int, key: PageKey) -> PageFile | None:
        """Return a page's file; None: it is not here, or has another length."""
        try:
            file = self._directory.find(top, key.digest)
        except FileNotFoundError:
            self._forget(key.digest)
            return None
        if file is None or file.size_bytes != self._file_bytes:
            return None
        with self._lock:
            self._index.met(file)
        return file

    def _read(self, top: int, key: PageKey, into: memoryview) -> float | None:
        """Return when the page that was read was last used; None: it is not here."""
        try:
            return self._directory.read(top, key.digest, into)
        except FileNotFoundError:
            pass
        except EntryCorrupted as error:
            with suppress(OSError):
                self._directory.remove(top, key.digest)
            with self._lock:
                self._num_corrupted += 1
            name = key.digest.hex()
            log.warning("kv_tier.corrupted", tier=self.name, name=name, reason=str(error))
        self._forget(key.digest)
        return None

    def _touch(self, top: int, key: PageKey, used_s: float) -> None:
        """Note that a page was used, for all nodes, unless that was noted just now."""
        now_s = self._clock()
        if now_s - used_s >= TOUCH_S:
            try:
                self._directory.touch(top, key.digest, now_s)
            except FileNotFoundError:
                self._forget(key.digest)
                return
            except OSError:
                pass  # it may be read and not changed: then it stays as old as it is
            used_s = now_s
        self._met(key, used_s)

    def _met(self, key: PageKey, used_s: float) -> None:
        with self._lock:
            self._index.met(PageFile(key.digest, self._file_bytes, used_s), key.blocks)

    def _write(self, top: int, key: PageKey, page: memoryview) -> bool:
        """Write a page; return False if the disk has no room, even after some was made."""
        with self._lock:
            num_bytes = self._index.num_bytes
        if not self._evict(top, num_bytes + self._file_bytes - self._limit_bytes):
            return self._pause("no other file can be removed")
        error = self._write_once(top, key, page)
        if error is not None:
            self._evict(top, max(4 * self._file_bytes, int(num_bytes * _FULL_SHARE)))
            error = self._write_once(top, key, page)
        if error is not None:
            return self._pause(str(error))
        self._met(key, self._clock())
        return True

    def _write_once(self, top: int, key: PageKey, page: memoryview) -> OSError | None:
        """Write a page; return the error if the disk is full."""
        try:
            self._directory.write(top, key.digest, page)
        except OSError as error:
            if error.errno not in _FULL_ERRORS:
                raise
            return error
        return None

    def _pause(self, reason: str) -> bool:
        """Write nothing for a while; return False, since nothing was written."""
        self._full_until_s = self._clock() + FULL_S
        log.warning("kv_tier.full", tier=self.name, reason=reason, pause_s=FULL_S)
        return False

    def _evict(self, top: int, num_bytes: int) -> bool:
        """Remove the least recently used files, as far as known; return whether that many bytes were freed.

        Raises:
            OSError: A file cannot be removed. It counts on, and the next call goes on with others.
        """
        while num_bytes > 0:
            with self._lock:
                known = self._index.take_oldest()
            if known is None:
                return False
            num_bytes -= self._evict_one(top, known)
        return True

    def _evict_one(self, top: int, known: PageFile) -> int:
        """Remove a file, unless another node used it lately; return the bytes that are free by that."""
        freed_bytes, is_removed = self._file_bytes, False
        with suppress(FileNotFoundError):
            file = self._directory.find(top, known.digest)
            if file is not None and file.used_s > known.used_s:
                with self._lock:
                    self._index.met(file)
                return 0
            self._directory.remove(top, known.digest)
            is_removed = True
            freed_bytes = self._file_bytes if file is None else file.size_bytes
        with self._lock:
            self._num_evicted += is_removed
            self._index.forget(known.digest)
        return freed_bytes

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            self._index.forget(digest)


@dataclass(slots=True)
class _Known:
    file: PageFile
    scan: int
    blocks: tuple[int, ...] = ()


class DiskIndex:
    """The files that one node knows of a directory, and the blocks of those whose keys were met. Pure.

    ```
     scan, put, found ──▶ KNOWN ──evicted, gone, not met by a whole scan──▶ forgotten
    ```

    Attributes:
        num_bytes: Of all known files.
    """

    def __init__(self, journal: PrefixJournal) -> None:
        self.num_bytes = 0
        self._journal = journal
        self._known: dict[bytes, _Known] = {}
        # By last use; entries that are out of date are skipped.
        self._ages: list[tuple[float, bytes]] = []
        self._scan = 0

    @override
    def __repr__(self) -> str:
        return f"<DiskIndex {len(self._known)} files, {self.num_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._known

    def begin_scan(self) -> None:
        """Begin to take stock; what is met from now on is there."""
        self._scan += 1

    def end_scan(self) -> None:
        """Forget what the scan did not meet: others removed it."""
        for digest in [d for d, known in self._known.items() if known.scan != self._scan]:
            self.forget(digest)
        self._sort_ages()

    def met(self, file: PageFile, blocks: tuple[int, ...] = ()) -> None:
        """Note that a file is there, and if its key is known, which blocks routers may be told of."""
        known = self._known.get(file.digest)
        if known is None:
            known = _Known(PageFile(file.digest, 0, 0.0), self._scan)
            self._known[file.digest] = known
        known.scan, before = self._scan, known.file
        self.num_bytes += file.size_bytes - before.size_bytes
        used_s = max(file.used_s, before.used_s)
        known.file = PageFile(file.digest, file.size_bytes, used_s)
        if used_s > before.used_s:
            heapq.heappush(self._ages, (used_s, file.digest))
            if len(self._ages) > 2 * len(self._known) + 1024:
                self._sort_ages()
        if blocks and not known.blocks:
            known.blocks = blocks
            for block in blocks:
                self._journal.add(block)

    def forget(self, digest: bytes) -> None:
        """Note that a file is gone, if it was known."""
        if (known := self._known.pop(digest, None)) is not None:
            self.num_bytes -= known.file.size_bytes
            for block in known.blocks:
                self._journal.remove(block)

    def forget_all(self) -> None:
        """Note that the directory is another."""
        for digest in list(self._known):
            self.forget(digest)

    def take_oldest(self) -> PageFile | None:
        """Return the least recently used file, once: not again before it is used or a scan has ended."""
        while self._ages:
            used_s, digest = heapq.heappop(self._ages)
            known = self._known.get(digest)
            if known is not None and known.file.used_s == used_s:
                return known.file
        return None

    def _sort_ages(self) -> None:
        self._ages = [(known.file.used_s, digest) for digest, known in self._known.items()]
        heapq.heapify(self._ages)


def num_leading(is_here: Callable[[int], bool], num: int) -> int:
    """Return how many are here, given that all before one that is here are: in about 2 log2(n) looks."""
    low, high, step = -1, num, 1  # low is here; high is not
    while low + step < high:
        if is_here(low + step):
            low, step = low + step, 2 * step
        else:
            high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        if is_here(middle):
            low = middle
        else:
            high = middle
    return low + 1
