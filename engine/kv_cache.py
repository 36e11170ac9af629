"""The pool of pages and the prefix cache over it, as one owner of every page."""

from collections.abc import Sequence

from tandem.engine.pages import PageCounts, PagePool, PageState
from tandem.engine.prefix_cache import MissingPages, PrefixCache, PrefixMatch
from tandem.wire.page_keys import PageKey, PageSpace
from tandem.wire.prefix_journal import PrefixJournal


class KVCache:
    """Hands out pages and takes them back.

    Pages of a request are one list, in order: first those matched in the prefix cache, then its own.

    Args:
        space: What all its pages have in common; None where no tiers are behind it.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        is_prefix_cache_enabled: bool = True,
        space: PageSpace | None = None,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.space = space
        self._is_prefix_cache_enabled = is_prefix_cache_enabled
        self._prefixes = PrefixCache(page_size, self._is_unused, space)
        self._pool = PagePool(num_pages, self._prefixes.evict)

    def num_pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens`."""
        return -(-num_tokens // self.page_size)

    def match(self, token_ids: Sequence[int], salt: str = "") -> PrefixMatch:
        """Find and hold the longest cached prefix; give it back with `release`."""
        if not self._is_prefix_cache_enabled:
            return PrefixMatch([], 0)
        match = self._prefixes.match(token_ids, salt)
        self._pool.hold(match.page_ids)
        return match

    @property
    def journal(self) -> PrefixJournal:
        """What is in the prefix cache, as routers are told."""
        return self._prefixes.journal

    @property
    def num_available(self) -> int:
        """Pages that could be handed out now: free ones, and cached ones without a reader."""
        return self._pool.num_available

    def allocate(self, num_pages: int) -> list[int] | None:
        """Hold free pages; None when there are too few."""
        return self._pool.allocate(num_pages)

    def grant(self, num_pages: int) -> list[int] | None:
        """Set pages aside for a remote writer; None when there are too few."""
        return self._pool.grant(num_pages)

    def land(self, page_ids: Sequence[int]) -> None:
        """Take over granted pages: every byte has arrived."""
        self._pool.land(page_ids)

    def quarantine(self, page_ids: Sequence[int]) -> None:
        """Withdraw a grant whose writer has not confirmed."""
        self._pool.quarantine(page_ids)

    def reclaim(self, page_ids: Sequence[int]) -> None:
        """Free granted or quarantined pages: no write can arrive any more."""
        self._pool.reclaim(page_ids)

    def remember(self, token_ids: Sequence[int], page_ids: Sequence[int], salt: str = "") -> None:
        """Put the full pages of a held sequence into the prefix cache."""
        if self._is_prefix_cache_enabled:
            self._prefixes.insert(token_ids, page_ids, salt)

    def release(self, page_ids: Sequence[int]) -> None:
        """Drop one reader of each page; remembered ones stay cached."""
        self._prefixes.touch(page_ids)
        self._pool.release(page_ids, self._prefixes.__contains__)

    # ── for tiers behind it ──────────────────────────────────────────────────────────────────────

    @property
    def num_unsaved(self) -> int:
        """Cached pages that no tier has been given."""
        return self._prefixes.num_unsaved

    def missing(
        self, token_ids: Sequence[int], salt: str = "", at_least: int = 1
    ) -> MissingPages | None:
        """See `PrefixCache.missing`."""
        return self._prefixes.missing(token_ids, salt, at_least)

    def adopt(
        self,
        token_ids: Sequence[int],
        matched: Sequence[int],
        placed: Sequence[int],
        salt: str = "",
        *,
        is_saved: bool,
    ) -> None:
        """Put pages that came from a tier into the prefix cache, and drop a reader of all pages named.

        Args:
            matched: Pages of the prefix that were in the cache, as `match` held them.
            placed: Full pages that follow, as `allocate` held them.
            is_saved: Whether tiers need not be given them again.
        """
        page_ids = [*matched, *placed]
        self._prefixes.insert(token_ids, page_ids, salt)
        if is_saved:
            self._prefixes.saved(placed)
        self.release(page_ids)

    def begin_save(self, num_pages: int, *, only_unused: bool) -> dict[int, PageKey]:
        """Hold cached pages that no tier has been given, until `end_save`; they keep their place in eviction.

        Args:
            num_pages: At most.
            only_unused: Leave those out that a request reads.

        Returns:
            Their keys by page, parents first.
        """
        taken = self._prefixes.take_unsaved(num_pages, only_unused=only_unused)
        self._pool.hold(taken)
        return taken

    def end_save(self, page_ids: Sequence[int], *, is_saved: bool = True) -> None:
        """Drop the reader that `begin_save` added; pages that are not saved are offered again."""
        self._prefixes.saved(page_ids, is_saved=is_saved)
        self._pool.release(page_ids, self._prefixes.__contains__)

    def flush(self) -> int:
        """Free every cached page without a reader; return how many."""
        evicted = self._prefixes.evict(self.num_pages)
        self._pool.forget(evicted)
        return len(evicted)

    def counts(self) -> PageCounts:
        """Return how many pages are in each state."""
        return self._pool.counts()

    def check_integrity(self) -> None:
        """Raise `PageStateError` unless every page is in exactly one state."""
        self._pool.check_integrity()

    def _is_unused(self, page: int) -> bool:
        return self._pool.state(page) is PageState.CACHED
