"""Decides which requests get pages, which wait, and which run in the next forward. No tensors.

```
 waiting ─┬─admit──▶ prompts ──last chunk──▶ decodes ──end──▶
    ▲     └─admit──▶ reserved ──landed───────▲  │              (a different node computes the prompt)
    └────retract───────┴────────────────────────┘   out of pages: the lowest priority, then the youngest
```

Admission needs pages for the prompt and keeps pages free for a share of the tokens that answers may still
generate. If pages run out anyway, a request is retracted: it loses its pages and is later recomputed from its
known tokens. Retracted requests keep their order of arrival, so no request starves: the oldest request of the
highest priority is never retracted while others run, and no newer request of its priority overtakes it in the
queue.
"""

from bisect import insort
from collections.abc import Iterable

import numpy as np

from tandem.engine.config import EngineOptions
from tandem.engine.pages.kv_cache import KVCache
from tandem.engine.pages.prefix_cache import Key, PrefixMatch
from tandem.engine.scheduling.forward import Batch, Chunk, Ints, Slots
from tandem.engine.scheduling.request import ActiveRequest, Stage
from tandem.wire.prefixes import TokenArray

# Requests that lack pages are retried at least every this many forwards, because `growth_share` decays.
RETRY_FORWARDS = 32

# Prompt positions per forward whose log-probabilities are computed, over all its requests. Each needs a row of logits:
# with a vocabulary of 128k, 256 rows take 128 MiB in float32.
MAX_LOGPROB_ROWS = 256

# Tokens of queued requests to look up in the prefix cache before the next forward: 3 ms for two prompts of 128k.
_MATCHED_TOKENS = 1 << 18

# Start and lower bound of `growth_share`. SGLang's schedule starts near 0.5 and falls to 0.1 over some hundred
# steps. Two retractions in a row restore nearly all of it.
_FIRST_SHARE, _LEAST_SHARE = 0.5, 0.1
_DECAY_PER_STEP = 0.998
_RISE = 0.25


class Scheduler:
    """Moves requests between waiting and running.

    Attributes:
        waiting: Requests without pages, by rank.
        prompts: Running requests whose prompt is not fully computed, in order of admission.
        decodes: Running requests that generate one token per forward, in the order in which they began to decode.
        num_retracted: Retractions since the start.
        is_admitting: Whether `admit` has left requests for its next call.
        growth_share: Fraction of the remaining tokens of all answers that pages are kept free for. It decays with
            each forward, because most answers end long before `max_new_tokens`. A retraction raises it.
    """

    def __init__(self, cache: KVCache, config: EngineOptions, max_tokens: int) -> None:
        self.cache = cache
        self.slots = Slots(config.max_running_requests, cache.num_pages_for(max_tokens))
        self.waiting: list[ActiveRequest] = []
        self.prompts: list[ActiveRequest] = []
        self.decodes: list[ActiveRequest] = []
        self.num_retracted = 0
        self.growth_share, self.is_admitting = _FIRST_SHARE, False
        self._config = config
        # Requests whose prompt is being computed, here or remotely, by their `frontier`.
        self._computing: dict[Key, list[ActiveRequest]] = {}
        # Number of events that may have freed pages. A request that did not fit is retried only after such an event.
        self._num_changes = self._num_forwards = 0
        self._rows: Ints | None = None

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self.prompts) + len(self.decodes)

    # ── admission ────────────────────────────────────────────────────────────────────────────────

    def queue(self, active: ActiveRequest) -> None:
        """Insert a request into the queue in order of rank."""
        insort(self.waiting, active, key=lambda request: request.rank)

    def admit(self) -> list[ActiveRequest]:
        """Admit queued requests in order until one does not fit. Skip those that wait for a shared prefix.

        A call looks up `_MATCHED_TOKENS`, and the next call goes on.

        Returns:
            The admitted requests. They run from the next forward on, or wait for their prompt (`RESERVED`).
        """
        admitted: list[ActiveRequest] = []
        num_tokens, self.is_admitting = 0, False
        for active in self.waiting.copy() if self.waiting and self.slots.has_free else ():
            if active.waits_for is not None and active.waits_for.frontier is not None:
                continue
            if num_tokens >= _MATCHED_TOKENS:
                self.is_admitting = True
                break
            num_tokens += len(active.token_ids)
            if not self.slots.has_free or not self._find_pages(active):
                break
            if active.waits_for is None:
                self.waiting.remove(active)
                admitted.append(active)
        return admitted

    def land(self, active: ActiveRequest) -> None:
        """Take over a prompt whose pages have all arrived."""
        self.cache.land(active.granted_pages)
        active.is_remote, active.num_granted = False, 0
        active.num_computed = active.num_collected = active.num_prompt
        active.stage = Stage.RUNNING
        self.cache_prompt(active)
        self._begin_decoding(active)

    # ── forwards ─────────────────────────────────────────────────────────────────────────────────

    @property
    def is_short_of_pages(self) -> bool:
        """Whether the next forward needs more pages than `num_available`."""
        return len(self._lacking_page()) > self.cache.num_available

    def next_batch(self) -> Batch:
        """Choose the batch of the next forward, retracting requests until pages suffice.

        If `is_short_of_pages`, no forward may be in flight, because it could include a request to retract.
        """
        self.growth_share = max(_LEAST_SHARE, self.growth_share * _DECAY_PER_STEP)
        self._num_forwards += 1
        self._num_changes += not self._num_forwards % RETRY_FORWARDS
        while self.is_short_of_pages:
            self._retract(max((*self.prompts, *self.decodes), key=lambda request: request.rank))
        lacking = self._lacking_page()
        page_ids = self.cache.allocate(len(lacking))
        assert page_ids is not None
        for row, page in zip(lacking, page_ids, strict=True):
            self.decodes[row].page_ids.append(page)
            self.slots.add_pages(self.decodes[row], [page])
        rows = self._decode_rows()
        can_run = self.slots.num_tokens[rows] < self.slots.max_tokens[rows]
        can_run &= ~self.slots.awaits_mask[rows]
        decodes = self.decodes.copy()
        # Requests whose last token is sampled but not read yet do not run, nor those whose grammar is late.
        if not can_run.all():
            decodes = [decodes[row] for row in np.flatnonzero(can_run)]
            rows = rows[can_run]
        budget = self._config.local_prefill_tokens if decodes else 0
        # Only a retracted request may wait for a mask while its prompt is computed.
        prompts = [each for each in self.prompts if not self.slots.awaits_mask[each.slot]]
        chunks = next_chunks(prompts, budget or self._config.chunked_prefill_size)
        return Batch(decodes, rows, chunks)

    def advance(self, batch: Batch) -> None:
        """Update requests after a forward over `batch` was launched."""
        for chunk in batch.chunks:
            chunk.request.num_computed += chunk.num_tokens
            if chunk.is_last:
                self.prompts.remove(chunk.request)
                if not chunk.request.is_prompt_only:
                    self._begin_decoding(chunk.request)
        self.slots.record_launch(batch.sampled_rows())

    def cache_prompt(self, active: ActiveRequest) -> None:
        """Add a fully computed prompt to the prefix cache."""
        self._cache_pages(active)
        self._stop_computing(active)

    # ── release ──────────────────────────────────────────────────────────────────────────────────

    def leave(self, active: ActiveRequest) -> None:
        """Remove a request from the queue or from later forwards. It keeps its pages."""
        is_waiting = active.stage is Stage.WAITING
        for requests in (self.waiting,) if is_waiting else (self.prompts, self.decodes):
            if active in requests:
                requests.remove(active)
                self._rows = None
        self._stop_computing(active)

    def release(self, active: ActiveRequest) -> None:
        """Free a request's slot and its pages, except pages that are granted to a remote writer."""
        granted = active.granted_pages
        if active.page_ids and not granted:
            self._cache_pages(active)
        self.cache.release(active.page_ids[: len(active.page_ids) - len(granted)])
        self.note_pages()
        active.page_ids = granted
        if active.slot >= 0:
            self.slots.release(active)

    def reclaim(self, active: ActiveRequest) -> None:
        """Free granted or quarantined pages: no write can arrive any more."""
        self.cache.reclaim(active.granted_pages)
        active.page_ids, active.num_granted = [], 0
        self.note_pages()

    def note_pages(self) -> None:
        """Record that pages were freed, so that requests that lack pages are retried."""
        self._num_changes += 1

    # ── internals ────────────────────────────────────────────────────────────────────────────────

    def _find_pages(self, active: ActiveRequest) -> bool:
        """Assign a request its cached prefix, pages for its other known tokens, and a slot.

        Returns:
            Whether admission may go on to the next request: False if there are too few pages. If this request should
            wait for the prompt of a different one, it gets nothing, `waits_for` is set, and the result is True.
        """
        active.waits_for = None
        if active.blocked_at == self._num_changes:
            return False
        known = active.token_ids[: active.num_matchable]
        match = self.cache.match(known, active.request.cache_salt)
        num_own = self.cache.num_pages_for(len(active.token_ids)) - len(match.page_ids)
        active.waits_for = self._worth_waiting_for(known, match)
        if active.waits_for is None and self._has_room(active, num_own):
            self._allocate(active, match, num_own)
            return True
        self.cache.release(match.page_ids)
        if active.waits_for is None:
            active.blocked_at = self._num_changes
        return active.waits_for is not None

    def _worth_waiting_for(self, known: TokenArray, match: PrefixMatch) -> ActiveRequest | None:
        """Return a request that computes at least as many tokens that this prompt needs as tokens that it does not.

        A prompt enters the cache as a whole, so waiting for one of which little is shared costs more than it saves.

        Args:
            known: Tokens that this prompt can take from the cache.
        """
        for other in self._computing.get(match.frontier, ()) if match.frontier else ():
            half = match.num_tokens + -(-(len(other.token_ids) - match.num_tokens) // 2)
            if len(known) >= half and known[:half] == other.token_ids[:half]:
                return other
        return None

    def _has_room(self, active: ActiveRequest, num_pages: int) -> bool:
        """Return whether `num_pages` are available without the pages that are kept free for the growth of answers."""
        available = self.cache.num_available
        if not self.slots.num_used:
            return num_pages <= available
        length = active.num_prompt if active.is_prompt_only else active.max_tokens
        growing = np.maximum(self.slots.max_tokens - self.slots.num_tokens, 0)  # 0 in free slots
        remaining = np.append(growing, length - len(active.token_ids))
        kept = int(np.ceil(self.growth_share * remaining / self.cache.page_size).sum())
        return num_pages + kept <= available

    def _allocate(self, active: ActiveRequest, match: PrefixMatch, num_own: int) -> None:
        """Allocate the pages and slot of an admitted request."""
        own = self.cache.grant(num_own) if active.is_remote else self.cache.allocate(num_own)
        assert own is not None
        active.page_ids = match.page_ids + own
        active.num_computed = active.num_collected = match.num_tokens
        active.frontier = match.frontier
        if match.frontier is not None:
            self._computing.setdefault(match.frontier, []).append(active)
        self.slots.take(active)
        if active.is_remote:
            active.num_granted, active.stage = num_own, Stage.RESERVED
        else:
            self.prompts.append(active)
            active.stage = Stage.RUNNING

    def _cache_pages(self, active: ActiveRequest) -> None:
        # Only collected tokens have KV; the last token of an answer and the tokens of a failed forward do not.
        known = active.token_ids[: active.num_collected]
        self.cache.insert(known, active.page_ids, active.request.cache_salt)

    def _stop_computing(self, active: ActiveRequest) -> None:
        if active.frontier is not None:
            sharing = self._computing[active.frontier]
            sharing.remove(active)
            if not sharing:
                del self._computing[active.frontier]
            active.frontier = None

    def _begin_decoding(self, active: ActiveRequest) -> None:
        self.decodes.append(active)
        self._rows = None

    def _decode_rows(self) -> Ints:
        if self._rows is None:
            self._rows = np.array([active.slot for active in self.decodes], np.int64)
        return self._rows

    def _lacking_page(self) -> Ints:
        """Return the indexes in `decodes` of requests that need a page for their next token."""
        rows = self._decode_rows()
        slots = self.slots
        held = slots.num_pages[rows] * self.cache.page_size
        needed = slots.num_tokens[rows]
        return np.flatnonzero((needed > held) & (needed < slots.max_tokens[rows]))

    def _retract(self, active: ActiveRequest) -> None:
        """Free a running request's pages and queue it again. Its tokens are kept, and their KV is recomputed."""
        assert not active.num_launched, "a request with a forward in flight cannot be retracted"
        self.leave(active)
        self.release(active)
        active.stage = Stage.WAITING
        active.num_computed = 0
        self.queue(active)
        self.num_retracted += 1
        self.growth_share = min(1.0, self.growth_share + _RISE)


def next_chunks(prompts: Iterable[ActiveRequest], budget: int) -> list[Chunk]:
    """Choose up to `budget` tokens of prompts and retracted answers for one forward, first come, first served.

    The budget limits the time by which a long prompt delays running answers. Together the chunks have at most
    `MAX_LOGPROB_ROWS` logprob positions.
    """
    chunks = []
    num_logprobs = MAX_LOGPROB_ROWS
    for request in prompts:
        chunk = Chunk.next_of(request, min(request.num_uncomputed, budget), num_logprobs)
        if not chunk.num_tokens:
            continue
        chunks.append(chunk)
        num_logprobs -= len(chunk.logprob_positions)
        budget -= chunk.num_tokens
    return chunks
