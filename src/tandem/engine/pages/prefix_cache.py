"""The tree of cached prefixes, which maps tokens to ids of full pages.

A tree node is a run of consecutive pages, so a prompt of any length takes a few array operations instead of one
operation per page. `insert` extends a run without children, or splits a run where the new tokens differ:

```
 insert ABCD           run ABCD
 insert ABCDE          run ABCDE                     extended
 insert ABXY           run AB ─┬─▶ run CDE           split; the ids of the pages do not change
                               └─▶ run XY
```

Eviction takes pages from the end of the least recently used run without children. A request may compute its own copy
of a prefix that is already cached, and hold pages below the cached copy. To evict the cached copy, the cache first
evicts the unused pages below it. It then drops the held pages from the tree, because no lookup reaches them without
their parent. The request inserts its pages again when it ends.

The names of cached blocks are sent to routers (`journal`), which use them to send a prompt to a node that caches
its prefix.

With tiers (`space` is set), each page also has a content key, and the cache tracks which pages are saved to a tier:

```
 insert ──▶ unsaved ──take_unsaved──▶ saving ──saved──▶ saved
               ▲ └── evict ──▶ gone      └── not saved ──┐
               └─────────────────────────────────────────┘
```
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from tandem.wire.prefixes import (
    BLOCK_TOKENS,
    PageKey,
    PageSpace,
    PrefixJournal,
    TokenArray,
    names_between,
    next_digest,
    page_keys,
    root_name,
    token_array,
)

PageIds = npt.NDArray[np.int64]
# Salt, and hash of all tokens through the end of a page.
Key = tuple[str, int]

# Pages whose keys are hashed in one pass of the loop, which takes 2 ms.
_SLICE_PAGES = 1024
# Unsaved pages to inspect per page to take, because pages in use are skipped.
_SCANNED_PER_TAKEN = 4


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A cached prefix, in whole pages.

    Attributes:
        page_ids: Pages of the prefix in order.
        num_tokens: `len(page_ids) * page_size`.
        frontier: Key of the prompt's first full page that is not cached; None if there is none. Two prompts with the
            same key continue with the same page.
    """

    page_ids: list[int]
    num_tokens: int
    frontier: Key | None = None


class MissingPages:
    """The full pages of a prompt that are not cached.

    Their keys are hashed in slices: hashing 128k tokens at once would block the loop for 14 ms.

    Args:
        chain: Keys of all full pages of the prompt.

    Attributes:
        first_page: Number of cached pages before the first missing one.
        num_pages: Number of missing pages.
        keys: Keys of the missing pages, as far as they are hashed.
    """

    def __init__(self, first_page: int, num_pages: int, chain: Iterator[PageKey]) -> None:
        self.first_page, self.num_pages = first_page, num_pages
        self.keys: list[PageKey] = []
        self._chain, self._num_hashed = chain, 0

    def hash_slice(self) -> bool:
        """Hash the next pages; return whether all keys are known."""
        hashed = list(islice(self._chain, _SLICE_PAGES))
        self.keys += hashed[max(0, self.first_page - self._num_hashed) :]
        self._num_hashed += len(hashed)
        return len(self.keys) == self.num_pages


@dataclass(slots=True, eq=False)
class _Run:
    """Consecutive cached pages of one prefix. The root of a salt is a run without pages.

    Attributes:
        key: Bytes of the tokens of its first page.
        first: Number of pages of the prefix before this run.
        token_ids: Tokens of its pages.
        names: Names of the blocks that end in its pages. The root has the name that precedes the first block.
        digests: Digests of its leading pages, computed on demand. The root has the digest that precedes the first page.
        children: Runs that follow, by their key.
    """

    number: int
    salt: str
    parent: "_Run | None" = None
    key: bytes = b""
    first: int = 0
    token_ids: TokenArray = field(default_factory=lambda: array("q"))
    page_ids: list[int] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    children: "dict[bytes, _Run]" = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Number of pages of the prefix through the end of this run."""
        return self.first + len(self.page_ids)


class BlockListener(Protocol):
    """Receives the changes of the journal, with tokens."""

    def on_stored(self, name: int, before: int | None, token_ids: Sequence[int], salt: str) -> None:
        """Take a block that is now cached, after the block `before`; None: it starts a prompt."""

    def on_removed(self, name: int) -> None:
        """Take a block that is no longer cached."""


class PrefixCache:
    """A tree of cached pages.

    Args:
        num_pages: Number of pages of the pool.
        page_size: Tokens in a page.
        is_unused: Returns for each page whether it has no reader, so that it may be evicted.
        space: The pool's page space; None if pages need no content keys.

    Attributes:
        journal: Changes of the cached blocks, for routers.
        listener: Receives the same changes; None: nobody.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        is_unused: Callable[[PageIds], npt.NDArray[np.bool_]],
        space: PageSpace | None = None,
    ) -> None:
        self._page_size = page_size
        self._is_unused = is_unused
        self._space = space
        self._roots: dict[str, _Run] = {}
        # By number, least recently used first.
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        # For each page: the number of its run, 0 if it is not cached, and its position in the prefix.
        self._run_of = np.zeros(num_pages, np.int64)
        self._position_of = np.zeros(num_pages, np.int64)
        # Unsaved pages, least recently used first except that parents precede children.
        self._unsaved: OrderedDict[int, None] = OrderedDict()
        self._saving: set[int] = set()
        self._last_number = 0
        self.journal = PrefixJournal()
        self.listener: BlockListener | None = None

    def has(self, page_ids: PageIds) -> npt.NDArray[np.bool_]:
        """Return for each page whether it is cached."""
        return self._run_of[page_ids] > 0

    def match(self, token_ids: Sequence[int], salt: str = "") -> PrefixMatch:
        """Find the longest cached prefix, in whole pages. Only prefixes with the same salt match.

        The cache is not changed. The pages may be evicted until the caller holds them.

        Source: RadixAttention, Zheng et al. 2024, section 3; whole pages as in vLLM.
        """
        tokens = token_array(token_ids)
        path, num_pages = self._walk(tokens, salt)
        page_ids = list(islice(chain.from_iterable(run.page_ids for run in path), num_pages))
        end = (num_pages + 1) * self._page_size
        is_whole = len(tokens) < end
        frontier = None if is_whole else (salt, xxhash.xxh3_64_intdigest(tokens[:end]))
        return PrefixMatch(page_ids, num_pages * self._page_size, frontier)

    def insert(self, token_ids: Sequence[int], page_ids: Sequence[int], salt: str = "") -> None:
        """Cache the full pages of a sequence. The caller holds `page_ids`, which contain its KV.

        If a different page already caches the same prefix, that page stays, and the caller's page is not cached: it
        becomes free when released.
        """
        size = self._page_size
        num_pages = min(len(token_ids) // size, len(page_ids))
        tokens = token_array(token_ids)[: num_pages * size]
        path, num_cached = self._walk(tokens, salt)
        if num_cached == num_pages:
            return
        run = path[-1] if path else self._root(salt)
        if num_cached < run.end:
            run = self._split(run, num_cached - run.first)
        if run.parent is None or run.children:
            key = tokens[num_cached * size : (num_cached + 1) * size].tobytes()
            run = self._add_run(run, key, num_cached)
        self._extend(run, tokens, list(page_ids[num_cached:num_pages]))

    def touch(self, page_ids: PageIds) -> None:
        """Mark a chain as just used, leaf first, so that children are evicted before parents."""
        numbers = self._run_of[page_ids[::-1]]
        for number in numbers[np.flatnonzero(np.diff(numbers, prepend=0))].tolist():
            if number:
                self._runs.move_to_end(number)
        # Parents first, because a partly saved chain is useful only from its beginning.
        for page in page_ids.tolist() if self._unsaved else ():
            if page in self._unsaved:
                self._unsaved.move_to_end(page)

    def evict(self, num_pages: int) -> list[int]:
        """Remove up to `num_pages` pages without a reader, least recently used first, and return them."""
        taken: list[int] = []
        # A second pass, only if needed, also drops pages in use to reach the unused pages above them.
        for removes_used in (False, True):
            num_skipped, saving = 0, []
            while len(taken) < num_pages and num_skipped < len(self._runs):
                run = next(iter(self._runs.values()))
                evicted = self._evict_from(run, num_pages - len(taken), removes_used=removes_used)
                taken += evicted
                num_skipped = 0 if evicted else num_skipped + 1
                # Move skipped runs to the end, so that the next call does not skip them again.
                if not evicted:
                    self._runs.move_to_end(run.number)
                    if run.page_ids[-1] in self._saving:  # saving is not a use
                        saving.append(run.number)
            for number in reversed(saving):
                if number in self._runs:
                    self._runs.move_to_end(number, last=False)
        return taken

    # ── interface for tiers ──────────────────────────────────────────────────────────────────────

    @property
    def num_unsaved(self) -> int:
        """Number of pages that are not yet saved to a tier."""
        return len(self._unsaved)

    def missing(
        self, token_ids: Sequence[int], salt: str = "", at_least: int = 1
    ) -> MissingPages | None:
        """Return the full pages of a prompt that are not cached; None if there are fewer than `at_least`.

        The cache is not changed. The cached part of the prompt may be evicted at any time.
        """
        assert self._space is not None
        tokens = token_array(token_ids)
        first = self._walk(tokens, salt)[1]
        num_missing = len(tokens) // self._page_size - first
        if num_missing < at_least:
            return None
        return MissingPages(first, num_missing, page_keys(self._space, tokens, salt))

    def take_unsaved(self, num_pages: int, *, only_unused: bool) -> dict[int, PageKey]:
        """Return the least recently used unsaved pages with their keys, parents first.

        The caller must hold the pages until it calls `saved` for them.
        """
        taken: list[int] = []
        scanned = list(islice(self._unsaved, _SCANNED_PER_TAKEN * num_pages))
        is_unused = self._is_unused(np.array(scanned, np.int64)).tolist()
        for page, is_free in zip(scanned, is_unused, strict=True):
            if only_unused and not is_free:
                self._unsaved.move_to_end(page)  # so that the next call need not skip it
            elif len(taken) < num_pages:
                taken.append(page)
                del self._unsaved[page]
        taken.sort(key=self._position_of.__getitem__)
        self._saving.update(taken)
        return {page: self._page_key(page) for page in taken}

    def saved(self, page_ids: Iterable[int], *, is_saved: bool = True) -> None:
        """Record that pages were saved to tiers or, unless `is_saved`, that they are still unsaved."""
        for page in page_ids:
            self._saving.discard(page)
            if is_saved:
                self._unsaved.pop(page, None)
            elif self._run_of[page]:
                self._unsaved[page] = None
                self._unsaved.move_to_end(page, last=False)

    def _page_key(self, page: int) -> PageKey:
        run = self._runs[int(self._run_of[page])]
        index = int(self._position_of[page]) - run.first
        blocks = slice(self._num_blocks(run, index), self._num_blocks(run, index + 1))
        return PageKey(self._digests(run, index + 1)[index], tuple(run.names[blocks]))

    def _digests(self, run: _Run, num_pages: int) -> list[bytes]:
        """Return the digests of at least the first `num_pages` pages of a run."""
        path = [run]
        while (parent := path[-1].parent) and len(parent.digests) < len(parent.page_ids):
            path.append(parent)
        for each in reversed(path):
            assert each.parent is not None
            digest = (each.digests or each.parent.digests)[-1]
            end = num_pages if each is run else len(each.page_ids)
            for index in range(len(each.digests), end):
                start = index * self._page_size
                digest = next_digest(digest, each.token_ids[start : start + self._page_size])
                each.digests.append(digest)
        return run.digests

    # ── the tree ─────────────────────────────────────────────────────────────────────────────────

    def _walk(self, tokens: TokenArray, salt: str) -> tuple[list[_Run], int]:
        """Return the runs of the longest cached prefix, and its number of pages. The last run may exceed the prefix."""
        size, path, num_tokens = self._page_size, list[_Run](), 0
        run = self._roots.get(salt)
        while run is not None and num_tokens == run.end * size:
            run = run.children.get(tokens[num_tokens : num_tokens + size].tobytes())
            if run is not None:
                path.append(run)
                rest = tokens[num_tokens : num_tokens + len(run.token_ids)]
                num_tokens += num_equal(rest, run.token_ids) // size * size
        return path, num_tokens // size

    def _root(self, salt: str) -> _Run:
        if salt not in self._roots:
            root = self._roots[salt] = _Run(0, salt)
            root.names.append(root_name(salt))
            if self._space is not None:
                root.digests.append(self._space.root(salt))
        return self._roots[salt]

    def _add_run(self, parent: _Run, key: bytes, first: int) -> _Run:
        """Return a new run below `parent`, without pages. It replaces the child with this key."""
        self._last_number += 1
        run = _Run(self._last_number, parent.salt, parent, key, first)
        self._runs[run.number] = parent.children[key] = run
        return run

    def _extend(self, run: _Run, tokens: TokenArray, page_ids: list[int]) -> None:
        """Append pages to a run without children. `tokens` is the whole prefix, through the last of these pages."""
        size, start, end = self._page_size, run.end, run.end + len(page_ids)
        ids = np.array(page_ids, np.int64)
        assert not self.has(ids).any(), "a page is cached for two prefixes"
        self._run_of[ids], self._position_of[ids] = run.number, np.arange(start, end)
        before = _last_name(run)
        names = names_between(before, tokens, start * size, end * size)
        for number, name in enumerate(names, start * size // BLOCK_TOKENS):
            if self.journal.add(name) and self.listener is not None:
                block = tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
                self.listener.on_stored(name, before if number else None, block, run.salt)
            before = name
        run.names += names
        run.token_ids += tokens[start * size :]
        run.page_ids += page_ids
        if self._space is not None:
            self._unsaved.update(dict.fromkeys(page_ids))

    def _split(self, run: _Run, num_pages: int) -> _Run:
        """Move the first pages of a run to a new run above it, and return that."""
        assert run.parent is not None
        above = self._add_run(run.parent, run.key, run.first)
        num_tokens, num_blocks = num_pages * self._page_size, self._num_blocks(run, num_pages)
        above.token_ids, run.token_ids = run.token_ids[:num_tokens], run.token_ids[num_tokens:]
        above.page_ids, run.page_ids = run.page_ids[:num_pages], run.page_ids[num_pages:]
        above.names, run.names = run.names[:num_blocks], run.names[num_blocks:]
        above.digests, run.digests = run.digests[:num_pages], run.digests[num_pages:]
        self._run_of[np.array(above.page_ids, np.int64)] = above.number
        run.parent, run.first = above, above.end
        run.key = run.token_ids[: self._page_size].tobytes()
        above.children[run.key] = run
        return above

    def _evict_from(self, run: _Run, num_pages: int, *, removes_used: bool) -> list[int]:
        """Remove up to `num_pages` pages without a reader from the end of a run, and return them, last first.

        Args:
            removes_used: Drop the pages in use that follow an unused page, in this run and in its descendants, so that
                the unused page can be evicted.
        """
        if removes_used:
            below = _below(run)
            unused, *unused_below = [
                np.flatnonzero(self._is_unused(np.array(each.page_ids, np.int64)))
                for each in (run, *below)
            ]
            if not len(unused) or any(map(len, unused_below)):
                return []  # unused pages further down are evicted first
            for child in below:
                self._remove(child, 0)
            self._remove(run, int(unused[-1]) + 1)
        if run.children:
            return []
        last = run.page_ids[-num_pages:]
        used = np.flatnonzero(~self._is_unused(np.array(last, np.int64)))
        num_unused = len(last) - (int(used[-1]) + 1 if len(used) else 0)
        return self._remove(run, len(run.page_ids) - num_unused)

    def _remove(self, run: _Run, num_kept: int) -> list[int]:
        """Remove the pages of a run after the first `num_kept`, and return them, last first."""
        removed, num_blocks = run.page_ids[num_kept:][::-1], self._num_blocks(run, num_kept)
        self._run_of[np.array(removed, np.int64)] = 0
        for page in removed if self._unsaved else ():
            self._unsaved.pop(page, None)
        for name in run.names[num_blocks:]:
            if self.journal.remove(name) and self.listener is not None:
                self.listener.on_removed(name)
        del run.page_ids[num_kept:], run.names[num_blocks:], run.digests[num_kept:]
        del run.token_ids[num_kept * self._page_size :]
        if not num_kept:
            assert run.parent is not None
            del self._runs[run.number], run.parent.children[run.key]
            if run.parent.parent is None and not run.parent.children:
                del self._roots[run.salt]
        return removed

    def _num_blocks(self, run: _Run, num_pages: int) -> int:
        """Return the number of blocks that end in the first pages of a run."""
        start, end = run.first * self._page_size, (run.first + num_pages) * self._page_size
        return end // BLOCK_TOKENS - start // BLOCK_TOKENS


def _below(run: _Run) -> list[_Run]:
    """Return all runs below a run, parents first."""
    found = [*run.children.values()]
    for child in found:
        found += child.children.values()
    return found


def _last_name(run: _Run) -> int:
    """Return the name of the last block that ends in a run or before it."""
    while run.parent is not None and not run.names:
        run = run.parent
    return run.names[-1]


def num_equal(one: TokenArray, other: TokenArray) -> int:
    """Return the length of the common prefix of two sequences that are not empty."""
    length = min(len(one), len(other))
    pairs = [np.frombuffer(each, np.int64, length) for each in (one, other)]
    differing = np.flatnonzero(pairs[0] != pairs[1])
    return int(differing[0]) if len(differing) else length
