"""The interface of a tier and of the pool behind it. The stack's worker threads call a tier."""

import math
from collections.abc import Sequence
from typing import Protocol

from tandem.kvtier.memory import Loan
from tandem.wire.errors import TandemError
from tandem.wire.messages import TierLoad
from tandem.wire.prefixes import PageKey, PrefixJournal

NEVER_S = math.inf


class TierFailed(TandemError, code="tier_failed", status=503):
    """A tier is unreachable, slow or rejects calls. The node retries later; requests continue without the tier."""


class PoolPages(Protocol):
    """The bytes of a pool's pages. Any thread may call it, for pages that the caller holds during the call."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        ...

    def read(self, page_ids: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy pages out of the pool. Returns once the bytes have arrived."""
        ...

    def write(self, page_ids: Sequence[int], pages: Sequence[memoryview]) -> None:
        """Copy pages into the pool. A forward that begins after the return reads the new bytes."""
        ...

    def host_memory(self, num_bytes: int) -> memoryview:
        """Return memory for fast copies of pages: pinned, if the pool is on a GPU."""
        ...


class Tier(Protocol):
    """A store of pages. Several threads may call it at once; each call may take long.

    A separate package adds a tier by an entry point in the group `tandem.kv_tiers`. Its name is the scheme of
    the tier's URLs. It is a module with `parse_url` and `open_tier` (see `spec.py`).
    """

    @property
    def name(self) -> str:
        """A name unique on the node: the kind, such as `host`; the second tier of a kind is `host2`."""
        ...

    @property
    def lends_own_memory(self) -> bool:
        """Whether loans are views of the tier's own memory, which do not count towards the stack's budget."""
        ...

    @property
    def journal(self) -> PrefixJournal:
        """Blocks whose pages this node has stored or found here."""
        ...

    def get(self, keys: Sequence[PageKey], deadline_s: float = NEVER_S) -> Loan:
        """Return the leading pages that are stored here, verified. Corrupted pages are removed and counted.

        Args:
            deadline_s: Time of `time.monotonic` at which to return the pages read so far.

        Raises:
            TierFailed: The tier failed before the first page.
        """
        ...

    def put(self, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> int:
        """Store pages in order, evicting others; return how many were new.

        Pages already stored are only marked as used. The caller may reuse the views on return.

        Raises:
            TierFailed: The tier does not respond.
        """
        ...

    def load(self) -> TierLoad:
        """Return the tier's own gauges and counters. Never blocks."""
        ...

    def close(self) -> None:
        """Release memory and connections. Pages in a shared store stay."""
        ...
