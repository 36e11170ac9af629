"""What one tier is, and what it is given. No threads here: the stack's workers call a tier."""

import math
from collections.abc import Sequence
from typing import Protocol

from tandem.kvtier.memory import Loan
from tandem.wire.errors import TandemError
from tandem.wire.messages import TierLoad
from tandem.wire.prefixes import PageKey, PrefixJournal

NEVER_S = math.inf


class TierFailed(TandemError, code="tier_failed", status=503):
    """A tier is away, slow or rejects calls. The node retries it later; no request fails."""


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


class Tier(Protocol):
    """A place for pages. Any thread may call it, several at once; each call may take long.

    Packages of their own add tiers by an entry point of the group `tandem.kv_tiers`, named as the scheme of
    their URLs: a function `(spec: TierSpec, pages: PoolPages, space: PageSpace) -> Tier`.
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

    def get(self, keys: Sequence[PageKey], deadline_s: float = NEVER_S) -> Loan:
        """Return the leading pages that are here, whole and checked; wrong ones are removed and counted.

        Args:
            deadline_s: When to return what has come, by `time.monotonic`.

        Raises:
            TierFailed: The tier does not answer, and no page came.
        """
        ...

    def put(self, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> int:
        """Keep pages, in order, evicting others; return how many were new here.

        Pages that are here already are only marked as used. The views are the caller's again on return.

        Raises:
            TierFailed: The tier does not answer.
        """
        ...

    def load(self) -> TierLoad:
        """Return what the tier holds and did, as far as it counts itself. Any thread; never waits."""
        ...

    def close(self) -> None:
        """Release memory and connections. What others can read stays."""
        ...
