"""Pages as files of a directory, of this node or shared by many (NFS, Ceph, any POSIX file system).

```
 put ──▶ evict down to the limit ──▶ write by another name ──▶ rename          full: stop writing for a while
 get ──▶ read into staging memory ──▶ check ──▶ lend                           wrong: count, remove, a miss
```

What a node knows of the directory is its own puts and gets and a scan now and then (`DiskIndex`). Files may come
and go by others at any time: deleting what another just read is harmless, and what is gone is a miss.
A file's time of change is when it was last used, by any node: that is what is evicted by.
"""

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import random

from typing_extensions import override

from tandem.kvtier.disk_directory import find_directory
from tandem.kvtier.disk_entry import HEADER_BYTES, EntryCorrupted, read_entry, remove, write_entry
from tandem.kvtier.disk_index import DiskIndex, num_leading
from tandem.kvtier.journal import SharedJournal
from tandem.kvtier.memory import PageBuffers, PageLoan
from tandem.kvtier.spec import TierSpec
from tandem.kvtier.tier import PoolPages, TierFailed
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.messages import TierLoad
from tandem.wire.page_keys import PageKey, PageSpace
from tandem.wire.prefix_journal import PrefixJournal

log = get_logger("kvtier.disk")

# A use is noted once in so long: a note is a write.
TOUCH_S = 60.0
# A full disk is tried again after so long.
FULL_S = 60.0
# A scan of a shared directory asks the server for every file; what others wrote is not known before.
SCAN_S = 600.0
# A mount that does not answer at the start for so long will not soon.
START_S = 10.0
CLOSE_S = 1.0
# Of what is there, at a time, when the disk is full before the limit is reached.
_FULL_SHARE = 0.02
_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT}


def open_tier(spec: TierSpec, pages: PoolPages, space: PageSpace) -> "DiskTier":
    """Return the tier; see `tandem.kvtier.spec.make_tier`."""
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
        self.journal: PrefixJournal = SharedJournal()
        self._file_bytes, self._limit_bytes = HEADER_BYTES + pages.page_bytes, limit_bytes
        if limit_bytes < self._file_bytes:
            raise ConfigInvalid(
                f"--kv-tier disk:{path}:{limit_bytes}: a page of KV takes {self._file_bytes} bytes; "
                "give it room for many"
            )
        self._directory = find_directory(START_S, path, space.shard)
        # Nodes with other models share the directory, and get nothing of each other's.
        self._space_name = space.name
        self._buffers = PageBuffers(pages)
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

    def get(self, keys: Sequence[PageKey]) -> PageLoan:
        """Read the leading pages that are here into host memory."""
        loan = self._buffers.take(len(keys))
        try:
            with self._opened() as top:
                times = self._read(top, keys, loan.pages)
                loan.keep(len(times))
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
                if (used_s := self._stat(top, key)) is not None:
                    self._touch(top, key, used_s)
                elif self._write(top, key, page):
                    num_new += 1
        return num_new

    def load(self) -> TierLoad:
        """Return what is known of it."""
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
                self._index.met(found.digest, found.size_bytes, found.used_s)
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
        return self._stat(top, key) is not None

    def _stat(self, top: int, key: PageKey) -> float | None:
        """Return when a page was last used; None: it is not here, or another length."""
        name = key.digest.hex()
        try:
            with self._directory.folder(top, name) as folder:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            self._forget(key.digest)
            return None
        if not stat.S_ISREG(status.st_mode) or status.st_size != self._file_bytes:
            return None
        with self._lock:
            self._index.met(key.digest, status.st_size, status.st_mtime)
        return status.st_mtime

    def _read(self, top: int, keys: Sequence[PageKey], views: Sequence[memoryview]) -> list[float]:
        """Read leading pages; return when each was last used."""
        times: list[float] = []
        for key, view in zip(keys, views, strict=True):
            name = key.digest.hex()
            try:
                with self._directory.folder(top, name) as folder:
                    times.append(self._read_one(folder, name, key.digest, view))
            except (FileNotFoundError, EntryCorrupted):
                self._forget(key.digest)
                break
        return times

    def _read_one(self, folder: int, name: str, digest: bytes, view: memoryview) -> float:
        try:
            return read_entry(folder, name, digest, view)
        except EntryCorrupted as error:
            is_removed = remove(folder, name)
            with self._lock:
                self._num_corrupted += 1
            log.warning(
                "kv_tier.corrupted",
                tier=self.name,
                name=name,
                reason=str(error),
                is_removed=is_removed,
            )
            raise

    def _touch(self, top: int, key: PageKey, used_s: float) -> None:
        """Note that a page was used, for all nodes, unless that was noted just now."""
        now_s = self._clock()
        if now_s - used_s >= TOUCH_S:
            name = key.digest.hex()
            try:
                with self._directory.folder(top, name) as folder:
                    os.utime(name, (now_s, now_s), dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                self._forget(key.digest)
                return
            except OSError:
                pass  # it may be read and not changed: then it is as old as it says
            used_s = now_s
        with self._lock:
            self._index.met_key(key, self._file_bytes, used_s)

    def _write(self, top: int, key: PageKey, page: memoryview) -> bool:
        """Write a page; return False if the disk has no room, also after some was made."""
        with self._lock:
            num_bytes = self._index.num_bytes
        if not self._evict(top, num_bytes + self._file_bytes - self._limit_bytes):
            return self._pause("no other file can be removed")
        try:
            self._write_once(top, key, page)
        except OSError as error:
            if error.errno not in _FULL_ERRORS:
                raise
            self._evict(top, max(4 * self._file_bytes, int(num_bytes * _FULL_SHARE)))
            try:
                self._write_once(top, key, page)
            except OSError as still:
                if still.errno not in _FULL_ERRORS:
                    raise
                return self._pause(str(still))
        with self._lock:
            self._index.met_key(key, self._file_bytes, self._clock())
        return True

    def _pause(self, reason: str) -> bool:
        """Write nothing for a while; return False, since nothing was written."""
        self._full_until_s = self._clock() + FULL_S
        log.warning("kv_tier.full", tier=self.name, reason=reason, pause_s=FULL_S)
        return False

    def _write_once(self, top: int, key: PageKey, page: memoryview) -> None:
        name = key.digest.hex()
        with self._directory.folder(top, name, make=True) as folder:
            write_entry(folder, name, key.digest, page)

    def _evict(self, top: int, num_bytes: int) -> bool:
        """Remove what was used longest ago, as far as it is known; return whether so much was freed.

        Raises:
            OSError: A file cannot be removed. It counts on, and the next call goes on with others.
        """
        while num_bytes > 0:
            with self._lock:
                digest = self._index.take_oldest()
                used_s = 0.0 if digest is None else self._index.used_s(digest)
            if digest is None:
                return False
            num_bytes -= self._evict_one(top, digest, used_s)
        return True

    def _evict_one(self, top: int, digest: bytes, used_s: float) -> int:
        """Remove a file, unless another node used it lately; return the bytes that are free by that."""
        name = digest.hex()
        size_bytes, is_removed = self._file_bytes, False
        with suppress(FileNotFoundError), self._directory.folder(top, name) as folder:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if status.st_mtime > used_s:
                with self._lock:
                    self._index.met(digest, status.st_size, status.st_mtime)
                return 0
            os.unlink(name, dir_fd=folder)
            size_bytes, is_removed = status.st_size, True
        with self._lock:
            self._num_evicted += is_removed
            self._index.forget(digest)
        return size_bytes

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            self._index.forget(digest)
