"""Who has pages, who waits for them, and who runs in the next forward. No tensors.

```
 waiting ──admit──▶ prompts ──last chunk──▶ decodes ──end──▶
    ▲                  │                       │
    └────retract───────┴───────────────────────┘   out of pages: the lowest priority, then the youngest
```

Admission counts the prompt and an expected part of what answers may still grow by. When pages run out
all the same, one request gives its pages back and is computed again later: its tokens are known, so
it goes on with the next as if nothing had happened. It keeps its place by arrival, so nobody starves:
the oldest of the highest priority is never retracted while another runs.
"""

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from tandem.engine.batcher import Chunk, next_chunks
from tandem.engine.config import EngineConfig
from tandem.engine.growth import ExpectedGrowth
from tandem.engine.kv_cache import KVCache
from tandem.engine.prefix_cache import Key, PrefixMatch
from tandem.engine.request import ActiveRequest, Stage
from tandem.engine.slots import Rows, Slots
from tandem.engine.waiting import Line

# Besides each return of pages: expected growth falls with every token, too.
RETRY_FORWARDS = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one forward.

    Attributes:
        decodes: One token each.
        rows: Their slots. Shape (len(decodes),).
        chunks: Parts of prompts.
    """

    decodes: list[ActiveRequest]
    rows: Rows
    chunks: list[Chunk]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)


class Scheduler:
    """Moves requests between waiting and running.

    Attributes:
        waiting: Requests without pages.
        prompts: Running, prompt not computed; in order of admission.
        decodes: Running, one token a forward; in the order in which they began to decode.
        num_retracted: Since the start.
    """

    def __init__(self, cache: KVCache, config: EngineConfig, max_tokens: int) -> None:
        self.cache = cache
        self.slots = Slots(config.max_running_requests, cache.num_pages_for(max_tokens))
        self.waiting: Line[ActiveRequest] = Line(lambda request: request.rank)
        self.prompts: list[ActiveRequest] = []
        self.decodes: list[ActiveRequest] = []
        self.num_retracted = 0
        self._config = config
        self._growth = ExpectedGrowth()
        # Which running request computes the page of this name; whoever needs it too waits for it.
        self._computing: dict[Key, ActiveRequest] = {}
        # Counts what may have made room, so that a request that lacked pages is not tried in vain.
        self._num_changes = self._num_forwards = 0
        self._rows: Rows | None = None

    @property
    def num_running(self) -> int:
        """Requests that take part in forwards."""
        return len(self.prompts) + len(self.decodes)

    @override
    def __repr__(self) -> str:
        return (
            f"Scheduler({len(self.waiting)} waiting, {len(self.prompts)} prompts, "
            f"{len(self.decodes)} decodes, {self.cache.counts()})"
        )

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def admit(self) -> None:
        """Let in whoever waits first and has room; nobody overtakes one that lacks pages."""
        for active in list(self.waiting) if self.waiting and self.slots.has_free else ():
            if active.is_held:
                continue
            if not self.slots.has_free or not self._find_pages(active):
                return
            if active.held_by is None:
                self.waiting.remove(active)
                active.stage = Stage.RUNNING
                self.prompts.append(active)

    def enter(self, active: ActiveRequest) -> bool:
        """Let in one that waits elsewhere and whose prompt is computed here; False when it has to wait."""
        # Those retracted were here before.
        if self.waiting or not self.slots.has_free or active.is_held:
            return False
        if not self._find_pages(active) or active.held_by is not None:
            return False
        active.stage = Stage.RUNNING
        self.prompts.append(active)
        return True

    def reserve(self, active: ActiveRequest) -> bool:
        """Set pages aside for a prompt that another node computes; False when it has to wait.

        On success the request holds its cached prefix, and `active.granted_pages` may be written
        from afar.
        """
        # Those retracted were here before.
        if self.waiting or not self.slots.has_free:
            return False
        if active.is_held:
            return False
        match = self._match(active, active.num_prompt - 1)
        if match is None:
            return False
        num_own = self.cache.num_pages_for(active.num_prompt) - len(match.page_ids)
        granted = self.cache.grant(num_own)
        assert granted is not None
        active.granted_from, active.num_granted = len(match.page_ids), num_own
        self._settle(active, match, granted)
        active.stage = Stage.RESERVED
        return True

    def land(self, active: ActiveRequest) -> None:
        """Take over a prompt whose pages all arrived."""
        self.cache.land(active.granted_pages)
        active.num_granted = 0
        active.num_computed = active.num_prompt
        active.stage = Stage.RUNNING
        self.computed(active)
        self._begin_decoding(active)

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_short_of_pages(self) -> bool:
        """Whether the next forward needs more pages than there are."""
        short = self._short()
        return len(short) > self.cache.num_available

    def next_batch(self) -> Batch:
        """Choose what the next forward computes, retracting requests until their pages suffice.

        Nothing that is to be retracted may have a forward under way: see `is_short_of_pages`.
        """
        self._growth.stepped()
        self._num_forwards += 1
        self._num_changes += not self._num_forwards % RETRY_FORWARDS
        while self.is_short_of_pages:
            self._retract(max((*self.prompts, *self.decodes), key=lambda request: request.rank))
        for row in self._short():
            active = self.decodes[row]
            page = self.cache.allocate(1)
            assert page is not None
            active.page_ids += page
            self.slots.add_pages(active, page)
        rows = self._decode_rows()
        can_run = self.slots.num_tokens[rows] < self.slots.max_tokens[rows]
        decodes = self.decodes.copy()
        if not can_run.all():  # their last token is sampled, and not read yet
            decodes = [decodes[row] for row in np.flatnonzero(can_run)]
            rows = rows[can_run]
        beside_answers = self._config.local_prefill_tokens if decodes else 0
        chunks = next_chunks(
            self.prompts, self._config.chunked_prefill_size, beside_answers or None
        )
        return Batch(decodes, rows, chunks)

    def advance(self, batch: Batch) -> None:
        """A forward over `batch` was launched: each request of it will have one more token."""
        rows = batch.rows
        for chunk in batch.chunks:
            chunk.request.num_computed += chunk.num_tokens
            if chunk.is_last:
                self.prompts.remove(chunk.request)
                if not chunk.request.is_prompt_only:
                    self._begin_decoding(chunk.request)
        last = [chunk.request.slot for chunk in batch.chunks if chunk.is_last]
        if last:
            rows = np.concatenate([rows, np.array(last, np.int64)])
        self.slots.num_tokens[rows] += 1
        self.slots.next_index[rows] += 1
        self.slots.num_pending[rows] += 1
        self.slots.source[rows] = np.arange(len(rows))

    def computed(self, active: ActiveRequest) -> None:
        """The KV of a whole prompt is in its pages: let others use it."""
        self.cache.remember(
            active.token_ids[: active.num_computed], active.page_ids, active.request.cache_salt
        )
        self._stop_computing(active)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def leave(self, active: ActiveRequest) -> None:
        """A request takes no part in forwards any more; it keeps its pages."""
        if active.stage is Stage.WAITING and active in self.waiting:
            self.waiting.remove(active)
        elif active.stage is Stage.RUNNING:
            if active in self.prompts:
                self.prompts.remove(active)
            elif active in self.decodes:
                self.decodes.remove(active)
                self._rows = None
                active.num_computed = len(active.token_ids) - 1
        self._stop_computing(active)

    def give_back(self, active: ActiveRequest) -> None:
        """Return the pages and the slot of a request; those granted to a writer stay with it."""
        granted = active.granted_pages
        end = active.granted_from + active.num_granted
        own = active.page_ids[: active.granted_from] + active.page_ids[end:]
        if active.page_ids and not granted:
            own = active.page_ids
            known = active.token_ids[: active.num_computed]
            self.cache.remember(known, own, active.request.cache_salt)
        self.cache.release(own)
        self._num_changes += 1
        active.page_ids, active.granted_from = granted, 0
        if active.slot >= 0:
            self.slots.give_back(active)

    def reclaim(self, active: ActiveRequest) -> None:
        """Free granted or quarantined pages: no write can arrive any more."""
        self.cache.reclaim(active.granted_pages)
        active.page_ids = []
        active.num_granted = 0
        self._num_changes += 1

    def note_pages(self) -> None:
        """Pages came back in other ways: whoever lacked some is tried again."""
        self._num_changes += 1

    # ── how ──────────────────────────────────────────────────────────────────────────────────────

    def _find_pages(self, active: ActiveRequest) -> bool:
        """Give a request its cached prefix and pages for its known tokens.

        Returns:
            False when pages are short. True also when it is now held by another (`held_by`).
        """
        match = self._match(active, active.num_matchable)
        if match is None:
            return active.held_by is not None
        own = self.cache.allocate(
            self.cache.num_pages_for(len(active.token_ids)) - len(match.page_ids)
        )
        assert own is not None
        self._settle(active, match, own)
        return True

    def _match(self, active: ActiveRequest, num_tokens: int) -> PrefixMatch | None:
        """Hold the cached prefix if the rest has room too; None when it has to wait.

        Args:
            num_tokens: How many tokens may come from the cache.
        """
        active.held_by = None
        if active.blocked_at == self._num_changes:
            return None
        match = self.cache.match(active.token_ids[:num_tokens], active.request.cache_salt)
        owner = None if match.frontier is None else self._computing.get(match.frontier)
        if owner is not None:
            active.held_by = owner
        elif self._has_room(active, len(match.page_ids)):
            active.frontier = match.frontier
            if match.frontier is not None:
                self._computing[match.frontier] = active
            return match
        else:
            active.blocked_at = self._num_changes
        self.cache.release(match.page_ids)
        return None

    def _has_room(self, active: ActiveRequest, num_matched: int) -> bool:
        """Tell whether pages suffice for a request's known tokens and the growth of all."""
        needed = self.cache.num_pages_for(len(active.token_ids)) - num_matched
        available = self.cache.num_available
        if not self.slots.num_used:
            return needed <= available
        length = active.num_prompt if active.is_prompt_only else active.max_tokens
        own = np.array([length - len(active.token_ids)])
        remaining = np.append(self.slots.remaining_tokens(), own)
        return needed + self._growth.num_pages(remaining, self.cache.page_size) <= available

    def _settle(self, active: ActiveRequest, match: PrefixMatch, own: list[int]) -> None:
        active.page_ids = match.page_ids + own
        active.num_computed = match.num_tokens
        self.slots.take(active)

    def _stop_computing(self, active: ActiveRequest) -> None:
        if active.frontier is not None:
            del self._computing[active.frontier]
            active.frontier = None

    def _begin_decoding(self, active: ActiveRequest) -> None:
        self.decodes.append(active)
        self._rows = None

    def _decode_rows(self) -> Rows:
        """Return the slots of the decoding requests, in order."""
        if self._rows is None:
            self._rows = np.array([active.slot for active in self.decodes], np.int64)
        return self._rows

    def _short(self) -> Rows:
        """Return which of the decoding requests have no page for their next token."""
        rows = self._decode_rows()
        slots = self.slots
        held = slots.num_pages[rows] * self.cache.page_size
        wants = slots.num_tokens[rows]
        return np.flatnonzero((wants > held) & (wants < slots.max_tokens[rows]))

    def _retract(self, active: ActiveRequest) -> None:
        """Take a running request's pages back; it waits, with its tokens, to be computed again."""
        assert not active.num_launched, "a request with a forward under way cannot be retracted"
        self.leave(active)
        self.give_back(active)
        active.stage = Stage.WAITING
        active.num_computed = 0
        self.waiting.add(active)
        self.num_retracted += 1
        self._growth.retracted()
