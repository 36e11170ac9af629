"""Pages in this node's memory: an arena of slots with LRU eviction.

```
 slot:  FREE ──put begins──▶ FILLING ──copied──▶ KEPT ──evicted──▶ FREE
                                                  │ ▲
                                              get ▼ │ closed
                                                  LENT   reference-counted; neither evicted nor written
```

No byte is copied under the lock, and `get` copies none at all. There is no checksum: no other process can
write this memory.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.kvtier.entry import KnownPages
from tandem.kvtier.memory import Loan, copy_page, views_of
from tandem.kvtier.spec import TierSpec
from tandem.kvtier.tier import NEVER_S, PoolPages
from tandem.wire.errors import ConfigInvalid
from tandem.wire.messages import TierLoad
from tandem.wire.prefixes import PageKey, PageSpace


def open_tier(spec: TierSpec, pages: PoolPages, space: PageSpace) -> "HostTier":
    """Return the tier of a `--kv-tier host:SIZE`."""
    # The limit is for the whole node; each rank gets an equal share.
    return HostTier(pages, spec.limit_bytes // space.num_shards, name=spec.name)


@dataclass(slots=True, eq=False)
class _Slot:
    """A slot in state KEPT or FILLING."""

    key: PageKey
    view: memoryview
    num_loans: int = 0


class HostTier:
    """A tier in host memory. Any thread may call it.

    Args:
        pages: The pool; it allocates the arena, in pinned memory if the pool is on a GPU.
        limit_bytes: Size of the arena in bytes, allocated at the start.

    Raises:
        ConfigInvalid: The limit is smaller than a page, or the host has too little memory.
    """

    lends_own_memory = True

    def __init__(self, pages: PoolPages, limit_bytes: int, *, name: str = "host") -> None:
        self.name = name
        self._known = KnownPages()
        self.journal = self._known.journal
        self._page_bytes, self._limit_bytes = pages.page_bytes, limit_bytes
        num_slots = limit_bytes // pages.page_bytes
        if not num_slots:
            raise ConfigInvalid(
                f"--kv-tier {name}:{limit_bytes}: a KV page takes {pages.page_bytes} bytes; use a larger size"
            )
        try:
            memory = pages.host_memory(num_slots * pages.page_bytes)
        except (
            MemoryError,
            OSError,
            RuntimeError,
        ) as error:  # torch raises RuntimeError when pinning fails
            raise ConfigInvalid(
                f"--kv-tier {name}:{limit_bytes}: cannot allocate that much memory: {error}; use a smaller size"
            ) from error
        self._free = views_of(memory, pages.page_bytes)
        # Least recently used first. A run is touched last page first, so that parents outlive their children.
        self._kept: OrderedDict[bytes, _Slot] = OrderedDict()
        self._filling: set[bytes] = set()
        self._lock = threading.Lock()
        self._num_evicted = 0

    def get(self, keys: Sequence[PageKey], deadline_s: float = NEVER_S) -> Loan:
        """Lend the leading pages that are stored here, without copying."""
        slots: list[_Slot] = []
        with self._lock:
            for key in keys:
                if (slot := self._kept.get(key.digest)) is None:
                    break
                slot.num_loans += 1
                slots.append(slot)
            self._touch(keys[: len(slots)])
        return Loan([slot.view for slot in slots], lambda: self._end_loan(slots))

    def put(self, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> int:
        """Store pages. If lent pages and this run fill the arena, only the leading pages are stored."""
        new = self._begin(keys)
        copied = 0
        try:
            for index, slot in new:
                copy_page(pages[index], slot.view)
                copied += 1
        finally:
            self._end(keys, [slot for _, slot in new], copied)
        return copied

    def load(self) -> TierLoad:
        """Return the tier's gauges."""
        with self._lock:
            num_pages = len(self._kept)
            return TierLoad(
                name=self.name,
                num_pages=num_pages,
                num_bytes=num_pages * self._page_bytes,
                limit_bytes=self._limit_bytes,
                num_evicted=self._num_evicted,
            )

    def close(self) -> None:
        """Release the memory; lent pages stay valid until their loan ends."""
        with self._lock:
            self._kept.clear()
            self._free = []

    def _end_loan(self, slots: Sequence[_Slot]) -> None:
        with self._lock:
            for slot in slots:
                slot.num_loans -= 1

    def _touch(self, keys: Sequence[PageKey]) -> None:
        for key in reversed(keys):
            if key.digest in self._kept:
                self._kept.move_to_end(key.digest)

    def _begin(self, keys: Sequence[PageKey]) -> list[tuple[int, _Slot]]:
        """Reserve slots for new pages, in order, until no slot is left."""
        new: list[tuple[int, _Slot]] = []
        with self._lock:
            self._touch(keys)
            own = {key.digest for key in keys}
            for index, key in enumerate(keys):
                if key.digest in self._kept or key.digest in self._filling:
                    continue
                if (view := self._take(own)) is None:
                    break
                self._filling.add(key.digest)
                new.append((index, _Slot(key, view)))
        return new

    def _end(self, keys: Sequence[PageKey], slots: Sequence[_Slot], num_copied: int) -> None:
        with self._lock:
            self._filling.difference_update(slot.key.digest for slot in slots)
            for slot in slots[:num_copied]:
                self._kept[slot.key.digest] = slot
            self._known.record(slot.key for slot in slots[:num_copied])
            self._free += [slot.view for slot in slots[num_copied:]]
            self._touch(keys)

    def _take(self, own: set[bytes]) -> memoryview | None:
        """Return a free slot; evict a page that is neither lent nor part of the run being stored."""
        if self._free:
            return self._free.pop()
        for digest, slot in self._kept.items():
            if not slot.num_loans and digest not in own:
                break
        else:
            return None
        del self._kept[digest]
        self._known.forget(digest)
        self._num_evicted += 1
        return slot.view
