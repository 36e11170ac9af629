"""One room at prefill: what the role gave to push, and the jobs that push it. No sockets."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvtransfer.bootstrap import DecodeLink
from kvtransfer.checksum import page_checksums
from kvtransfer.layout import KVLayout
from kvtransfer.plan import CopyPlan, PagedTokens, plan_copies
from kvtransfer.push_worker import PushWorker
from kvtransfer.region import MemoryRegion
from kvtransfer.session import SenderState, Session, sender_session
from wire.errors import TransferRefused
from wire.messages import Grant, Landed


@dataclass(slots=True)
class PushRoom:
    """Everything known of a room.

    Attributes:
        deadline_s: When the half that is missing is given up.
        link: Who granted, once somebody has.
        pending: First page index and own pages of each push that came before the grant.
        landed: What to say at the end, once the role has finished.
        sources: Which own page fills which granted one, by index in the grant.
    """

    deadline_s: float
    session: Session[SenderState] = field(default_factory=sender_session)
    link: DecodeLink | None = None
    grant: Grant | None = None
    pending: list[tuple[int, Sequence[int]]] = field(default_factory=list)
    landed: Landed | None = None
    sources: dict[int, int] = field(default_factory=dict)
    pushed_bytes: int = 0

    @property
    def destination(self) -> PagedTokens:
        """Where the prompt goes. Only once it is granted."""
        assert self.grant is not None
        assert self.link is not None
        return PagedTokens(self.link.layout, self.grant.page_ids, self.grant.have_tokens)

    @property
    def worker(self) -> PushWorker:
        """Who writes. Only once it is granted."""
        assert self.link is not None
        return self.link.worker

    def plan(self, own: PagedTokens) -> CopyPlan:
        """Return the copies for own pages: from what decode has not, to the end of its grant.

        Raises:
            TransferRefused: There are no such pages in the own pool.
        """
        theirs = self.destination
        begin = max(own.first_token, theirs.first_token)
        tokens = range(begin, max(begin, min(own.end_token, theirs.end_token)))
        try:
            plan = plan_copies(own, theirs, tokens)
        except ValueError as error:
            raise TransferRefused(f"cannot push: {error}") from error
        self._note_sources(own, theirs, tokens)
        self.pushed_bytes += plan.total_bytes
        return plan

    def check_complete(self) -> None:
        """Make sure that something was pushed into every granted page.

        Raises:
            TransferRefused: Decode granted for another prompt than prefill ran.
        """
        missing = set(range(len(self.destination.page_ids))) - self.sources.keys()
        if missing:
            raise TransferRefused(
                f"{len(missing)} granted pages were not pushed, the first is {min(missing)}"
            )

    def sum_up(self, layout: KVLayout, region: MemoryRegion) -> None:
        """Add the checksums of the granted pages to what will be said. Called by the worker.

        Pages of another size get none: we do not know the bytes between our tokens.
        """
        assert self.landed is not None
        if not layout.has_same_pages(self.destination.layout):
            return
        pages = [self.sources[index] for index in sorted(self.sources)]
        sums = page_checksums(region, layout.page_bytes, pages)
        self.landed = msgspec.structs.replace(self.landed, checksums=sums)

    def _note_sources(self, own: PagedTokens, theirs: PagedTokens, tokens: range) -> None:
        if not tokens:
            return
        size = theirs.layout.page_size
        first = (tokens.start - theirs.first_token) // size
        last = (tokens.stop - 1 - theirs.first_token) // size
        for index in range(first, last + 1):
            token = max(tokens.start, theirs.first_token + index * size)
            page = (token - own.first_token) // own.layout.page_size
            self.sources[index] = own.page_ids[page]


def grant_fault(grant: Grant, layout: KVLayout) -> str:
    """Return what is wrong with a grant in a pool of `layout`, or an empty string."""
    if grant.have_tokens < 0 or grant.have_tokens % layout.page_size:
        return f"have_tokens {grant.have_tokens} is not whole pages of {layout.page_size}"
    if len(set(grant.page_ids)) != len(grant.page_ids):
        return "a page is granted twice"
    if any(not 0 <= page < layout.num_pages for page in grant.page_ids):
        return f"a granted page is outside the pool of {layout.num_pages}"
    return ""
