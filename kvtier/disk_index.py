"""What one node knows of a directory of pages that others may write to as well. Pure.

```
 scan, put, found ──▶ KNOWN ──evicted, gone, not met by a whole scan──▶ forgotten
```
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import override

from tandem.wire.page_keys import PageKey
from tandem.wire.prefix_journal import PrefixJournal


@dataclass(slots=True)
class _Known:
    size_bytes: int
    used_s: float
    scan: int
    blocks: tuple[int, ...] = ()


class DiskIndex:
    """Sizes and ages of files by digest, and the blocks of those whose keys were met.

    Attributes:
        num_bytes: Of all that is known.
    """

    def __init__(self, journal: PrefixJournal) -> None:
        self.num_bytes = 0
        self._journal = journal
        self._known: dict[bytes, _Known] = {}
        # By last use; entries that are no longer so are skipped.
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

    def met(self, digest: bytes, size_bytes: int, used_s: float) -> None:
        """Note that a file is there."""
        known = self._known.get(digest)
        if known is None:
            known = self._known[digest] = _Known(0, 0.0, self._scan)
        known.scan = self._scan
        self.num_bytes += size_bytes - known.size_bytes
        known.size_bytes = size_bytes
        if used_s > known.used_s:
            known.used_s = used_s
            self._note_age(digest, used_s)

    def met_key(self, key: PageKey, size_bytes: int, used_s: float) -> None:
        """Note that the page of a key is there, and tell routers."""
        self.met(key.digest, size_bytes, used_s)
        known = self._known[key.digest]
        if not known.blocks:
            known.blocks = key.blocks
            for block in key.blocks:
                self._journal.add(block)

    def used_s(self, digest: bytes) -> float:
        """Return when a file was last used, as far as is known."""
        known = self._known.get(digest)
        return 0.0 if known is None else known.used_s

    def forget(self, digest: bytes) -> None:
        """Note that a file is gone, if it was known."""
        if (known := self._known.pop(digest, None)) is not None:
            self.num_bytes -= known.size_bytes
            for block in known.blocks:
                self._journal.remove(block)

    def forget_all(self) -> None:
        """Note that the directory is another."""
        for digest in list(self._known):
            self.forget(digest)

    def take_oldest(self) -> bytes | None:
        """Return what was used longest ago, once: not again before it is used or a scan has ended."""
        while self._ages:
            used_s, digest = heapq.heappop(self._ages)
            known = self._known.get(digest)
            if known is not None and known.used_s == used_s:
                return digest
        return None

    def _note_age(self, digest: bytes, used_s: float) -> None:
        heapq.heappush(self._ages, (used_s, digest))
        if len(self._ages) > 2 * len(self._known) + 1024:
            self._sort_ages()

    def _sort_ages(self) -> None:
        self._ages = [(known.used_s, digest) for digest, known in self._known.items()]
        heapq.heapify(self._ages)


def num_leading(is_here: Callable[[int], bool], num: int) -> int:
    """Return how many are here, where all before one that is here are: in about 2 log2(n) looks."""
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
