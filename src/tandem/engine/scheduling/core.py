"""The engine: requests in, tokens out, one `step` at a time. It has no loop, no sockets and no clock.

A role's loop queues requests, calls `step` and `cancel`, and acts on the results. A step admits requests that
fit, launches one forward and collects one. On an asynchronous device it collects the previous forward: while
that one runs, the next is prepared and queued, and reads the sampled tokens on the device before they reach
the host.

Every page of a request is freed through exactly one of `_release_if_unused` (here), `release` (prefill, once the
page was pushed) or `reclaim` (decode, once no write can arrive).
"""

import itertools
import secrets
from collections.abc import Callable
from concurrent.futures import wait

import numpy as np

from tandem.engine.config import EngineOptions
from tandem.engine.errors import GrammarViolated
from tandem.engine.grammar.processes import GrammarProcesses
from tandem.engine.pages.kv_cache import KVCache, PageCounts
from tandem.engine.scheduling.forward import Chunk, OnLayerWritten
from tandem.engine.scheduling.request import ActiveRequest, Stage, check_request
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.scheduling.step import (
    CompletePages,
    Failure,
    InFlight,
    Launcher,
    Outcome,
    PromptLogprobs,
    StepCounts,
    StepResult,
    Token,
)
from tandem.engine.shape import ModelShape
from tandem.telemetry.log import get_logger
from tandem.wire.errors import EngineFailed, InvalidRequest, OutOfPages, Overloaded, TandemError
from tandem.wire.generation import Finish, GenerateRequest, TokenLogprobs

log = get_logger(__name__)

# How long a step waits for masks: once, and for each of them. One ordinary mask arrives after 0.2 ms, 64 of one
# grammar after 3 ms, and those of 48 grammars after 9 ms, measured on two busy cores.
_MASK_WAIT_S, _WAIT_PER_MASK_S = 0.002, 0.0002


class Engine:
    """A model, its pages and its batches.

    Args:
        launcher: Computes forwards over the same `num_pages` pages.
        grammars: Applies grammars. None: requests with a grammar are rejected.
        wake: Called on a different thread when a request's mask is available.

    Attributes:
        num_prompt_tokens: Total since the start, including prefix cache hits (`num_cached_tokens`).
        num_generated_tokens: Total since the start, including first tokens sampled by other nodes.
    """

    def __init__(
        self,
        launcher: Launcher,
        shape: ModelShape,
        config: EngineOptions,
        num_pages: int,
        *,
        grammars: GrammarProcesses | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        size = config.page_size
        self.shape = shape
        self.cache = KVCache(
            num_pages,
            size,
            is_prefix_cache_enabled=config.is_prefix_cache_enabled,
            space=shape.page_space(size, config.tp_rank, config.tp_size)
            if config.has_tiers
            else None,
        )
        self._launcher = launcher
        self._config = config
        self._grammars = grammars
        self._wake = wake
        self._scheduler = Scheduler(self.cache, config, self.max_tokens)
        self._is_overlapped = (
            launcher.is_asynchronous if config.is_overlapped is None else config.is_overlapped
        )
        self._is_eos = np.zeros(shape.vocab_size, np.bool_)
        self._is_eos[[i for i in shape.eos_token_ids if i < shape.vocab_size]] = True
        self._arrivals = itertools.count()
        self._reserved: Callable[[ActiveRequest], None] = lambda _active: None
        self._begin: Callable[[list[CompletePages]], OnLayerWritten] | None = None
        # Requests that are not queued yet because their grammar is being compiled.
        self._compiling: list[ActiveRequest] = []
        # Requests with a slot that wait for a mask.
        self._masking: list[ActiveRequest] = []
        self._in_flight: InFlight | None = None
        # True if the last step launched nothing, and since then nothing has happened that allows a launch.
        self._is_stuck = False
        self.steps = StepCounts()
        self.num_prompt_tokens = self.num_cached_tokens = self.num_generated_tokens = 0

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    @property
    def max_tokens(self) -> int:
        """Maximum number of prompt and generated tokens of a request: the smaller of context length and pool."""
        return min(self.shape.context_length, self.cache.num_pages * self.cache.page_size)

    def check(
        self, request: GenerateRequest, *, is_prompt_only: bool = False, is_remote: bool = False
    ) -> ActiveRequest:
        """Validate a request and return its `ActiveRequest`, which is not queued and holds no pages.

        If the request has a grammar, its compilation starts.

        Args:
            is_prompt_only: Finish with the first token and keep the pages until `release`.
            is_remote: A different node computes the prompt; see `watch_reserved`.

        Raises:
            InvalidRequest: The request is invalid, or needs a feature that this node lacks.
            OutOfPages: The prompt can never fit into the pool.
        """
        num_prompt = len(request.prompt_ids)
        token_ids = check_request(request, self.shape)
        if num_prompt >= self.max_tokens:
            raise OutOfPages(self.cache.num_pages_for(num_prompt + 1), self.cache.num_pages)
        # The answer to a prompt-only request continues in the pool of a different node.
        longest = self.shape.context_length if is_prompt_only else self.max_tokens
        drawn = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        new_tokens = max(1, request.sampling.max_new_tokens - request.num_prior_tokens)
        active = ActiveRequest(
            request,
            arrival=next(self._arrivals),
            max_tokens=min(num_prompt + new_tokens, longest),
            seed=self._launcher.seed(request, drawn),
            is_prompt_only=is_prompt_only,
            is_remote=is_remote,
            token_ids=token_ids,
        )
        if request.sampling.grammar is not None:
            if self._grammars is None:
                raise InvalidRequest("this node does not support structured output")
            active.grammar = self._grammars.open(
                request.sampling.grammar, active.output_ids, self._wake
            )
        return active

    def refuse_overload(self, num_elsewhere: int = 0) -> None:
        """Raise `Overloaded` if the queue plus `num_elsewhere` requests has reached its limit."""
        num_waiting = self.num_waiting + num_elsewhere
        if num_waiting >= self._config.max_waiting_requests:
            raise Overloaded(f"{num_waiting} requests are waiting; try again later")

    def queue(self, active: ActiveRequest) -> None:
        """Queue a checked request. If its grammar does not compile, a later step reports the failure."""
        (self._scheduler.queue if active.grammar is None else self._compiling.append)(active)
        self._is_stuck = False

    def submit(self, request: GenerateRequest, *, is_prompt_only: bool = False) -> ActiveRequest:
        """Check and queue a request. Raises the errors of `check` and `refuse_overload`."""
        active = self.check(request, is_prompt_only=is_prompt_only)
        self.refuse_overload()
        self.queue(active)
        return active

    def admit(self) -> None:
        """Allocate pages to requests from the head of the queue while they fit. `step` calls this too."""
        for active in self._scheduler.admit():
            self._is_stuck = False
            if not active.is_counted:
                active.num_cached = active.num_computed
            if active.stage is Stage.RESERVED:
                self._reserved(active)
            else:
                self._count_cached(active)

    def land(
        self,
        active: ActiveRequest,
        first_token: int,
        seed: int,
        first_logprobs: TokenLogprobs | None = None,
    ) -> Token:
        """Take over a prompt whose pages have all arrived, to decode from the next step on.

        Raises:
            EngineFailed: The first token is not in the vocabulary.
            GrammarViolated: The grammar does not allow the first token.
        """
        active.seed = seed
        self._scheduler.land(active)
        if not 0 <= first_token < self.shape.vocab_size:
            # A different node sampled it. In a batch it would fail all other requests too.
            raise EngineFailed(
                f"the first token {first_token} is not in the vocabulary of {self.shape.vocab_size} tokens"
            )
        active.is_begun, self._is_stuck = True, False
        self._count_cached(active)
        self.num_prompt_tokens += active.num_prompt - active.num_cached
        self._scheduler.slots.record_first_token(active, first_token)
        index = active.next_index
        finish = self._accept_last(active, first_token)
        self._await_mask(active)
        return Token(active, index, first_token, finish, first_logprobs)

    def watch_reserved(self, reserved: Callable[[ActiveRequest], None]) -> None:
        """Set the callback for reserved pages of a prompt that a different node computes.

        The request then holds its cached prefix. A remote writer may write `granted_pages` until `land`, or until
        `quarantine` and `reclaim`.
        """
        self._reserved = reserved

    def watch_layers(self, begin: Callable[[list[CompletePages]], OnLayerWritten]) -> None:
        """Set the callback for pages that a forward is about to complete.

        The callback returns a function to call with the number of each layer once the layer is written. These
        calls may come from a different thread and may skip layers. `StepResult.pages` lists the same pages.
        """
        self._begin = begin

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        """Whether `step` has work to do."""
        if self._in_flight is not None or self._scheduler.is_admitting:
            return True
        if any(not active.awaits_mask for active in (*self._compiling, *self._masking)):
            return True
        return bool(not self._is_stuck and (self.num_running or self._scheduler.waiting))

    def step(self) -> StepResult:
        """Admit requests, launch a forward, collect one, and return its results."""
        result = StepResult()
        self._queue_compiled(result)
        if self._must_collect_first():
            self._collect_newest(result)
        self._take_masks(result)
        before, self._in_flight = self._in_flight, self._launch()
        self._is_stuck = before is None and self._in_flight is None
        if before is not None:
            self._collect(before, result)
        if not self._is_overlapped:
            self._collect_newest(result)
        return result

    # ── cancel and release ───────────────────────────────────────────────────────────────────────

    def cancel(self, active: ActiveRequest) -> None:
        """Stop a request and free its pages.

        Some pages are freed later: those of a prompt-only request on `release`, granted pages on `reclaim`, and
        pages that a forward in flight writes when that forward is collected.
        """
        if active.stage is not Stage.ENDED:
            self._end(active)

    def release(self, active: ActiveRequest) -> None:
        """Free the pages of an ended prompt-only request once nothing reads them."""
        assert active.stage is Stage.ENDED, f"release of a request that is {active.stage.value}"
        active.is_released = True
        self._release_if_unused(active)

    def quarantine(self, active: ActiveRequest) -> None:
        """Withdraw a grant: granted pages stay until `reclaim`, all others are freed now."""
        self.cache.quarantine(active.granted_pages)
        self.cancel(active)

    def reclaim(self, active: ActiveRequest) -> None:
        """Free granted or quarantined pages: no write can arrive any more."""
        self._scheduler.reclaim(active)
        self._is_stuck = False

    def note_pages(self) -> None:
        """Retry admission, because a reader other than a request has released cached pages."""
        self._scheduler.note_pages()
        self._is_stuck = False

    # ── gauges ───────────────────────────────────────────────────────────────────────────────────

    def counts(self) -> PageCounts:
        """Count the pages in each state."""
        return self.cache.counts()

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return self._scheduler.num_running

    @property
    def num_prompts(self) -> int:
        """Number of running requests whose prompt is not fully computed yet."""
        return len(self._scheduler.prompts)

    @property
    def num_waiting(self) -> int:
        """Number of queued requests, including those whose grammar is being compiled."""
        return len(self._scheduler.waiting) + len(self._compiling)

    @property
    def num_queued_tokens(self) -> int:
        """Number of tokens to compute here. Waiting requests count in full, because their cache hits may change."""
        waiting = (*self._scheduler.waiting, *self._compiling)
        return sum(len(active.token_ids) for active in waiting if not active.is_remote) + sum(
            active.num_uncomputed for active in self._scheduler.prompts
        )

    @property
    def num_retracted(self) -> int:
        """Number of times a running request lost its pages."""
        return self._scheduler.num_retracted

    # ── launching ────────────────────────────────────────────────────────────────────────────────

    def _queue_compiled(self, result: StepResult) -> None:
        """Queue the requests whose grammar was compiled."""
        for active in [each for each in self._compiling if not each.awaits_mask]:
            self._compiling.remove(active)
            if not self._has_failed(active, result):
                self._scheduler.queue(active)

    def _take_masks(self, result: StepResult) -> None:
        """Let requests run whose mask has arrived. The others sit out until theirs does."""
        if not self._masking:
            return
        grammars = [active.grammar for active in self._masking if active.grammar is not None]
        # Only the first step after a token waits, so a slow grammar delays other requests once for each of its tokens.
        due = [each.mask for each in grammars if not each.is_late]
        wait(due, _MASK_WAIT_S + _WAIT_PER_MASK_S * len(due))
        for active in [each for each in self._masking if not each.awaits_mask]:
            self._masking.remove(active)
            if not self._has_failed(active, result) and active.slot >= 0:
                self._scheduler.slots.awaits_mask[active.slot] = False
        for grammar in grammars:
            grammar.is_late = not grammar.mask.done()

    def _has_failed(self, active: ActiveRequest, result: StepResult) -> bool:
        """End the request if its mask failed; return whether it did."""
        assert active.grammar is not None
        error = active.grammar.mask.exception()
        if error is None:
            return False
        self._end(active)
        if not isinstance(error, TandemError):
            log.error("engine.grammar_failed", exc_info=error)
            error = EngineFailed(f"using the grammar failed: {error}")
        result.failures.append(Failure(active, error))
        return True

    def _await_mask(self, active: ActiveRequest) -> None:
        """Let a running request wait for the mask of its next token."""
        if active.grammar is not None and active.stage is Stage.RUNNING:
            if active not in self._masking:  # a retracted request may still be there
                self._masking.append(active)
            self._scheduler.slots.awaits_mask[active.slot] = True

    def _must_collect_first(self) -> bool:
        """Return whether the next batch depends on the tokens of the forward in flight."""
        if self._in_flight is None:
            return False
        has_grammar = self._scheduler.slots.has_grammar[self._in_flight.rows].any()
        return bool(has_grammar) or self._scheduler.is_short_of_pages

    def _launch(self) -> InFlight | None:
        self.admit()
        batch = self._scheduler.next_batch()
        if not batch:
            return None
        slots, rows = self._scheduler.slots, batch.sampled_rows()
        indexes = slots.next_index[rows].tolist()
        pages = [self._complete_pages(c) for c in batch.chunks if c.request.is_prompt_only]
        pages = [each for each in pages if each.page_ids]
        on_layer_written = self._begin(pages) if self._begin is not None and pages else None
        read = self._launcher.launch(batch, slots, on_layer_written)
        self._scheduler.advance(batch)
        for chunk in batch.chunks:
            request = chunk.request
            request.is_begun = True
            request.logprobs_until = max(request.logprobs_until, chunk.logprob_positions.stop)
            self.num_prompt_tokens += chunk.num_tokens
        for request in batch.participants():
            request.num_launched += 1
        return InFlight(batch, pages, batch.sampled(), rows, indexes, read)

    def _count_cached(self, active: ActiveRequest) -> None:
        """Count a request's prefix cache hits at its first admission."""
        if not active.is_counted:
            active.is_counted = True
            self.num_cached_tokens += active.num_cached
            self.num_prompt_tokens += active.num_cached

    def _complete_pages(self, chunk: Chunk) -> CompletePages:
        """Return the pages that `chunk` completes. The last page of a prompt may be partly filled."""
        active = chunk.request
        end = (
            self.cache.num_pages_for(active.num_prompt)
            if chunk.is_last
            else chunk.end // self.cache.page_size
        )
        first, active.num_pushable = active.num_pushable, end
        return CompletePages(active, first, active.page_ids[first:end])

    # ── collecting ───────────────────────────────────────────────────────────────────────────────

    def _collect_newest(self, result: StepResult) -> None:
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._collect(in_flight, result)

    def _collect(self, in_flight: InFlight, result: StepResult) -> None:
        """Wait for a forward and add its results to `result`."""
        participants = in_flight.batch.participants()
        try:
            try:
                outcome = in_flight.read()
            finally:
                # Failed forwards count as collected too: they no longer write, so their pages can be freed.
                for request in participants:
                    request.num_launched -= 1
            self._collect_chunks(in_flight, outcome.prompt_logprobs, result)
            self._collect_tokens(in_flight, outcome, result)
        finally:
            for request in participants:
                if request.stage is Stage.ENDED:
                    self._release_if_unused(request)
        self.steps.record(in_flight.batch, outcome)

    def _collect_chunks(
        self, in_flight: InFlight, entries: list[TokenLogprobs], result: StepResult
    ) -> None:
        for chunk in in_flight.batch.chunks:
            num_entries = len(chunk.logprob_positions)
            mine, entries = entries[:num_entries], entries[num_entries:]
            active = chunk.request
            active.num_collected = chunk.end
            if active.stage is Stage.ENDED:
                continue
            result.chunks.append(chunk)
            if mine or (chunk.is_last and _needs_only_position_0(active)):
                result.prompt_logprobs.append(
                    PromptLogprobs.run(active, chunk.logprob_positions.start, mine)
                )
            if chunk.is_last:
                self._scheduler.cache_prompt(active)
        result.pages += [
            pages for pages in in_flight.pages if pages.request.stage is not Stage.ENDED
        ]

    def _collect_tokens(self, in_flight: InFlight, outcome: Outcome, result: StepResult) -> None:
        slots, rows, tokens = self._scheduler.slots, in_flight.rows, outcome.token_ids
        slots.last_token[rows] = tokens
        slots.num_pending[rows] -= 1
        may_end = slots.num_tokens[rows] >= slots.max_tokens[rows]
        may_end |= self._is_eos[tokens] & slots.stops_at_eos[rows]
        may_end |= slots.has_stop_tokens[rows]
        columns = zip(
            in_flight.sampled, in_flight.indexes, tokens.tolist(), may_end.tolist(), strict=True
        )
        for row, (request, index, token, is_end) in enumerate(columns):
            if request.stage is Stage.ENDED:
                continue  # the request ended while this forward ran
            finish = None
            try:
                if is_end or request.is_prompt_only:
                    finish = self._accept_last(request, token)
                else:
                    request.accept(token)
                    self.num_generated_tokens += 1
                self._await_mask(request)
            except GrammarViolated as error:
                self._end(request)
                result.failures.append(Failure(request, error))
                continue
            logprobs = outcome.token_logprobs.get(row) if outcome.token_logprobs else None
            result.tokens.append(Token(request, index, token, finish, logprobs))

    def _accept_last(self, active: ActiveRequest, token: int) -> Finish | None:
        """Append a token, and end the request if this is its last token on this node."""
        finish = active.finish_at(token, self.shape.eos_token_ids)
        is_last = finish is not None or active.is_prompt_only
        active.accept(token, is_last=is_last)
        self.num_generated_tokens += 1
        if is_last:
            self._end(active)
        return finish

    def _end(self, active: ActiveRequest) -> None:
        if active.grammar is not None:
            active.grammar.close()
            for waiting in (self._compiling, self._masking):
                if active in waiting:
                    waiting.remove(active)
        self._scheduler.leave(active)
        active.stage = Stage.ENDED
        self._release_if_unused(active)

    def _release_if_unused(self, active: ActiveRequest) -> None:
        """Free an ended request's pages and slot, unless something may still read or write them."""
        if active.num_launched:
            return  # a forward in flight writes into its pages
        self._is_stuck = False
        if not active.is_prompt_only or active.is_released:
            self._scheduler.release(active)
        elif active.slot >= 0:
            self._scheduler.slots.release(active)


def _needs_only_position_0(active: ActiveRequest) -> bool:
    logprobs = active.request.logprobs
    starts_at_0 = logprobs is not None and logprobs.prompt_start == 0
    return starts_at_0 and active.num_prompt == 1 and len(active.token_ids) == 1
