"""One part of a room at prefill: what the role gave to push, and where it goes. No sockets."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import msgspec

from tandem.kvtransfer.bootstrap import DecodeLink
from tandem.kvtransfer.checksum import PushSums
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.parts import RoomParts
from tandem.kvtransfer.plan import CopyPlan, PagedTokens, plan_copies
from tandem.kvtransfer.push_worker import PushWorker
from tandem.kvtransfer.session import SenderState, Session, sender_session
from tandem.kvtransfer.transfer_times import PushTimes
from tandem.wire.errors import TransferRefused
from tandem.wire.hand_off import Grant, Landed
from tandem.wire.ids import Room


@dataclass(frozen=True, slots=True)
class Push:
    """Own pages to push, which hold the prompt's pages `first_page_index` on.

    Attributes:
        layers: Those that are computed; None means all.
    """

    page_ids: Sequence[int]
    first_page_index: int
    layers: range | None = None


class PushParts(RoomParts):
    """The parts of one room.

    Attributes:
        is_expected: Whether the role asked for the room. From then on it has all its parts.
        pushed_bytes: Of the parts that are done.
        times: Since the role asked for it.
    """

    is_expected = False
    pushed_bytes = 0

    def __init__(self, room: Room) -> None:
        super().__init__(room)
        self.times = PushTimes()

    def expect(self, now_s: float) -> None:
        """The role asked for the room."""
        self.is_expected = True
        self.times = PushTimes(expected_s=now_s)
        if self.has_ended:
            self.reopen()
            self.pushed_bytes = 0


@dataclass(slots=True)
class PushRoom:
    """Everything known of one part.

    Attributes:
        deadline_s: When the half that is missing is given up.
        link: Who granted, once somebody has.
        pending: Pushes that came before the grant.
        landed: What to say at the end, once the role has finished.
        num_layers_pushed: Of the run of own pages that begins at this place in the prompt.
        own_pages: By their place in the prompt, own pages of which every layer was pushed.
        sums: Of what is pushed; None where nothing is hashed. Used by the worker alone.
        refusal: Of one of its jobs; no other is done after that. Used by the worker alone.
    """

    deadline_s: float
    session: Session[SenderState] = field(default_factory=sender_session)
    link: DecodeLink | None = None
    grant: Grant | None = None
    pending: list[Push] = field(default_factory=list)
    landed: Landed | None = None
    num_layers_pushed: dict[int, int] = field(default_factory=dict)
    own_pages: dict[int, int] = field(default_factory=dict)
    sums: PushSums | None = None
    refusal: TransferRefused | None = None
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

    def take(self, push: Push, layout: KVLayout) -> tuple[PagedTokens, range]:
        """Return the own pages of a push and their layers that were not pushed before."""
        first, num_layers = push.first_page_index, layout.num_layers
        begin = self.num_layers_pushed.get(first, 0)
        end = num_layers if push.layers is None else push.layers.stop
        layers = range(begin, max(begin, end))
        self.num_layers_pushed[first] = layers.stop
        if layers.stop == num_layers:
            self.own_pages.update(enumerate(push.page_ids, first))
        return PagedTokens(layout, push.page_ids, first * layout.page_size), layers

    def twin(self) -> "PushRoom":
        """Return the same for another link. Only before it is granted."""
        assert self.grant is None
        return PushRoom(
            self.deadline_s, copy(self.session), pending=list(self.pending), landed=self.landed
        )

    def plan(self, own: PagedTokens, layers: range) -> CopyPlan:
        """Return the copies for own pages: from what decode has not, to the end of its grant.

        Raises:
            TransferRefused: There are no such pages or layers in the own pool.
        """
        assert self.link is not None
        theirs, heads = self.destination, self.link.heads
        begin = max(own.first_token, theirs.first_token)
        tokens = range(begin, max(begin, min(own.end_token, theirs.end_token)))
        try:
            plan = plan_copies(own, theirs, tokens, heads, layers)
        except ValueError as error:
            raise TransferRefused(f"cannot push: {error}") from error
        self.pushed_bytes += plan.total_bytes
        return plan

    def check_complete(self, page_size: int) -> None:
        """Make sure that every granted page was pushed into, with every layer.

        Raises:
            TransferRefused: Decode granted for another prompt than prefill ran.
        """
        theirs, end_token = self.destination, self.end_token(page_size)
        first_tokens = range(theirs.first_token, theirs.end_token, theirs.layout.page_size)
        num_missing = sum(token >= end_token for token in first_tokens)
        if num_missing:
            first = len(first_tokens) - num_missing
            raise TransferRefused(
                f"{num_missing} granted pages were not pushed, the first is {first}"
            )

    def end_token(self, page_size: int) -> int:
        """Return one past the last token pushed without a gap, in own pages of `page_size`."""
        index = self.destination.first_token // page_size
        while index in self.own_pages:
            index += 1
        return min(index * page_size, self.destination.end_token)

    def sum_up(self, layout: KVLayout) -> None:
        """Add the checksums to what will be said. Called by the worker, after `check_complete`."""
        if self.sums is None or not self.destination.page_ids:
            return
        assert self.landed is not None
        end_token = self.end_token(layout.page_size)
        sums = self.sums.finish(self.own_pages, layout, end_token)
        self.landed = msgspec.structs.replace(self.landed, checksums=sums, end_token=end_token)


def grant_fault(grant: Grant, layout: KVLayout) -> str:
    """Return what is wrong with a grant in a pool of `layout`, or an empty string."""
    if grant.have_tokens < 0 or grant.have_tokens % layout.page_size:
        return f"have_tokens {grant.have_tokens} is not whole pages of {layout.page_size}"
    if len(set(grant.page_ids)) != len(grant.page_ids):
        return "a page is granted twice"
    if any(not 0 <= page < layout.num_pages for page in grant.page_ids):
        return f"a granted page is outside the pool of {layout.num_pages}"
    return ""
