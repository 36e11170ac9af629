"""The engine: requests in, tokens out, one `step` at a time. It has no loop, no sockets and no clock.

A role's loop queues requests, calls `step` and `cancel`, and acts on the results. A step admits requests that
fit, launches one forward and collects one. On an asynchronous device it collects the previous forward: the
next one is prepared and queued while that runs, and reads sampled tokens on the device before the host has
them.

Every page of a request is freed through exactly one of `_let_go` (here), `release` (prefill, once the page
was pushed) or `reclaim` (decode, once no write can arrive).
"""

import itertools
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tandem.engine.config import EngineConfig
from tandem.engine.errors import GrammarViolated
from tandem.engine.forward import Chunk, Wrote
from tandem.engine.kv_cache import KVCache, PageCounts
from tandem.engine.request import ActiveRequest, Stage, check_request
from tandem.engine.scheduler import Scheduler
from tandem.engine.shape import ModelShape
from tandem.engine.step import (
    CompletePages,
    Failure,
    Launched,
    Launcher,
    Outcome,
    PromptLogprobs,
    StepCounts,
    StepResult,
    Token,
)
from tandem.telemetry.log import get_logger
from tandem.wire.errors import EngineFailed, InvalidRequest, OutOfPages, Overloaded, TandemError
from tandem.wire.generation import Finish, GenerateRequest, TokenLogprobs

if TYPE_CHECKING:
    from tandem.engine.grammar_compiler import GrammarCompiler

log = get_logger(__name__)


class Engine:
    """A model, its pages and its batches.

    Args:
        launcher: Computes forwards over the same pages that `num_pages` counts.
        compiler: Compiles grammars. None: requests with a grammar are rejected.
        wake: Called on another thread when a request's grammar is compiled.

    Attributes:
        num_prompt_tokens: Total since the start, prefix cache hits (`num_cached_tokens`) included.
        num_generated_tokens: Total since the start, first tokens sampled by other nodes included.
    """

    def __init__(
        self,
        launcher: Launcher,
        shape: ModelShape,
        config: EngineConfig,
        num_pages: int,
        *,
        compiler: "GrammarCompiler | None" = None,
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
        self._compiler = compiler
        self._wake = wake
        self._scheduler = Scheduler(self.cache, config, self.max_tokens)
        self._is_overlapped = (
            launcher.is_beside_host if config.is_overlapped is None else config.is_overlapped
        )
        self._is_eos = np.zeros(shape.vocab_size, np.bool_)
        self._is_eos[[i for i in shape.eos_token_ids if i < shape.vocab_size]] = True
        self._arrivals = itertools.count()
        self._reserved: Callable[[ActiveRequest], None] = lambda _active: None
        self._begin: Callable[[list[CompletePages]], Wrote] | None = None
        # Requests whose grammar is being compiled; not yet queued.
        self._compiling: list[ActiveRequest] = []
        self._launched: Launched | None = None
        # The last step launched nothing, and no change since could alter that.
        self._is_stuck = False
        self.steps = StepCounts()
        self.num_prompt_tokens = self.num_cached_tokens = self.num_generated_tokens = 0

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    @property
    def max_tokens(self) -> int:
        """Limit of prompt plus generated tokens of one request: the context length or the pool's size."""
        return min(self.shape.context_length, self.cache.num_pages * self.cache.page_size)

    def check(
        self, request: GenerateRequest, *, is_prompt_only: bool = False, is_remote: bool = False
    ) -> ActiveRequest:
        """Validate a request and return its `ActiveRequest`, which is not queued and holds no pages.

        Starts to compile the request's grammar, if it has one.

        Args:
            is_prompt_only: End with the first token and keep the pages until `release`.
            is_remote: Another node computes the prompt: see `watch_reserved`.

        Raises:
            InvalidRequest: The request is invalid, or needs a feature that this node lacks.
            OutOfPages: The prompt can never fit into the pool.
        """
        num_prompt = len(request.prompt_ids)
        check_request(request, self.shape)
        if num_prompt >= self.max_tokens:
            raise OutOfPages(self.cache.num_pages_for(num_prompt + 1), self.cache.num_pages)
        drawn = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        new_tokens = max(1, request.sampling.max_new_tokens - request.num_prior_tokens)
        active = ActiveRequest(
            request,
            arrival=next(self._arrivals),
            max_tokens=min(num_prompt + new_tokens, self.max_tokens),
            seed=self._launcher.seed(request, drawn),
            is_prompt_only=is_prompt_only,
            is_remote=is_remote,
            token_ids=list(request.prompt_ids),
        )
        if request.sampling.grammar is not None:
            if self._compiler is None:
                raise InvalidRequest("this node compiles no grammars")
            active.compiling = self._compiler.compile(request.sampling.grammar)
            active.compiling.add_done_callback(lambda _future: self._wake())
        return active

    def refuse_overload(self, num_elsewhere: int = 0) -> None:
        """Raise `Overloaded` if the queue, with `num_elsewhere` more requests, has reached its limit."""
        num_waiting = self.num_waiting + num_elsewhere
        if num_waiting >= self._config.max_waiting_requests:
            raise Overloaded(f"{num_waiting} requests are waiting; try again later")

    def queue(self, active: ActiveRequest) -> None:
        """Queue a checked request. If its grammar does not compile, a later step reports its failure."""
        (self._scheduler.queue if active.compiling is None else self._compiling.append)(active)
        self._is_stuck = False

    def submit(self, request: GenerateRequest, *, is_prompt_only: bool = False) -> ActiveRequest:
        """Check and queue a request; raises the errors of `check` and `refuse_overload`."""
        active = self.check(request, is_prompt_only=is_prompt_only)
        self.refuse_overload()
        self.queue(active)
        return active

    def admit(self) -> None:
        """Allocate pages to the requests at the head of the queue that fit. `step` calls this too."""
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
        """Take over a prompt whose pages have all arrived. It decodes from the next step on.

        Raises:
            EngineFailed: The first token is not in the vocabulary.
            GrammarViolated: The grammar does not allow the first token.
        """
        active.seed = seed
        self._scheduler.land(active)
        if not 0 <= first_token < self.shape.vocab_size:
            # Another node sampled it. In a batch it would fail every other request too.
            raise EngineFailed(f"first token {first_token} of {self.shape.vocab_size}")
        active.is_begun, self._is_stuck = True, False
        self._count_cached(active)
        self.num_prompt_tokens += active.num_prompt - active.num_cached
        self._scheduler.slots.landed(active, first_token)
        index = active.next_index
        finish = self._accept_last(active, first_token)
        return Token(active, index, first_token, finish, first_logprobs)

    def watch_reserved(self, reserved: Callable[[ActiveRequest], None]) -> None:
        """Set the callback for when pages are reserved for a prompt that another node computes.

        The request then holds its cached prefix. A remote writer may write `granted_pages` until
        `land`, or until `quarantine` and `reclaim`.
        """
        self._reserved = reserved

    def watch_layers(self, begin: Callable[[list[CompletePages]], Wrote]) -> None:
        """Set the callback for the pages that a forward is about to complete.

        It returns a function that takes the number of each layer once the layer is written. Calls may come
        from another thread and may skip layers. `StepResult.pages` lists the same pages.
        """
        self._begin = begin

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute."""
        if self._launched is not None or any(map(_is_compiled, self._compiling)):
            return True
        return bool(not self._is_stuck and (self.num_running or self._scheduler.waiting))

    def step(self) -> StepResult:
        """Admit requests, launch a forward, collect one, and return its results."""
        result = StepResult()
        self._queue_compiled(result)
        if self._must_collect_first():
            self._collect_newest(result)
        before, self._launched = self._launched, self._launch()
        self._is_stuck = before is None and self._launched is None
        if before is not None:
            self._collect(before, result)
        if not self._is_overlapped:
            self._collect_newest(result)
        return result

    # ── cancel and release ───────────────────────────────────────────────────────────────────────

    def cancel(self, active: ActiveRequest) -> None:
        """Stop a request and free its pages.

        Some pages are freed later: a prompt-only request's on `release`, granted pages on `reclaim`,
        and pages that a forward in flight writes when it is collected.
        """
        if active.stage is not Stage.ENDED:
            self._end(active)

    def release(self, active: ActiveRequest) -> None:
        """Free the pages of an ended prompt-only request, which nothing reads any more."""
        assert active.stage is Stage.ENDED, f"release of a request that is {active.stage.value}"
        active.is_released = True
        self._let_go(active)

    def quarantine(self, active: ActiveRequest) -> None:
        """Withdraw a grant: the granted pages wait for `reclaim`, the others are freed now."""
        self.cache.quarantine(active.granted_pages)
        self.cancel(active)

    def reclaim(self, active: ActiveRequest) -> None:
        """Free granted or quarantined pages: no write can arrive any more."""
        self._scheduler.reclaim(active)
        self._is_stuck = False

    def note_pages(self) -> None:
        """Retry admission after a reader other than a request released cached pages."""
        self._scheduler.note_pages()
        self._is_stuck = False

    # ── gauges ───────────────────────────────────────────────────────────────────────────────────

    def counts(self) -> PageCounts:
        """Count the pages in each state."""
        return self.cache.counts()

    @property
    def num_running(self) -> int:
        """Number of requests that take part in forwards."""
        return self._scheduler.num_running

    @property
    def num_prompts(self) -> int:
        """Number of running requests whose prompt is not fully computed."""
        return len(self._scheduler.prompts)

    @property
    def num_waiting(self) -> int:
        """Number of queued requests, including those whose grammar is being compiled."""
        return len(self._scheduler.waiting) + len(self._compiling)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens to compute here. Waiting requests count in full, because cache hits may change."""
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
        for active in self._compiling.copy():
            try:
                if not active.is_ready:
                    continue
            except Exception as error:
                # Left in the list, it would fail every later step.
                self._end(active)
                if not isinstance(error, TandemError):
                    log.exception("engine.grammar_failed")
                    error = EngineFailed(f"the grammar cannot be used: {error}")
                result.failures.append(Failure(active, error))
            else:
                self._compiling.remove(active)
                self._scheduler.queue(active)

    def _must_collect_first(self) -> bool:
        """Return whether the next batch depends on the tokens of the forward in flight."""
        if self._launched is None:
            return False
        has_grammar = self._scheduler.slots.has_grammar[self._launched.rows].any()
        return bool(has_grammar) or self._scheduler.is_short_of_pages

    def _launch(self) -> Launched | None:
        self.admit()
        batch = self._scheduler.next_batch()
        if not batch:
            return None
        slots, rows = self._scheduler.slots, batch.sampled_rows()
        indexes = slots.next_index[rows].tolist()
        pages = [self._complete_pages(c) for c in batch.chunks if c.request.is_prompt_only]
        pages = [each for each in pages if each.page_ids]
        wrote = self._begin(pages) if self._begin is not None and pages else None
        read = self._launcher.launch(batch, slots, wrote)
        self._scheduler.advance(batch)
        for chunk in batch.chunks:
            request = chunk.request
            request.is_begun, request.told_until = True, max(request.told_until, chunk.told.stop)
            self.num_prompt_tokens += chunk.num_tokens
        for request in batch.participants():
            request.num_launched += 1
        return Launched(batch, pages, batch.sampled(), rows, indexes, read)

    def _count_cached(self, active: ActiveRequest) -> None:
        """Count a request's prefix cache hits, once, at its first admission."""
        if not active.is_counted:
            active.is_counted = True
            self.num_cached_tokens += active.num_cached
            self.num_prompt_tokens += active.num_cached

    def _complete_pages(self, chunk: Chunk) -> CompletePages:
        """Return the pages that `chunk` completes; a prompt's last page may be partly filled."""
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
        launched, self._launched = self._launched, None
        if launched is not None:
            self._collect(launched, result)

    def _collect(self, launched: Launched, result: StepResult) -> None:
        """Wait for a forward and add its results to `result`."""
        participants = launched.batch.participants()
        try:
            try:
                outcome = launched.read()
            finally:
                # A failed forward counts too: it writes no more, so its pages can be freed.
                for request in participants:
                    request.num_launched -= 1
            self._collect_chunks(launched, outcome.prompt_logprobs, result)
            self._collect_tokens(launched, outcome, result)
        finally:
            for request in participants:
                if request.stage is Stage.ENDED:
                    self._let_go(request)
        self.steps.collected(launched.batch, outcome)

    def _collect_chunks(
        self, launched: Launched, entries: list[TokenLogprobs], result: StepResult
    ) -> None:
        for chunk in launched.batch.chunks:
            mine, entries = entries[: len(chunk.told)], entries[len(chunk.told) :]
            active = chunk.request
            active.num_collected = chunk.end
            if active.stage is Stage.ENDED:
                continue
            result.chunks.append(chunk)
            if mine or (chunk.is_last and _wants_only_position_0(active)):
                result.prompt_logprobs.append(PromptLogprobs.run(active, chunk.told.start, mine))
            if chunk.is_last:
                self._scheduler.computed(active)
        result.pages += [
            pages for pages in launched.pages if pages.request.stage is not Stage.ENDED
        ]

    def _collect_tokens(self, launched: Launched, outcome: Outcome, result: StepResult) -> None:
        slots, rows, tokens = self._scheduler.slots, launched.rows, outcome.token_ids
        slots.last_token[rows] = tokens
        slots.num_pending[rows] -= 1
        may_end = slots.num_tokens[rows] >= slots.max_tokens[rows]
        may_end |= self._is_eos[tokens] & slots.stops_at_eos[rows]
        may_end |= slots.ends_specially[rows]
        columns = zip(
            launched.sampled, launched.indexes, tokens.tolist(), may_end.tolist(), strict=True
        )
        for row, (request, index, token, is_end) in enumerate(columns):
            if request.stage is Stage.ENDED:
                continue  # it ended while this forward ran
            finish = None
            try:
                if is_end or request.is_prompt_only:
                    finish = self._accept_last(request, token)
                else:
                    request.accept(token)
                    self.num_generated_tokens += 1
            except GrammarViolated as error:
                self._end(request)
                result.failures.append(Failure(request, error))
                continue
            logprobs = outcome.token_logprobs.get(row) if outcome.token_logprobs else None
            result.tokens.append(Token(request, index, token, finish, logprobs))

    def _accept_last(self, active: ActiveRequest, token: int) -> Finish | None:
        """Append a token, and end the request if it is the last one on this node."""
        active.accept(token)
        self.num_generated_tokens += 1
        finish = active.finish_at(token, self.shape.eos_token_ids)
        if finish is not None or active.is_prompt_only:
            self._end(active)
        return finish

    def _end(self, active: ActiveRequest) -> None:
        if active in self._compiling:
            self._compiling.remove(active)
        self._scheduler.leave(active)
        active.stage = Stage.ENDED
        self._let_go(active)

    def _let_go(self, active: ActiveRequest) -> None:
        """Free an ended request's pages and slot, unless something may still read or write them."""
        if active.num_launched:
            return  # the forward in flight writes into its pages
        self._is_stuck = False
        if not active.is_prompt_only or active.is_released:
            self._scheduler.give_back(active)
        elif active.slot >= 0:
            self._scheduler.slots.give_back(active)


def _is_compiled(active: ActiveRequest) -> bool:
    return active.compiling is None or active.compiling.done()


def _wants_only_position_0(active: ActiveRequest) -> bool:
    wanted = active.request.logprobs
    is_asked = wanted is not None and wanted.prompt_start == 0
    return is_asked and active.num_prompt == 1 and len(active.token_ids) == 1
