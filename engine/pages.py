"""Who owns each page of one pool. Pure bookkeeping: no tensors, no I/O.

```
 free ──allocate──▶ held ──release, in the prefix cache──▶ cached ──hold──▶ held
  ▲                  ▲ └───release, not cached──▶ free        └──evict──▶ free
  │                  └──land────────────────────────────┐
  ├──grant──▶ granted ──────────────────────────────────┘
  │             ├──reclaim (the writer said Released)──▶ free
  │             └──quarantine (withdrawn, not confirmed)──▶ quarantined
  └──reclaim (confirmed, or the writer is fenced)────────────────┘
```

A page granted to a remote writer goes back only through `land` or `reclaim`: with one-sided writes a
late write into a page that was given to another request corrupts that request silently.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import msgspec
from typing_extensions import override


class PageState(Enum):
    """The one state a page is in."""

    FREE = "free"
    CACHED = "cached"
    HELD = "held"
    GRANTED = "granted"
    QUARANTINED = "quarantined"


class PageStateError(AssertionError):
    """A page was moved along an arrow that does not exist: a bug, named with page and state."""


class PageCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Number of pages in each state; they sum to `total`."""

    total: int
    free: int
    cached: int
    held: int
    granted: int
    quarantined: int


class PagePool:
    """States and reader counts of pages 0 ... num_pages-1.

    Args:
        evict: Called with a number of pages when too few are free; returns that many cached pages,
            least recently used first, that the prefix cache has now forgotten.
    """

    def __init__(
        self, num_pages: int, evict: Callable[[int], Sequence[int]] = lambda _num: ()
    ) -> None:
        self.num_pages = num_pages
        self._evict = evict
        self._states = [PageState.FREE] * num_pages
        self._readers = [0] * num_pages
        # Popped from the end, so low ids go first: neighbours are copied in one run.
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_in = Counter({PageState.FREE: num_pages})

    @property
    def num_available(self) -> int:
        """Pages that `allocate` or `grant` could hand out now."""
        return len(self._free) + self._num_in[PageState.CACHED]

    def allocate(self, num_pages: int) -> list[int] | None:
        """Hold free pages with one reader, evicting cached ones; None when there are too few."""
        return self._take(num_pages, PageState.HELD, readers=1)

    def grant(self, num_pages: int) -> list[int] | None:
        """Set pages aside for a remote writer; None when there are too few."""
        return self._take(num_pages, PageState.GRANTED, readers=0)

    def hold(self, page_ids: Iterable[int]) -> None:
        """Add a reader to cached or held pages."""
        for page in page_ids:
            if self._states[page] is PageState.CACHED:
                self._move(page, PageState.HELD)
            self._require(page, PageState.HELD)
            self._readers[page] += 1

    def release(self, page_ids: Iterable[int], is_cached: Callable[[int], bool]) -> None:
        """Drop one reader of each page. The last one frees it, or leaves it cached."""
        for page in page_ids:
            self._require(page, PageState.HELD)
            self._readers[page] -= 1
            if self._readers[page]:
                continue
            if is_cached(page):
                self._move(page, PageState.CACHED)
            else:
                self._put_back(page)

    def land(self, page_ids: Iterable[int]) -> None:
        """The writer said `Landed`: the pages now have one reader."""
        for page in page_ids:
            self._require(page, PageState.GRANTED)
            self._move(page, PageState.HELD)
            self._readers[page] = 1

    def quarantine(self, page_ids: Iterable[int]) -> None:
        """The grant was withdrawn; the writer has not confirmed yet."""
        for page in page_ids:
            self._require(page, PageState.GRANTED)
            self._move(page, PageState.QUARANTINED)

    def reclaim(self, page_ids: Iterable[int]) -> None:
        """The writer said `Released` or is fenced: no write can arrive any more."""
        for page in page_ids:
            self._require(page, PageState.GRANTED, PageState.QUARANTINED)
            self._put_back(page)

    def forget(self, page_ids: Iterable[int]) -> None:
        """Free cached pages that the prefix cache has dropped."""
        for page in page_ids:
            self._require(page, PageState.CACHED)
            self._put_back(page)

    def state(self, page: int) -> PageState:
        """Return the state of one page."""
        return self._states[page]

    def counts(self) -> PageCounts:
        """Return how many pages are in each state."""
        return PageCounts(
            total=self.num_pages,
            **{state.value: self._num_in[state] for state in PageState},
        )

    def check_integrity(self) -> None:
        """Raise `PageStateError` unless every page is in exactly one state and counted once."""
        num_in, free = Counter(self._states), set(self._free)
        if num_in != self._num_in:
            raise PageStateError(f"counted {self._num_in}, there are {num_in}")
        if len(free) != len(self._free) or len(free) != num_in[PageState.FREE]:
            raise PageStateError(f"{len(self._free)} pages on the free list, of {num_in}")
        for page, (state, readers) in enumerate(zip(self._states, self._readers, strict=True)):
            if (readers > 0) != (state is PageState.HELD) or (page in free) != (
                state is PageState.FREE
            ):
                raise PageStateError(f"page {page} is {state.value} with {readers} readers")

    def _take(self, num_pages: int, state: PageState, readers: int) -> list[int] | None:
        if num_pages > self.num_available:
            return None
        if num_pages > len(self._free):
            self.forget(self._evict(num_pages - len(self._free)))
        taken = [self._free.pop() for _ in range(num_pages)]
        for page in taken:
            self._move(page, state)
            self._readers[page] = readers
        return taken

    def _put_back(self, page: int) -> None:
        self._move(page, PageState.FREE)
        self._readers[page] = 0
        self._free.append(page)

    def _move(self, page: int, state: PageState) -> None:
        self._num_in[self._states[page]] -= 1
        self._num_in[state] += 1
        self._states[page] = state

    def _require(self, page: int, *allowed: PageState) -> None:
        state = self._states[page]
        if state not in allowed:
            names = " or ".join(s.value for s in allowed)
            raise PageStateError(f"page {page} is {state.value}, must be {names}")

    @override
    def __repr__(self) -> str:
        return f"PagePool({self.counts()})"
