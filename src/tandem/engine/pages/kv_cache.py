"""Ownership of the pages of a pool, and the prefix cache over them. Pure bookkeeping: no tensors, no I/O.

```
 free ──allocate──▶ held ──release, in the prefix cache──▶ cached ──match──▶ held
  ▲                  ▲ └───release, not cached──▶ free        └──evict──▶ free
  │                  └──land────────────────────────────┐
  ├──grant──▶ granted ──────────────────────────────────┘
  │             ├──reclaim (the writer reported Released)──▶ free
  │             └──quarantine (withdrawn, not confirmed)──▶ quarantined
  └──reclaim (confirmed, or the writer is fenced)────────────────┘
```

A page granted to a remote writer leaves its grant only through `land` or `reclaim`. Otherwise a late one-sided
write could silently corrupt a request that later gets the page.

Page states and reader counts are NumPy arrays. A prompt of 128k tokens has 8,192 pages of 16 tokens, and one operation
per page would block the engine's loop.
"""

from collections.abc import Sequence
from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from tandem.engine.pages.prefix_cache import (
    BlockListener,
    MissingPages,
    PageIds,
    PrefixCache,
    PrefixMatch,
)
from tandem.wire.prefixes import PageKey, PageSpace, PrefixJournal


class PageState(Enum):
    """The state of a page."""

    FREE = "free"
    CACHED = "cached"
    HELD = "held"
    GRANTED = "granted"
    QUARANTINED = "quarantined"


# A state's index in this tuple is its code in the array of page states.
_STATES = tuple(PageState)
_CODE_OF = {state: code for code, state in enumerate(_STATES)}


class PageStateError(AssertionError):
    """An invalid state transition of a page, which is a bug."""


class PageCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Number of pages in each state, and their sum `total`."""

    total: int
    free: int
    cached: int
    held: int
    granted: int
    quarantined: int


class KVCache:
    """States and reader counts of pages 0 ... num_pages-1, and the prefix cache over them.

    The pages of a request are one ordered list: first those matched in the prefix cache, then its own.

    Args:
        space: Common part of all page keys; None without tiers.

    Attributes:
        journal: Changes of the prefix cache, sent to routers.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        is_prefix_cache_enabled: bool = True,
        space: PageSpace | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.space = space
        self._is_prefix_cache_enabled = is_prefix_cache_enabled
        self._prefixes = PrefixCache(num_pages, page_size, self._is_unused, space)
        self.journal: PrefixJournal = self._prefixes.journal
        self._states = np.full(num_pages, _CODE_OF[PageState.FREE], np.int8)
        self._readers = np.zeros(num_pages, np.int64)
        # Pages are popped from the end, so low ids are used first, in order: adjacent pages are copied in one run.
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_in = dict.fromkeys(PageState, 0) | {PageState.FREE: num_pages}

    # ── ownership ────────────────────────────────────────────────────────────────────────────────

    def num_pages_for(self, num_tokens: int) -> int:
        """Return the number of pages needed for `num_tokens`."""
        return -(-num_tokens // self.page_size)

    @property
    def num_available(self) -> int:
        """Number of pages that `allocate` or `grant` can return now."""
        return len(self._free) + self._num_in[PageState.CACHED]

    def allocate(self, num_pages: int) -> list[int] | None:
        """Hold free pages with one reader each, evicting cached pages if needed; None if there are too few."""
        return self._take(num_pages, PageState.HELD, readers=1)

    def grant(self, num_pages: int) -> list[int] | None:
        """Reserve pages for a remote writer, evicting cached pages if needed; None if there are too few."""
        return self._take(num_pages, PageState.GRANTED, readers=0)

    def hold(self, page_ids: Sequence[int]) -> None:
        """Add a reader to cached or held pages, which must be distinct."""
        pages = _column(page_ids)
        self._move(pages, PageState.HELD, PageState.CACHED, PageState.HELD)
        self._readers[pages] += 1

    def release(self, page_ids: Sequence[int]) -> None:
        """Drop a reader of each page and mark it as recently used. Without readers it is freed, or stays cached."""
        pages = _column(page_ids)
        self._prefixes.touch(pages)
        self._drop_reader(pages)

    def land(self, page_ids: Sequence[int]) -> None:
        """Take over granted pages whose bytes have all arrived. They then have one reader."""
        pages = _column(page_ids)
        self._move(pages, PageState.HELD, PageState.GRANTED)
        self._readers[pages] = 1

    def quarantine(self, page_ids: Sequence[int]) -> None:
        """Withdraw a grant before its writer has confirmed the release."""
        self._move(_column(page_ids), PageState.QUARANTINED, PageState.GRANTED)

    def reclaim(self, page_ids: Sequence[int]) -> None:
        """Free granted or quarantined pages: no write can arrive any more."""
        self._free_pages(_column(page_ids), PageState.GRANTED, PageState.QUARANTINED)

    def state(self, page: int) -> PageState:
        """Return the state of one page."""
        return _STATES[int(self._states[page])]

    def counts(self) -> PageCounts:
        """Return how many pages are in each state."""
        return PageCounts(
            total=self.num_pages,
            **{state.value: self._num_in[state] for state in PageState},
        )

    def check_integrity(self) -> None:
        """Raise `PageStateError` if states, reader counts, counters and the free list disagree."""
        counted = np.bincount(self._states, minlength=len(_STATES)).tolist()
        num_in = dict(zip(_STATES, counted, strict=True))
        if num_in != self._num_in:
            raise PageStateError(f"counters are {self._num_in}, but the states are {num_in}")
        is_free = np.zeros(self.num_pages, np.bool_)
        is_free[self._free] = True
        if is_free.sum() != len(self._free) or len(self._free) != num_in[PageState.FREE]:
            raise PageStateError(
                f"the free list has {len(self._free)} pages, but the states are {num_in}"
            )
        is_wrong = (self._readers > 0) != (self._states == _CODE_OF[PageState.HELD])
        is_wrong |= is_free != (self._states == _CODE_OF[PageState.FREE])
        if is_wrong.any():
            page = int(np.flatnonzero(is_wrong)[0])
            raise PageStateError(
                f"page {page} is {self.state(page).value} with {self._readers[page]} readers"
            )

    def _take(self, num_pages: int, state: PageState, readers: int) -> list[int] | None:
        if num_pages > self.num_available:
            return None
        if not num_pages:
            return []
        if num_pages > len(self._free):
            self._evict(num_pages - len(self._free))
        first = len(self._free) - num_pages
        taken = self._free[first:][::-1]
        del self._free[first:]
        pages = _column(taken)
        self._move(pages, state, PageState.FREE)
        self._readers[pages] = readers
        return taken

    def _drop_reader(self, pages: PageIds) -> None:
        self._require(pages, PageState.HELD)
        self._readers[pages] -= 1
        unread = pages[self._readers[pages] == 0]
        is_cached = self._prefixes.has(unread)
        self._move(unread[is_cached], PageState.CACHED, PageState.HELD)
        self._free_pages(unread[~is_cached], PageState.HELD)

    def _evict(self, num_pages: int) -> int:
        """Free up to `num_pages` cached pages, least recently used first, and return their number."""
        evicted = self._prefixes.evict(num_pages)
        self._free_pages(_column(evicted), PageState.CACHED)
        return len(evicted)

    def _free_pages(self, pages: PageIds, *allowed: PageState) -> None:
        self._move(pages, PageState.FREE, *allowed)
        self._readers[pages] = 0
        self._free += pages.tolist()

    def _move(self, pages: PageIds, state: PageState, *allowed: PageState) -> None:
        """Change the state of pages that are in one of the `allowed` states."""
        self._require(pages, *allowed)
        for before in allowed:
            count = int(np.count_nonzero(self._states[pages] == _CODE_OF[before]))
            self._num_in[before] -= count
            self._num_in[state] += count
        self._states[pages] = _CODE_OF[state]

    def _require(self, pages: PageIds, *allowed: PageState) -> None:
        states = self._states[pages]
        is_wrong = np.logical_and.reduce([states != _CODE_OF[state] for state in allowed])
        if is_wrong.any():
            page = int(pages[is_wrong][0])
            names = " or ".join(state.value for state in allowed)
            raise PageStateError(f"page {page} is {self.state(page).value}: it must be {names}")

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.counts()})"

    # ── prefix cache ─────────────────────────────────────────────────────────────────────────────

    def match(self, token_ids: Sequence[int], salt: str = "") -> PrefixMatch:
        """Find and hold the longest cached prefix. The caller must `release` its pages."""
        if not self._is_prefix_cache_enabled:
            return PrefixMatch([], 0)
        match = self._prefixes.match(token_ids, salt)
        self.hold(match.page_ids)
        return match

    def insert(self, token_ids: Sequence[int], page_ids: Sequence[int], salt: str = "") -> None:
        """Add the full pages of a sequence to the prefix cache. The caller must hold them."""
        if self._is_prefix_cache_enabled:
            self._prefixes.insert(token_ids, page_ids, salt)

    def listen(self, listener: BlockListener) -> None:
        """Send the changes of the prefix cache to `listener` from now on."""
        self._prefixes.listener = listener

    def flush(self) -> int:
        """Free all cached pages that have no reader, and return their number."""
        return self._evict(self.num_pages)

    def _is_unused(self, pages: PageIds) -> npt.NDArray[np.bool_]:
        is_unused: npt.NDArray[np.bool_] = self._states[pages] == _CODE_OF[PageState.CACHED]
        return is_unused

    # ── interface for tiers ──────────────────────────────────────────────────────────────────────

    @property
    def num_unsaved(self) -> int:
        """Number of cached pages that are not yet saved to a tier."""
        return self._prefixes.num_unsaved

    def missing(
        self, token_ids: Sequence[int], salt: str = "", at_least: int = 1
    ) -> MissingPages | None:
        """Return the full pages of a prompt that are not cached; None if there are fewer than `at_least`."""
        return self._prefixes.missing(token_ids, salt, at_least)

    def adopt(
        self,
        token_ids: Sequence[int],
        matched: Sequence[int],
        loaded: Sequence[int],
        salt: str = "",
        *,
        is_saved: bool,
    ) -> None:
        """Add pages loaded from a tier to the prefix cache, and drop a reader of `matched` and `loaded`.

        Args:
            matched: Pages of the cached prefix, held by `match`.
            loaded: The full pages that follow, held by `allocate`.
            is_saved: Whether the tiers already have all pages of `loaded`.
        """
        page_ids = [*matched, *loaded]
        self._prefixes.insert(token_ids, page_ids, salt)
        if is_saved:
            self._prefixes.saved(loaded)
        self.release(page_ids)

    def begin_save(self, num_pages: int, *, only_unused: bool) -> dict[int, PageKey]:
        """Hold unsaved cached pages until `end_save`, and return their keys by page id, parents first.

        Saving does not count as a use.

        Args:
            only_unused: Skip pages that have a reader.
        """
        taken = self._prefixes.take_unsaved(num_pages, only_unused=only_unused)
        self.hold(list(taken))
        return taken

    def end_save(self, page_ids: Sequence[int], *, is_saved: bool = True) -> None:
        """Drop the reader that `begin_save` added. Unless `is_saved`, a later `begin_save` returns the pages again."""
        self._prefixes.saved(page_ids, is_saved=is_saved)
        self._drop_reader(_column(page_ids))  # not `release`: saving is not a use


def _column(page_ids: Sequence[int]) -> PageIds:
    return np.array(page_ids, np.int64)
