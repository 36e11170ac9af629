"""The tree of cached prefixes, which maps tokens to ids of full pages.

A tree node is a full page, found by its parent's number and its own tokens. Chains are released leaf first.
Eviction takes the least recently used page of an ordered dict, so it reaches a child before its parent without
walking the tree. A child can lose its parent if its request held a different copy of the parent's page. Such a
child is never found again, because numbers are not reused, and is eventually evicted.

The names of cached blocks are sent to routers (`journal`), which use them to send a prompt to a node that caches
its prefix.

With tiers (`space` is set), each page also has a content key, and the cache tracks which pages are saved to a tier:

```
 insert ──▶ unsaved ──take_unsaved──▶ saving ──saved──▶ saved
               ▲ └── evict ──▶ gone      └── not saved ──┐
               └─────────────────────────────────────────┘
```
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from tandem.wire.prefixes import (
    BLOCK_TOKENS,
    PageChain,
    PageKey,
    PageSpace,
    PrefixJournal,
    next_name,
    root_name,
)

# Node number of the parent (for a first page, the salt), and the page's tokens.
Key = tuple[int | str, tuple[int, ...]]

# Unsaved pages to inspect per page to take, because pages in use are skipped.
_SCANNED_PER_TAKEN = 4


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A cached prefix, in whole pages.

    Attributes:
        page_ids: Pages of the prefix in order.
        num_tokens: `len(page_ids) * page_size`.
        frontier: Key of the prompt's first full page that is not cached; None if there is none. It is equal for two
            prompts exactly if they continue with the same page.
    """

    page_ids: list[int]
    num_tokens: int
    frontier: Key | None = None


@dataclass(frozen=True, slots=True)
class MissingPages:
    """Keys of the full pages of a prompt that are not cached, starting at page `first_page`."""

    first_page: int
    keys: list[PageKey]


@dataclass(slots=True)
class _TreeNode:
    number: int
    key: Key
    page: int
    # Names of the blocks that end in this page and, with tiers, the digest of the prefix through this page.
    content: PageKey


class PrefixCache:
    """A tree of cached pages.

    Args:
        page_size: Tokens in a page.
        is_unused: Returns whether a page has no reader, so that it may be evicted.
        space: The pool's page space; None if pages need no content keys.

    Attributes:
        journal: Changes of the cached blocks, for routers.
    """

    def __init__(
        self, page_size: int, is_unused: Callable[[int], bool], space: PageSpace | None = None
    ) -> None:
        self._page_size = page_size
        self._is_unused = is_unused
        self._space = space
        self._by_key: dict[Key, _TreeNode] = {}
        # Least recently used first.
        self._by_page: OrderedDict[int, _TreeNode] = OrderedDict()
        # Unsaved pages, in the same order except that parents precede children.
        self._unsaved: OrderedDict[int, None] = OrderedDict()
        self._saving: set[int] = set()
        self._last_number = 0
        self.journal = PrefixJournal()

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def match(self, token_ids: Sequence[int], salt: str = "") -> PrefixMatch:
        """Find the longest cached prefix, in whole pages. Only prefixes with the same salt match.

        The cache is not changed. The pages may be evicted until the caller holds them.

        Source: RadixAttention, Zheng et al. 2024, section 3; whole pages as in vLLM.
        """
        nodes, frontier = self._walk(token_ids, salt)
        return PrefixMatch([node.page for node in nodes], len(nodes) * self._page_size, frontier)

    def insert(self, token_ids: Sequence[int], page_ids: Sequence[int], salt: str = "") -> None:
        """Cache the full pages of a sequence. The caller holds `page_ids`, which contain its KV.

        If a different page already caches the same prefix, that page stays, and the caller's page is not cached: it
        becomes free when released.
        """
        parent: int | str = salt
        name, digest = root_name(salt), self._root(salt)
        for index in range(min(len(token_ids) // self._page_size, len(page_ids))):
            start = index * self._page_size
            key = (parent, tuple(token_ids[start : start + self._page_size]))
            node = self._by_key.get(key)
            if node is None:
                self._last_number += 1
                content = self._content(token_ids, start, name, digest)
                node = _TreeNode(self._last_number, key, page_ids[index], content)
                orphan = self._by_page.get(node.page)
                if (
                    orphan is not None
                ):  # the page is cached under a removed parent; replace that node
                    self._remove(orphan)
                elif self._space is not None:
                    self._unsaved[node.page] = None
                self._by_key[key] = node
                self._by_page[node.page] = node
                for new in content.blocks:
                    self.journal.add(new)
            parent, digest = node.number, node.content.digest
            if node.content.blocks:
                name = node.content.blocks[-1]

    def touch(self, page_ids: Sequence[int]) -> None:
        """Mark a chain as just used, leaf first, so that children are evicted before parents."""
        for page in reversed(page_ids):
            if page in self._by_page:
                self._by_page.move_to_end(page)
        # Parents first, because a partly saved chain is useful only from its beginning.
        for page in page_ids if self._unsaved else ():
            if page in self._unsaved:
                self._unsaved.move_to_end(page)

    def evict(self, num_pages: int) -> list[int]:
        """Remove up to `num_pages` pages without a reader, least recently used first, and return them."""
        taken: list[int] = []
        in_use: list[int] = []
        for page in self._by_page:
            if len(taken) == num_pages:
                break
            (taken if self._is_unused(page) else in_use).append(page)
        # Move skipped pages to the end, so that the next call does not skip them again; `touch` moves them on release.
        for page in in_use:
            if page not in self._saving:  # saving is not a use
                self._by_page.move_to_end(page)
        for page in taken:
            node = self._by_page.pop(page)
            self._unsaved.pop(page, None)
            self._remove(node)
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
        nodes, _ = self._walk(token_ids, salt)
        first, num_pages = len(nodes), len(token_ids) // self._page_size
        if num_pages - first < at_least:
            return None
        names = (node.content.blocks[-1] for node in reversed(nodes) if node.content.blocks)
        digest = nodes[-1].content.digest if nodes else self._root(salt)
        chain = PageChain(digest, next(names, root_name(salt)))
        starts = range(first * self._page_size, num_pages * self._page_size, self._page_size)
        return MissingPages(
            first, [chain.next(token_ids, start, self._page_size) for start in starts]
        )

    def take_unsaved(self, num_pages: int, *, only_unused: bool) -> dict[int, PageKey]:
        """Return the least recently used unsaved pages with their keys, parents first.

        The caller must hold the pages until it calls `saved` for them.
        """
        taken: list[int] = []
        for page in list(islice(self._unsaved, _SCANNED_PER_TAKEN * num_pages)):
            if only_unused and not self._is_unused(page):
                self._unsaved.move_to_end(page)  # so that the next call need not skip it
            elif len(taken) < num_pages:
                taken.append(page)
                del self._unsaved[page]
        taken.sort(key=lambda page: self._by_page[page].number)
        self._saving.update(taken)
        return {page: self._by_page[page].content for page in taken}

    def saved(self, page_ids: Iterable[int], *, is_saved: bool = True) -> None:
        """Record that pages were saved to tiers or, unless `is_saved`, that they are still unsaved."""
        for page in page_ids:
            self._saving.discard(page)
            if is_saved:
                self._unsaved.pop(page, None)
            elif page in self._by_page:
                self._unsaved[page] = None
                self._unsaved.move_to_end(page, last=False)

    def _walk(self, token_ids: Sequence[int], salt: str) -> tuple[list[_TreeNode], Key | None]:
        """Return the nodes of the longest cached prefix, and the key of the first full page after it."""
        nodes: list[_TreeNode] = []
        parent: int | str = salt
        for start in range(0, len(token_ids) - self._page_size + 1, self._page_size):
            key = (parent, tuple(token_ids[start : start + self._page_size]))
            node = self._by_key.get(key)
            if node is None:
                return nodes, key
            nodes.append(node)
            parent = node.number
        return nodes, None

    def _remove(self, node: _TreeNode) -> None:
        del self._by_key[node.key]
        for name in node.content.blocks:
            self.journal.remove(name)

    def _root(self, salt: str) -> bytes:
        return b"" if self._space is None else self._space.root(salt)

    def _content(self, token_ids: Sequence[int], start: int, name: int, digest: bytes) -> PageKey:
        """Return the key of the page at `start`. `name` and `digest` are of the previous block and page."""
        if self._space is not None:
            return PageChain(digest, name).next(token_ids, start, self._page_size)
        return PageKey(b"", _names_ending(token_ids, start, start + self._page_size, name))


def _names_ending(token_ids: Sequence[int], start: int, end: int, name: int) -> tuple[int, ...]:
    """Return the names of the blocks that end after `start` and not after `end`. `name` is the previous block's."""
    names = []
    first_end = (start // BLOCK_TOKENS + 1) * BLOCK_TOKENS
    for block_end in range(first_end, end + 1, BLOCK_TOKENS):
        name = next_name(name, token_ids[block_end - BLOCK_TOKENS : block_end])
        names.append(name)
    return tuple(names)
