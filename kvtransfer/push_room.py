"""What prefill has to push, and where it goes: a room, its parts, and layers while they are computed.

```
 decode, --tp 2   room ─┬─ part 0 ── link ──▶ rank 0      ┐ each part is a hand-off of its own, with
                        └─ part 1 ── link ──▶ rank 1      ┘ a session; the role sees one of them
```

Until it is known how many ranks of decode our heads go to, a room has one part, which stands for all.

```
 forward begins ─▶ push_by_layer(runs) ─▶ wrote(0) wrote(1) ... ─▶ forward ends ─▶ push: what is left
                                          └─ every so many layers: push(run, layers)
```

Nothing depends on `wrote`: a forward that reports no layers is pushed as a whole. No sockets here.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field

import msgspec

from tandem.kvtransfer.bootstrap import DecodeLink
from tandem.kvtransfer.checksum import page_sums, sampled_slabs
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import CopyPlan, PagedTokens, Route
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.session import SenderState, Session, sender_session
from tandem.wire.errors import TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import Grant, Landed

# ── layers while they are computed ───────────────────────────────────────────────────────────────

Wrote = Callable[[int], None]
"""Called with a layer's number once its K and V are in the pool; layers come in order."""

# Layers are put together until a push has as much. What a push costs beside the copy (two threads are
# woken, copies are planned) is then small: with 4 MiB on two busy cores pushes of a 1k prompt fell
# behind its layers, with 8 MiB they do not. The last pushes of a forward halve, down to a quarter of
# it: nothing is computed any more beside the very last.
LEAST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PageRun:
    """Own pages of a room that a forward completes: the prompt's pages `first_page_index` on."""

    room: Room
    page_ids: Sequence[int]
    first_page_index: int


LayerPush = Callable[[Room, Sequence[int], int, range | None], None]
"""`PrefillAgent.push`: queues the layers that are computed and were not pushed yet."""


def layers_at_a_time(runs: Sequence[PageRun], layout: KVLayout, least_bytes: int) -> int:
    """Return how many layers of these pages have that many bytes."""
    num_pages = sum(len(run.page_ids) for run in runs)
    if not num_pages:
        return layout.num_layers
    return min(
        layout.num_layers, -(-least_bytes * layout.num_layers // (num_pages * layout.page_bytes))
    )


def push_by_layer(
    push: LayerPush, runs: Sequence[PageRun], layout: KVLayout, least_bytes: int = LEAST_BYTES
) -> Wrote:
    """Return what a forward that completes `runs` calls. Any one thread may."""
    enough = layers_at_a_time(runs, layout, least_bytes)
    least = layers_at_a_time(runs, layout, least_bytes // 4)
    num_pushed = 0

    def wrote(layer: int) -> None:
        nonlocal num_pushed
        num_written = layer + 1
        num_left = layout.num_layers - num_written
        if num_written - num_pushed >= min(enough, max(num_left, least)) or not num_left:
            num_pushed = num_written
            for run in runs:
                push(run.room, run.page_ids, run.first_page_index, range(num_written))

    return wrote


# ── rooms ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Push:
    """Own pages to push, which hold the prompt's pages `first_page_index` on.

    Attributes:
        layers: Those that are computed; None means all.
    """

    page_ids: Sequence[int]
    first_page_index: int
    layers: range | None = None


class PushRoom:
    """One request at prefill, over all links that it goes over.

    Attributes:
        is_expected: Whether the role asked for the room. From then on it has all its parts.
        parts: Those that are not over, by number.
        num_parts: How many there are in all, as far as it is known.
        num_granted, num_landed, pushed_bytes: Over all parts, since the role asked for the room.
        expected_s, pushed_s, finished_s: When the role asked for the room, pushed its first pages, and
            had pushed all; None before.
    """

    def __init__(self, room: Room) -> None:
        self.room = room
        self.is_expected = False
        self.parts: dict[int, PushPart] = {}
        self.num_parts = 1
        self._is_spread = False  # whether it is known how many parts there are
        self.num_granted = self.num_landed = self.pushed_bytes = 0
        self.expected_s: float | None = None
        self.pushed_s: float | None = None
        self.finished_s: float | None = None

    def expect(self, now_s: float, deadline_s: float) -> list["PushPart"]:
        """The role asked for the room, perhaps again: return all its parts.

        Args:
            deadline_s: Of the parts that nobody granted yet.
        """
        self.is_expected = True
        self.num_granted = self.num_landed = self.pushed_bytes = 0
        self.expected_s, self.pushed_s, self.finished_s = now_s, None, None
        for number in range(self.num_parts):
            if number not in self.parts:
                self.parts[number] = PushPart(self, number, deadline_s)
        return list(self.parts.values())

    def grant_fault(self, link: DecodeLink) -> str:
        """Return why this room cannot be granted over this link, or an empty string."""
        part = self.parts.get(link.part)
        if part is not None and part.grant is not None:
            return "this room is granted already"
        if not self._is_spread:
            return ""
        if self.num_parts != link.num_parts:
            return "this room is granted by a node of another size"
        if part is None and self.is_expected:
            return "this room is over"
        return ""

    def granted(self, link: DecodeLink, deadline_s: float) -> "PushPart":
        """Return the part of a link that grants it now.

        Args:
            deadline_s: If the role has not asked for the room yet.
        """
        if not self._is_spread:
            self._spread(link.num_parts)
        if link.part not in self.parts:
            self.parts[link.part] = PushPart(self, link.part, deadline_s)
        return self.parts[link.part]

    def _spread(self, num_parts: int) -> None:
        """It is known how many ranks decode has: make the parts beside the first."""
        self.num_parts, self._is_spread = num_parts, True
        if (first := self.parts.get(0)) is not None:  # the role asked for the room already
            self.parts |= {number: first.twin(number) for number in range(1, num_parts)}


@dataclass(eq=False, slots=True)
class PushPart:
    """One room over one link.

    Attributes:
        deadline_s: When the half that is missing is given up.
        link: That of the grant, once there is one.
        pending: What the role asked for before the grant came.
        landed: What decode is to receive at the end, once the role has finished.
        num_layers_computed: Of the run of own pages that begins at this token.
        own_pages: By their place in the prompt, own pages of which every layer was pushed.
        refusal: Of one of its jobs; no other is done after that. Used by the worker alone, as is what it notes of
            runs whose first layers were pushed.
    """

    room: PushRoom
    number: int
    deadline_s: float
    session: Session[SenderState] = field(default_factory=sender_session)
    link: DecodeLink | None = None
    grant: Grant | None = None
    pending: list[Callable[["PushPart"], None]] = field(default_factory=list)
    landed: Landed | None = None
    num_layers_computed: dict[int, int] = field(default_factory=dict)
    own_pages: dict[int, int] = field(default_factory=dict)
    refusal: TransferRefused | None = None
    pushed_bytes: int = 0
    _num_layers_pushed: dict[int, int] = field(default_factory=dict)
    _routes: dict[int, Route] = field(default_factory=dict)

    def may_write(self, link: DecodeLink) -> bool:
        """Whether a grant over this link stands, or its writes may still be under way."""
        is_granted = self.grant is not None and self.link is link
        return is_granted and self.session.state is not SenderState.REFUSING

    def twin(self, number: int) -> "PushPart":
        """Return the same for another link. Only before it is granted."""
        assert self.grant is None
        return PushPart(
            self.room, number, self.deadline_s, copy(self.session), pending=list(self.pending)
        )

    @property
    def destination(self) -> PagedTokens:
        """Where the prompt goes. Only once it is granted."""
        assert self.grant is not None
        assert self.link is not None
        return PagedTokens(self.link.layout, self.grant.page_ids, self.grant.have_tokens)

    def take(self, push: Push, layout: KVLayout) -> PagedTokens | None:
        """Note what is computed; return the own pages, or None if no layer of theirs is new."""
        first = push.first_page_index * layout.page_size
        num_layers = layout.num_layers if push.layers is None else push.layers.stop
        if num_layers <= self.num_layers_computed.get(first, 0):
            return None
        self.num_layers_computed[first] = num_layers
        if num_layers == layout.num_layers:
            self.own_pages.update(enumerate(push.page_ids, push.first_page_index))
        return PagedTokens(layout, push.page_ids, first)

    def plans(self, own: PagedTokens) -> Iterator[CopyPlan]:
        """Yield the copies for own pages: from what decode has not, to the end of its grant. In the worker.

        They are of all layers that are computed by now, so that a worker that is behind has fewer and larger
        writes. There are none if earlier writes had them.

        Raises:
            TransferRefused: There are no such pages or layers in the own pool. Before the first plan.
        """
        first = own.first_token
        layers = range(self._num_layers_pushed.get(first, 0), self.num_layers_computed[first])
        if not layers:
            return
        self._num_layers_pushed[first] = layers.stop
        try:
            route = self._routes.pop(first, None) or self._route(own)
            for plan in route.plans(layers):
                self.pushed_bytes += plan.total_bytes
                yield plan
        except ValueError as error:
            raise TransferRefused(f"cannot push: {error}") from error
        if layers.stop != own.layout.num_layers:
            self._routes[first] = route

    def _route(self, own: PagedTokens) -> Route:
        assert self.link is not None
        theirs = self.destination
        begin = max(own.first_token, theirs.first_token)
        tokens = range(begin, max(begin, min(own.end_token, theirs.end_token)))
        return Route(own, theirs, tokens, self.link.heads)

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

    def sum_up(self, region: MemoryRegion, layout: KVLayout) -> None:
        """Add the checksums to what decode is to receive. In the worker, after `check_complete`."""
        assert self.landed is not None
        assert self.link is not None
        theirs, one_in = self.destination, self.landed.checksum_one_in
        if not (one_in and theirs.page_ids and self.link.heads.num_heads):
            return
        end_token = self.end_token(layout.page_size)
        first, last = theirs.first_token // layout.page_size, (end_token - 1) // layout.page_size
        held = [self.own_pages[index] for index in range(first, last + 1)]
        own = PagedTokens(layout, held, first * layout.page_size)
        slabs = sampled_slabs(self.room.room, layout, one_in)
        sums = page_sums(region, own, theirs, end_token, slabs=slabs, heads=self.link.heads)
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
