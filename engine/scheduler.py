"""Which requests have pages, which wait for them, and which run in the next forward. No tensors.

```
 waiting ─┬─admit──▶ prompts ──last chunk──▶ decodes ──end──▶
    ▲     └─admit──▶ reserved ──landed───────▲  │              (another node computes the prompt)
    └────retract───────┴────────────────────────┘   out of pages: the lowest priority, then the youngest
```

Admission counts the prompt and a share of what answers may still grow by. When pages run out all the
same, one request gives its pages back and is computed again later: its tokens are known, so it goes on
as if nothing had happened. It keeps its place by arrival, so nobody starves: the oldest of the highest
priority is never retracted while another runs, and no newcomer of its priority passes it in the queue.
"""

from bisect import insort
from collections.abc import Iterable

import numpy as np

from tandem.engine.config import EngineConfig
from tandem.engine.forward import Batch, Chunk, Ints, Slots
from tandem.engine.kv_cache import KVCache
from tandem.engine.prefix_cache import Key, PrefixMatch
from tandem.engine.request import ActiveRequest, Stage

# Requests that lack pages are tried again after so many forwards, too: expected growth falls with each.
RETRY_FORWARDS = 32

# Rows of a prompt whose log-probabilities are wanted each give a row of logits over the vocabulary:
# of a vocabulary of 128k, 256 such rows are 128 MiB in float32.
MAX_LOGPROB_ROWS = 256

# The share of remaining tokens that pages are kept for. SGLang's schedule starts near here and falls to a
# tenth over some hundred steps; two retractions in a row bring back nearly everything.
_FIRST_SHARE, _LEAST_SHARE = 0.5, 0.1
_DECAY_PER_STEP = 0.998
_RISE = 0.25


class Scheduler:
    """Moves requests between waiting and running.

    Attributes:
        waiting: Requests without pages, by rank.
        prompts: Running, prompt not computed; in order of admission.
        decodes: Running, one token a forward; in the order in which they began to decode.
        num_retracted: Since the start.
        growth_share: Share of the remaining tokens of all answers that pages are kept for. Most answers
            end long before `max_new_tokens`, so it falls while all goes well; it rises when pages run out.
    """

    def __init__(self, cache: KVCache, config: EngineConfig, max_tokens: int) -> None:
        self.cache = cache
        self.slots = Slots(config.max_running_requests, cache.num_pages_for(max_tokens))
        self.waiting: list[ActiveRequest] = []
        self.prompts: list[ActiveRequest] = []
        self.decodes: list[ActiveRequest] = []
        self.num_retracted = 0
        self.growth_share = _FIRST_SHARE
        self._config = config
        # Names of pages that admitted requests compute; others that need one wait for it.
        self._computing: set[Key] = set()
        # Counts what may have made room, so that a request that lacked pages is not tried in vain.
        self._num_changes = self._num_forwards = 0
        self._rows: Ints | None = None

    @property
    def num_running(self) -> int:
        """Requests that take part in forwards."""
        return len(self.prompts) + len(self.decodes)

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def queue(self, active: ActiveRequest) -> None:
        """Have a request wait for pages, behind those of its rank."""
        insort(self.waiting, active, key=lambda request: request.rank)

    def admit(self) -> list[ActiveRequest]:
        """Admit the queue's first requests that have room; nobody passes one that lacks pages.

        Returns:
            Those admitted. They run from the next forward on, or wait for their prompt (`RESERVED`).
        """
        admitted: list[ActiveRequest] = []
        for active in self.waiting.copy() if self.waiting and self.slots.has_free else ():
            if active.waits_for in self._computing:
                continue
            if not self.slots.has_free or not self._find_pages(active):
                break
            if active.waits_for is None:
                self.waiting.remove(active)
                admitted.append(active)
        return admitted

    def land(self, active: ActiveRequest) -> None:
        """Take over a prompt whose pages all arrived."""
        self.cache.land(active.granted_pages)
        active.is_remote, active.num_granted = False, 0
        active.num_computed = active.num_collected = active.num_prompt
        active.stage = Stage.RUNNING
        self.computed(active)
        self._begin_decoding(active)

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_short_of_pages(self) -> bool:
        """Whether the next forward needs more pages than there are."""
        return len(self._short()) > self.cache.num_available

    def next_batch(self) -> Batch:
        """Choose what the next forward computes, retracting requests until their pages suffice.

        Nothing that is to be retracted may have a forward under way: see `is_short_of_pages`.
        """
        self.growth_share = max(_LEAST_SHARE, self.growth_share * _DECAY_PER_STEP)
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
        for chunk in batch.chunks:
            chunk.request.num_computed += chunk.num_tokens
            if chunk.is_last:
                self.prompts.remove(chunk.request)
                if not chunk.request.is_prompt_only:
                    self._begin_decoding(chunk.request)
        self.slots.launched(batch.sampled_rows())

    def computed(self, active: ActiveRequest) -> None:
        """The KV of a whole prompt is in its pages: let others use it."""
        self._remember(active)
        self._stop_computing(active)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def leave(self, active: ActiveRequest) -> None:
        """A request takes no part in forwards any more; it keeps its pages."""
        is_waiting = active.stage is Stage.WAITING
        for requests in (self.waiting,) if is_waiting else (self.prompts, self.decodes):
            if active in requests:
                requests.remove(active)
                self._rows = None
        self._stop_computing(active)

    def give_back(self, active: ActiveRequest) -> None:
        """Return the pages and the slot of a request; those granted to a writer stay with it."""
        granted = active.granted_pages
        if active.page_ids and not granted:
            self._remember(active)
        self.cache.release(active.page_ids[: len(active.page_ids) - len(granted)])
        self.note_pages()
        active.page_ids = granted
        if active.slot >= 0:
            self.slots.give_back(active)

    def reclaim(self, active: ActiveRequest) -> None:
        """Free granted or quarantined pages: no write can arrive any more."""
        self.cache.reclaim(active.granted_pages)
        active.page_ids, active.num_granted = [], 0
        self.note_pages()

    def note_pages(self) -> None:
        """Pages came back: try requests again that lack some."""
        self._num_changes += 1

    # ── how ──────────────────────────────────────────────────────────────────────────────────────

    def _find_pages(self, active: ActiveRequest) -> bool:
        """Give a request its cached prefix, pages for the rest of its known tokens, and a slot.

        Returns:
            False when pages are short. True also when it waits for another's page (`waits_for`).
        """
        active.waits_for = None
        if active.blocked_at == self._num_changes:
            return False
        known = active.token_ids[: active.num_matchable]
        match = self.cache.match(known, active.request.cache_salt)
        num_own = self.cache.num_pages_for(len(active.token_ids)) - len(match.page_ids)
        if match.frontier in self._computing:
            active.waits_for = match.frontier
        elif not self._has_room(active, num_own):
            active.blocked_at = self._num_changes
        else:
            self._settle(active, match, num_own)
            return True
        self.cache.release(match.page_ids)
        return active.waits_for is not None

    def _has_room(self, active: ActiveRequest, num_pages: int) -> bool:
        """Tell whether there are so many pages beside those kept for the growth of all answers."""
        available = self.cache.num_available
        if not self.slots.num_used:
            return num_pages <= available
        length = active.num_prompt if active.is_prompt_only else active.max_tokens
        growing = np.maximum(self.slots.max_tokens - self.slots.num_tokens, 0)  # 0 in free slots
        remaining = np.append(growing, length - len(active.token_ids))
        kept = int(np.ceil(self.growth_share * remaining / self.cache.page_size).sum())
        return num_pages + kept <= available

    def _settle(self, active: ActiveRequest, match: PrefixMatch, num_own: int) -> None:
        """Hold the pages of an admitted request."""
        own = self.cache.grant(num_own) if active.is_remote else self.cache.allocate(num_own)
        assert own is not None
        active.page_ids = match.page_ids + own
        active.num_computed = active.num_collected = match.num_tokens
        active.frontier = match.frontier
        if match.frontier is not None:
            self._computing.add(match.frontier)
        self.slots.take(active)
        if active.is_remote:
            active.num_granted, active.stage = num_own, Stage.RESERVED
        else:
            self.prompts.append(active)
            active.stage = Stage.RUNNING

    def _remember(self, active: ActiveRequest) -> None:
        # The KV of an answer's last token never is computed, nor that of a forward that failed.
        known = active.token_ids[: active.num_collected]
        self.cache.remember(known, active.page_ids, active.request.cache_salt)

    def _stop_computing(self, active: ActiveRequest) -> None:
        if active.frontier is not None:
            self._computing.remove(active.frontier)
            active.frontier = None

    def _begin_decoding(self, active: ActiveRequest) -> None:
        self.decodes.append(active)
        self._rows = None

    def _decode_rows(self) -> Ints:
        if self._rows is None:
            self._rows = np.array([active.slot for active in self.decodes], np.int64)
        return self._rows

    def _short(self) -> Ints:
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
        self.queue(active)
        self.num_retracted += 1
        self.growth_share = min(1.0, self.growth_share + _RISE)


def next_chunks(
    prompts: Iterable[ActiveRequest], budget: int, new_budget: int | None = None
) -> list[Chunk]:
    """Choose up to `budget` prompt tokens for one forward, first come first served.

    A bound on them keeps a long prompt from making the running answers wait longer than one chunk.

    Args:
        new_budget: Tokens at most of requests without an answer yet; None: all. The client of one that
            was retracted in its answer already waits for the next token.
    """
    chunks = []
    new_budget = budget if new_budget is None else new_budget
    for request in prompts:
        is_new = len(request.token_ids) == request.num_prompt
        num_tokens = min(request.num_uncomputed, budget, new_budget if is_new else budget)
        wanted = request.request.logprobs
        if wanted is not None and wanted.prompt_start >= 0:
            num_tokens = min(num_tokens, MAX_LOGPROB_ROWS)
        if not num_tokens:
            continue
        chunks.append(Chunk.next_of(request, num_tokens))
        budget -= num_tokens
        new_budget -= num_tokens if is_new else 0
    return chunks
