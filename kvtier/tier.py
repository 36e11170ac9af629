"""What one tier is, and what it is given. No threads here: a tier is called by the stack's workers."""

from collections.abc import Sequence
from typing import Protocol

from tandem.wire.prefixes import PageKey, PrefixJournal

from tandem.wire.errors import TandemError
from tandem.wire.messages import TierLoad


class TierFailed(TandemError):
    """A tier could not be asked: it is away, slow or refuses. It is tried again later; no request fails by it."""

    code = "tier_failed"
    status = 503


class PoolPages(Protocol):
    """The bytes of a pool's pages. Any thread may call it, for pages that are held meanwhile."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        ...

    def read(self, page_ids: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy pages out of the pool; returns when the bytes are there."""
        ...

    def write(self, page_ids: Sequence[int], pages: Sequence[memoryview]) -> None:
        """Copy pages into the pool; returns when a forward would see them."""
        ...

    def host_memory(self, num_bytes: int) -> memoryview:
        """Return memory that pages are copied from and to fast: pinned, where there is a device."""
        ...


class Loan(Protocol):
    """Pages of a tier, readable until `close`."""

    @property
    def pages(self) -> Sequence[memoryview]:
        """One for each leading key that was found; each of `page_bytes`, checked against its checksum."""
        ...

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        ...


class Tier(Protocol):
    """A place for pages. All its calls may take long, and none is made by an engine's loop.

    `get` and `has` stop at the first key that is not there: what comes behind it has no use without it.
    Any thread of the stack may call it, several at once.
    """

    @property
    def name(self) -> str:
        """Unique on a node: its kind, such as `host`, with a number where there are several."""
        ...

    @property
    def lends_own_memory(self) -> bool:
        """Whether its loans are of memory that it keeps anyway: they take none of the stack's."""
        ...

    @property
    def journal(self) -> PrefixJournal:
        """The blocks of which pages are here, as far as this node put or got them."""
        ...

    def has(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading keys are here.

        Raises:
            TierFailed: It cannot be told.
        """
        ...

    def get(self, keys: Sequence[PageKey]) -> Loan:
        """Return the leading pages that are here, whole and right; others are removed and counted.

        Raises:
            TierFailed: It cannot be told.
        """
        ...

    def put(self, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> int:
        """Keep pages, in order, evicting others; return how many were new here.

        What is there already is not written again, only marked as used. The views are the caller's again
        on return.

        Raises:
            TierFailed: It takes none now: away, or full for good.
        """
        ...

    def load(self) -> TierLoad:
        """Return what is in it and was done, as far as the tier itself counts. Any thread, never waits."""
        ...

    def close(self) -> None:
        """Let go of memory and connections. What others can read stays."""
        ...
