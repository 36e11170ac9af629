"""Prefill's rooms, their parts, and the push of layers while they are computed. No sockets.

```
 decode, --tp 2   room ─┬─ part 0 ── link ──▶ rank 0      ┐ each part is a separate hand-off with its
                        └─ part 1 ── link ──▶ rank 1      ┘ own session; the role sees a single one
```

Until the first grant shows how many decode ranks our heads go to, a room has one part that represents all.

```
 forward begins ─▶ push_by_layer(runs) ─▶ on_layer_written(0), (1) ... ─▶ forward ends ─▶ push the rest
                                          └─ every few layers: push(run, layers)
```

The callback is optional: if a forward reports no layers, all of them are pushed at its end.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field

import msgspec

from tandem.kvtransfer.agents.sender_links import DecodeLink
from tandem.kvtransfer.checksum import page_sums
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import CopyPlan, CopyRoute, PagedTokens
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.session import SenderState, Session, sender_session
from tandem.wire.errors import TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import Grant, Landed

# ── layers while they are computed ───────────────────────────────────────────────────────────────

OnLayerWritten = Callable[[int], None]
"""Called with a layer's number once its K and V are in the pool; layers come in order."""

# Layers are combined until a push has this many bytes, so that its fixed cost (two threads wake, copies are
# planned) is small. On two busy cores, pushes of 4 MiB fall behind the layers of a 1k prompt; pushes of 8 MiB do
# not. Towards the end of a forward, pushes shrink to a quarter of this, because no computation hides the last one.
MIN_PUSH_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PageRun:
    """Own pages of a room that a forward completes: the prompt's pages from `first_page_index` on."""

    room: Room
    page_ids: Sequence[int]
    first_page_index: int


LayerPush = Callable[[Room, Sequence[int], int, range | None], None]
"""`PrefillAgent.push`: queues the computed layers that were not pushed yet."""


def layers_per_push(runs: Sequence[PageRun], layout: KVLayout, min_bytes: int) -> int:
    """Return how many layers of these pages have at least `min_bytes`."""
    num_pages = sum(len(run.page_ids) for run in runs)
    if not num_pages:
        return layout.num_layers
    return min(
        layout.num_layers, -(-min_bytes * layout.num_layers // (num_pages * layout.page_bytes))
    )


def push_by_layer(
    push: LayerPush, runs: Sequence[PageRun], layout: KVLayout, min_bytes: int = MIN_PUSH_BYTES
) -> OnLayerWritten:
    """Return the callback of a forward that completes `runs`. Only one thread may call it."""
    usual_layers = layers_per_push(runs, layout, min_bytes)
    min_layers = layers_per_push(runs, layout, min_bytes // 4)
    num_pushed = 0

    def on_layer_written(layer: int) -> None:
        nonlocal num_pushed
        num_written = layer + 1
        num_left = layout.num_layers - num_written
        is_due = num_written - num_pushed >= min(usual_layers, max(num_left, min_layers))
        if is_due or not num_left:
            num_pushed = num_written
            for run in runs:
                push(run.room, run.page_ids, run.first_page_index, range(num_written))

    return on_layer_written


# ── rooms ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Push:
    """Own pages to push, which hold the prompt's pages from `first_page_index` on.

    Attributes:
        layers: Layers computed so far; None means all.
    """

    page_ids: Sequence[int]
    first_page_index: int
    layers: range | None = None


class PushRoom:
    """One request at prefill, over all its links.

    Attributes:
        is_expected: Whether the role called `expect`. From then on, a part missing from `parts` is over.
        parts: Unfinished parts, by number.
        num_parts: Number of all parts; 1 until the first grant.
        num_granted, num_landed, pushed_bytes: Sums over all parts since `expect`.
        expected_s, pushed_s, finished_s: Times of `expect`, the first `push` and `finish`; None before.
    """

    def __init__(self, room: Room) -> None:
        self.room = room
        self.is_expected = False
        self.parts: dict[int, PushPart] = {}
        self.num_parts = 1
        self._has_all_parts = False  # whether the number of parts is known
        self.num_granted = self.num_landed = self.pushed_bytes = 0
        self.expected_s: float | None = None
        self.pushed_s: float | None = None
        self.finished_s: float | None = None

    def expect(self, now_s: float, deadline_s: float) -> list["PushPart"]:
        """Register the role's request; return all parts. The role may repeat a request.

        Args:
            deadline_s: Deadline of parts without a grant.
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
            return "the room is already granted"
        if not self._has_all_parts:
            return ""
        if self.num_parts != link.num_parts:
            return "the room is granted by a node with a different number of ranks"
        if part is None and self.is_expected:
            return "the room is over"
        return ""

    def part_of(self, link: DecodeLink, deadline_s: float) -> "PushPart":
        """Return the part of a link on which a grant arrived; make it if there is none.

        Args:
            deadline_s: Deadline of a new part.
        """
        if not self._has_all_parts:
            self._add_parts(link.num_parts)
        if link.part not in self.parts:
            self.parts[link.part] = PushPart(self, link.part, deadline_s)
        return self.parts[link.part]

    def _add_parts(self, num_parts: int) -> None:
        """Make the parts after the first: the first grant has arrived."""
        self.num_parts, self._has_all_parts = num_parts, True
        if (first := self.parts.get(0)) is not None:  # the role called `expect` already
            self.parts |= {number: first.copy_as(number) for number in range(1, num_parts)}


@dataclass(eq=False, slots=True)
class PushPart:
    """One room over one link.

    Attributes:
        deadline_s: When to stop waiting for the other half.
        link: The link on which the grant arrived; None before.
        pending: The role's calls before the grant.
        landed: The Landed message to send at the end, once the role has finished.
        num_layers_computed: Number of layers computed so far, by the first token of each run of own pages.
        own_pages: Own pages with all layers computed, by their index in the prompt.
        refusal: Error of the first refused job; later jobs do not run. Only the worker uses it.
        _num_layers_pushed, _routes: Progress of partly pushed runs, by first token. Only the worker uses them.
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
    _routes: dict[int, CopyRoute] = field(default_factory=dict)

    def may_write(self, link: DecodeLink) -> bool:
        """Whether a grant over this link is valid, or its writes may still be in flight."""
        is_granted = self.grant is not None and self.link is link
        return is_granted and self.session.state is not SenderState.REFUSING

    def copy_as(self, number: int) -> "PushPart":
        """Return a copy of this part, which has no grant yet, for a different link."""
        assert self.grant is None
        return PushPart(
            self.room, number, self.deadline_s, copy(self.session), pending=list(self.pending)
        )

    @property
    def destination(self) -> PagedTokens:
        """Decode's pages for the prompt. The part must be granted."""
        assert self.grant is not None
        assert self.link is not None
        return PagedTokens(self.link.layout, self.grant.page_ids, self.grant.have_tokens)

    def record(self, push: Push, layout: KVLayout) -> PagedTokens | None:
        """Record the computed layers; return the own pages, or None if no layer is new."""
        first = push.first_page_index * layout.page_size
        num_layers = layout.num_layers if push.layers is None else push.layers.stop
        if num_layers <= self.num_layers_computed.get(first, 0):
            return None
        self.num_layers_computed[first] = num_layers
        if num_layers == layout.num_layers:
            self.own_pages.update(enumerate(push.page_ids, push.first_page_index))
        return PagedTokens(layout, push.page_ids, first)

    def recall(self) -> None:
        """Forget the pages that were pushed or wait for the grant."""
        self.pending.clear()
        self.own_pages.clear()
        self.num_layers_computed.clear()

    def forget_writes(self) -> None:
        """Forget which layers were written. Runs on the worker, when no write is in flight."""
        self._num_layers_pushed.clear()
        self._routes.clear()

    def plans(self, own: PagedTokens) -> Iterator[CopyPlan]:
        """Yield the copies of own pages, limited to the tokens that decode granted. Runs on the worker.

        They cover all layers computed by now except those that earlier writes covered. A worker that is behind
        therefore makes fewer, larger writes.

        Raises:
            TransferRefused: The own pool has no such pages or layers. Raised before the first plan.
        """
        first = own.first_token
        num_computed = self.num_layers_computed.get(first, 0)  # 0: recalled meanwhile
        layers = range(self._num_layers_pushed.get(first, 0), num_computed)
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

    def _route(self, own: PagedTokens) -> CopyRoute:
        assert self.link is not None
        theirs = self.destination
        begin = max(own.first_token, theirs.first_token)
        tokens = range(begin, max(begin, min(own.end_token, theirs.end_token)))
        return CopyRoute(own, theirs, tokens, self.link.heads)

    def check_complete(self, page_size: int) -> None:
        """Check that every granted page was pushed with all its layers.

        Raises:
            TransferRefused: Pages are missing: decode's prompt is not the one that prefill computed.
        """
        theirs, end_token = self.destination, self.end_token(page_size)
        first_tokens = range(theirs.first_token, theirs.end_token, theirs.layout.page_size)
        num_missing = sum(token >= end_token for token in first_tokens)
        if num_missing:
            first = len(first_tokens) - num_missing
            raise TransferRefused(
                f"{num_missing} granted pages were not pushed, the first at index {first}"
            )

    def end_token(self, page_size: int) -> int:
        """Return one past the last token pushed without a gap, in own pages of `page_size`."""
        index = self.destination.first_token // page_size
        while index in self.own_pages:
            index += 1
        return min(index * page_size, self.destination.end_token)

    def add_checksums(self, region: MemoryRegion, layout: KVLayout) -> None:
        """Add the checksums to the Landed message. Runs on the worker, after `check_complete`."""
        assert self.landed is not None
        assert self.link is not None
        theirs = self.destination
        if not (theirs.page_ids and self.link.heads.num_heads):
            return
        end_token = self.end_token(layout.page_size)
        first, last = theirs.first_token // layout.page_size, (end_token - 1) // layout.page_size
        held = [self.own_pages[index] for index in range(first, last + 1)]
        own = PagedTokens(layout, held, first * layout.page_size)
        sums = page_sums(region, own, theirs, end_token, self.link.heads)
        self.landed = msgspec.structs.replace(self.landed, checksums=sums, end_token=end_token)


def grant_fault(grant: Grant, layout: KVLayout) -> str:
    """Return why a grant in a pool of `layout` is invalid, or an empty string."""
    if grant.have_tokens < 0 or grant.have_tokens % layout.page_size:
        return f"have_tokens is {grant.have_tokens}, not a multiple of the page size {layout.page_size}"
    if len(set(grant.page_ids)) != len(grant.page_ids):
        return "a page is granted twice"
    if any(not 0 <= page < layout.num_pages for page in grant.page_ids):
        return f"a granted page is outside the pool of {layout.num_pages}"
    return ""
