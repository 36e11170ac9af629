"""Which full pages hold the KV of which prefix. Pure: knows page ids, not their bytes.

A node of the tree is one full page, found by its parent's number and its own tokens. Chains are
released leaf first, so eviction, which takes the least recently used from one ordered dict, meets a
child before its parent and needs no tree walk. A child that does lose its parent (its request held a
copy of the parent's page) is never found again, since numbers are not reused, and is evicted in turn.

Routers follow what is cached by the names of its blocks (`journal`), so that they can send a prompt to where
the beginning of it is.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.prefix_journal import PrefixJournal
from wire.prefix_blocks import BLOCK_TOKENS, next_name, root_name

# Parent's node number (for a first page: the salt), tokens of the page.
Key = tuple[int | str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A cached prefix, in whole pages.

    Attributes:
        page_ids: Pages of the prefix in order.
        num_tokens: `len(page_ids) * page_size`.
        frontier: Name of the first full page of the prompt that is not cached: equal for two prompts
            exactly when they go on with the same page. None when there is no such page.
    """

    page_ids: list[int]
    num_tokens: int
    frontier: Key | None = None


@dataclass(slots=True)
class _Node:
    number: int
    key: Key
    page: int
    # Of the blocks that end in this page.
    names: tuple[int, ...]


class PrefixCache:
    """A tree of cached pages.

    Args:
        page_size: Tokens in a page.
        is_unused: Tells whether a page has no reader, so that eviction may take it.

    Attributes:
        journal: What of it routers are told.
    """

    def __init__(self, page_size: int, is_unused: Callable[[int], bool]) -> None:
        self._page_size = page_size
        self._is_unused = is_unused
        self._by_key: dict[Key, _Node] = {}
        # Least recently used first.
        self._by_page: OrderedDict[int, _Node] = OrderedDict()
        self._last_number = 0
        self.journal = PrefixJournal()

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def match(self, token_ids: Sequence[int], salt: str = "") -> PrefixMatch:
        """Find the longest cached prefix, in whole pages.

        The cache is not changed. The pages stay valid only once they are held in the page pool:
        eviction may take them until then.

        Args:
            token_ids: The prompt. Shape (num_tokens,).
            salt: Prefixes are shared only under the same salt.

        Returns:
            The match; `num_tokens` is a multiple of the page size and may be 0.

        Source: RadixAttention, Zheng et al. 2024, section 3; whole pages as in vLLM.
        """
        pages: list[int] = []
        parent: int | str = salt
        for start in range(0, len(token_ids) - self._page_size + 1, self._page_size):
            key = (parent, tuple(token_ids[start : start + self._page_size]))
            node = self._by_key.get(key)
            if node is None:
                return PrefixMatch(pages, start, key)
            pages.append(node.page)
            parent = node.number
        return PrefixMatch(pages, len(pages) * self._page_size)

    def insert(self, token_ids: Sequence[int], page_ids: Sequence[int], salt: str = "") -> None:
        """Remember the full pages of a sequence that the caller holds.

        Where another page already holds the same prefix, that one stays and the caller's page is
        not cached (it goes free when released).

        Args:
            token_ids: Tokens whose KV is in the pages. Shape (num_tokens,).
            page_ids: Pages in order; those past the last full page are passed over.
        """
        parent: int | str = salt
        name = root_name(salt)
        for index in range(min(len(token_ids) // self._page_size, len(page_ids))):
            start = index * self._page_size
            key = (parent, tuple(token_ids[start : start + self._page_size]))
            node = self._by_key.get(key)
            if node is None:
                self._last_number += 1
                names = _names_ending(token_ids, start, start + self._page_size, name)
                node = _Node(self._last_number, key, page_ids[index], names)
                self._by_key[key] = node
                self._by_page[node.page] = node
                for new in names:
                    self.journal.add(new)
            parent = node.number
            if node.names:
                name = node.names[-1]

    def touch(self, page_ids: Sequence[int]) -> None:
        """Mark a released chain as just used, leaf first, so that parents outlive children."""
        for page in reversed(page_ids):
            if page in self._by_page:
                self._by_page.move_to_end(page)

    def evict(self, num_pages: int) -> list[int]:
        """Forget up to `num_pages` pages without a reader, least recently used first."""
        taken: list[int] = []
        in_use: list[int] = []
        for page in self._by_page:
            if len(taken) == num_pages:
                break
            (taken if self._is_unused(page) else in_use).append(page)
        for page in in_use:  # not to be met again next time; their place is set at their release
            self._by_page.move_to_end(page)
        for page in taken:
            node = self._by_page.pop(page)
            del self._by_key[node.key]
            for name in node.names:
                self.journal.remove(name)
        return taken


def _names_ending(token_ids: Sequence[int], start: int, end: int, name: int) -> tuple[int, ...]:
    """Return the names of the blocks that end behind `start` and up to `end`.

    Args:
        name: Of the last block that ends before.
    """
    names = []
    first_end = (start // BLOCK_TOKENS + 1) * BLOCK_TOKENS
    for block_end in range(first_end, end + 1, BLOCK_TOKENS):
        name = next_name(name, token_ids[block_end - BLOCK_TOKENS : block_end])
        names.append(name)
    return tuple(names)
