"""The engine: requests in, tokens out, one `step` at a time. No loop, no socket, no clock of its own.

A role's loop calls `submit`/`reserve`, `step` and `cancel`, and acts on what they return. A step
launches one forward and collects one. On a device that computes beside the host the forward
collected is the one before: the next is prepared and queued while it runs, taking tokens that the
host has not read yet from the device.

Every page a request holds goes back through exactly one of `_let_go` (here), `release` (prefill,
once pushed) or `reclaim` (decode, once no write can arrive).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from typing_extensions import override

from tandem.engine.batcher import Chunk
from tandem.engine.collector import Collector
from tandem.engine.config import EngineConfig
from tandem.engine.forward import Wrote
from tandem.engine.intake import Intake
from tandem.engine.kv_cache import KVCache
from tandem.engine.launched import Launched, Launcher
from tandem.engine.pages import PageCounts
from tandem.engine.request import ActiveRequest, Stage
from tandem.engine.results import CompletePages, Failure, StepResult, Token
from tandem.engine.scheduler import Scheduler
from tandem.engine.shape import ModelShape
from tandem.engine.step_counts import StepCounts
from tandem.wire.errors import EngineFailed, Overloaded, TandemError
from tandem.wire.generation import GenerateRequest, TokenLogprobs

if TYPE_CHECKING:
    from tandem.engine.grammar_compiler import GrammarCompiler


class Engine:
    """A model, its pages and its batches.

    Args:
        launcher: Computes forwards over the same pages that `num_pages` counts.
        compiler: Of grammars; without one, requests with a grammar are refused.
        wake: Called from another thread when a request's grammar was compiled.

    Attributes:
        num_prompt_tokens: Prompt tokens so far, cached ones included.
        num_cached_tokens: Those found in the prefix cache.
        steps: What is counted of forwards.
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
        self.shape = shape
        size = config.page_size
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
        self._scheduler = Scheduler(self.cache, config, self.max_tokens)
        self._collector = Collector(self._scheduler, shape, self._end)
        self._is_overlapped = (
            launcher.is_beside_host if config.is_overlapped is None else config.is_overlapped
        )
        self._intake = Intake(
            shape, self.cache, self.max_tokens, launcher, compiler=compiler, wake=wake
        )
        self._begin: Callable[[list[CompletePages]], Wrote] | None = None
        # In no line yet: their grammar is being compiled.
        self._compiling: list[ActiveRequest] = []
        self._launched: Launched | None = None
        # Nothing could be launched: until something changes, another step would be the same.
        self._is_stuck = False
        self.steps = StepCounts()
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    # ── what comes in ────────────────────────────────────────────────────────────────────────────

    @property
    def max_tokens(self) -> int:
        """Prompt plus generated tokens of one request, at most: context or pool, the smaller."""
        return min(self.shape.context_length, self.cache.num_pages * self.cache.page_size)

    def submit(self, request: GenerateRequest, *, is_prompt_only: bool = False) -> ActiveRequest:
        """Queue a request.

        Args:
            is_prompt_only: End with the first token and keep the pages until `release`.

        Raises:
            InvalidRequest, OutOfPages, Overloaded: It cannot run here, or not now.
        """
        active = self.check(request, is_prompt_only=is_prompt_only)
        self.refuse_overload()
        self.queue(active)
        return active

    def refuse_overload(self, num_elsewhere: int = 0) -> None:
        """Raise `Overloaded` if no more requests may wait.

        Args:
            num_elsewhere: Requests that wait, beside those here.
        """
        num_waiting = self.num_waiting + num_elsewhere
        if num_waiting >= self._config.max_waiting_requests:
            raise Overloaded(f"{num_waiting} requests are waiting; try again later")

    def queue(self, active: ActiveRequest) -> None:
        """Queue a checked request."""
        (self._scheduler.waiting.add if active.is_ready else self._compiling.append)(active)
        self._is_stuck = False

    def check(self, request: GenerateRequest, *, is_prompt_only: bool = False) -> ActiveRequest:
        """See `Intake.check`."""
        return self._intake.check(request, is_prompt_only=is_prompt_only)

    def enter(self, active: ActiveRequest) -> bool:
        """Begin a checked request that waited elsewhere; False when it has to wait on.

        For a role that keeps the line itself: as `submit` and its turn in one. What it has to wait for
        is as for `reserve`.

        Raises:
            TandemError: Its grammar cannot be compiled.
        """
        if not active.is_ready or not self._scheduler.enter(active):
            return False
        self._count_cached()
        self._is_stuck = False
        return True

    def reserve(self, active: ActiveRequest) -> bool:
        """Set pages aside for a prompt that another node computes; False when it has to wait.

        On success the request holds its cached prefix, and `active.granted_pages` may be written
        from afar until `land` or `reclaim`. It has to wait for pages, for its grammar, or for another
        request that brings the same prompt (`active.is_held`).

        Raises:
            TandemError: Its grammar cannot be compiled.
        """
        if not active.is_ready or not self._scheduler.reserve(active):
            return False
        active.num_cached = active.num_computed
        return True

    def land(
        self,
        active: ActiveRequest,
        first_token: int,
        seed: int,
        first_logprobs: TokenLogprobs | None = None,
    ) -> Token:
        """Take over a prompt whose pages all arrived; it decodes from the next step on.

        Raises:
            EngineFailed: The first token is none of the vocabulary.
            GrammarViolated: The first token is not one that the grammar allows.
        """
        active.seed = seed
        self._scheduler.slots.set_seed(active)
        self._scheduler.land(active)
        if not 0 <= first_token < self.shape.vocab_size:
            # Another node chose it: in a batch it would fail every request that runs beside it.
            raise EngineFailed(f"first token {first_token} of {self.shape.vocab_size}")
        self._is_stuck = False
        self.num_prompt_tokens += active.num_prompt
        self.num_cached_tokens += active.num_cached
        index, slot = active.next_index, active.slot
        self._scheduler.slots.num_tokens[slot] += 1
        self._scheduler.slots.next_index[slot] += 1
        self._scheduler.slots.last_token[slot] = first_token
        finish = self._collector.accept(active, first_token)
        return Token(active, index, first_token, finish, first_logprobs)

    def warm_up(self) -> None:
        """Run what is compiled or allocated at its first use. Before the first request."""
        self._launcher.warm_up()

    def watch_layers(self, begin: Callable[[list[CompletePages]], Wrote]) -> None:
        """Have `begin` told of the pages that a forward is about to complete.

        What it returns is called with the number of each layer that is in these pages; perhaps from
        another thread, perhaps not for all. `StepResult.pages` tells of the same pages at the end.
        """
        self._begin = begin

    # ── what runs ────────────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute."""
        if self._launched is not None or any(_is_settled(active) for active in self._compiling):
            return True
        has_any = self.num_running or self._scheduler.waiting
        return bool(not self._is_stuck and has_any)

    def step(self) -> StepResult:
        """Admit, launch a forward, collect one, and return what came out."""
        result = StepResult()
        self._take_compiled(result)
        if self._launched is not None and self._must_collect_first():
            self._collect(result)
        before, newest = self._launched, self._launch()
        self._launched = newest
        self._is_stuck = before is None and newest is None
        if before is not None:
            self._collect(result, before)
        if not self._is_overlapped:
            self._collect(result)
        return result

    # ── what goes back ───────────────────────────────────────────────────────────────────────────

    def cancel(self, active: ActiveRequest) -> None:
        """Stop a request; its pages go back now, with exceptions.

        Those of a prompt-only request wait for `release`, granted ones for `reclaim`, and those
        that a forward under way writes into wait for it.
        """
        if active.stage is not Stage.ENDED:
            self._end(active)

    def release(self, active: ActiveRequest) -> None:
        """Give back the pages of an ended prompt-only request: nobody reads them any more."""
        assert active.stage is Stage.ENDED, f"release of a request that is {active.stage.value}"
        active.is_released = True
        self._let_go(active)

    def quarantine(self, active: ActiveRequest) -> None:
        """Withdraw a grant: the granted pages wait for `reclaim`, the others go back now."""
        self.cache.quarantine(active.granted_pages)
        self.cancel(active)

    def reclaim(self, active: ActiveRequest) -> None:
        """Free granted or quarantined pages: no write can arrive any more."""
        self._scheduler.reclaim(active)
        self._is_stuck = False

    def note_pages(self) -> None:
        """Pages of the cache came back whose readers were no requests: who lacks pages is tried again."""
        self._scheduler.note_pages()
        self._is_stuck = False

    def counts(self) -> PageCounts:
        """Return how many pages are in each state."""
        return self.cache.counts()

    @property
    def num_running(self) -> int:
        """Requests that take part in forwards."""
        return self._scheduler.num_running

    @property
    def num_prompts(self) -> int:
        """Of these, requests whose prompt is not computed."""
        return len(self._scheduler.prompts)

    @property
    def num_waiting(self) -> int:
        """Requests without pages."""
        return len(self._scheduler.waiting) + len(self._compiling)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens to compute: of those that wait all, since what is cached of them may change."""
        waiting = (*self._scheduler.waiting, *self._compiling)
        return sum(len(active.token_ids) for active in waiting) + sum(
            active.num_uncomputed for active in self._scheduler.prompts
        )

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far, those that another node chose included."""
        return self._collector.num_tokens

    @property
    def num_retracted(self) -> int:
        """How often a running request had to give its pages back."""
        return self._scheduler.num_retracted

    @override
    def __repr__(self) -> str:
        return f"Engine({self._scheduler!r})"

    # ── launching ────────────────────────────────────────────────────────────────────────────────

    def _must_collect_first(self) -> bool:
        """Tell whether the next forward cannot be chosen before the last one's tokens are known."""
        assert self._launched is not None
        slots = self._scheduler.slots
        going_on = [request.slot for request in self._launched.sampled if request.slot >= 0]
        return bool(slots.is_special[going_on].any()) or self._scheduler.is_short_of_pages

    def _launch(self) -> Launched | None:
        num_waiting = self.num_waiting
        self._scheduler.admit()
        if self.num_waiting < num_waiting:
            self._count_cached()
        batch = self._scheduler.next_batch()
        if not batch:
            return None
        pages = [self._complete_pages(c) for c in batch.chunks if c.request.is_prompt_only]
        pages = [each for each in pages if each.page_ids]
        wrote = self._begin(pages) if self._begin is not None and pages else None
        launched = self._launcher.launch(batch, self._scheduler.slots, pages, wrote)
        self._scheduler.advance(batch)
        for end in launched.chunks:
            end.chunk.request.told_until = max(end.chunk.request.told_until, end.told.stop)
        for request in launched.participants():
            request.num_launched += 1
        self.num_prompt_tokens += sum(chunk.num_tokens for chunk in batch.chunks)
        return launched

    def _count_cached(self) -> None:
        """Note what newly admitted requests found in the prefix cache."""
        for active in self._scheduler.prompts:
            if not active.is_counted:
                active.is_counted = True
                active.num_cached = active.num_collected = active.num_computed
                self.num_cached_tokens += active.num_cached
                self.num_prompt_tokens += active.num_cached

    # ── collecting ───────────────────────────────────────────────────────────────────────────────

    def _collect(self, result: StepResult, launched: Launched | None = None) -> None:
        """Read what a forward produced: `launched`, or the newest, which is then none any more."""
        if launched is None:
            launched, self._launched = self._launched, None
        if launched is None:
            return
        try:
            self._collector.collect(launched, result)
        finally:
            for request in launched.participants():
                if request.stage is Stage.ENDED:
                    self._let_go(request)
        self.steps.collected(launched)

    def _complete_pages(self, chunk: Chunk) -> CompletePages:
        """Return the pages that `chunk` completes; the last one of a prompt may be partly filled."""
        active = chunk.request
        end = (
            self.cache.num_pages_for(active.num_prompt)
            if chunk.is_last
            else (active.num_computed + chunk.num_tokens) // self.cache.page_size
        )
        first, active.num_pushable = active.num_pushable, end
        return CompletePages(active, first, active.page_ids[first:end])

    def _take_compiled(self, result: StepResult) -> None:
        """Put those whose grammar was compiled in line."""
        for active in self._compiling.copy():
            try:
                if not active.is_ready:
                    continue
            except TandemError as error:
                self._end(active)
                result.failures.append(Failure(active, error))
            else:
                self._compiling.remove(active)
                self._scheduler.waiting.add(active)

    def _end(self, active: ActiveRequest) -> None:
        if active in self._compiling:
            self._compiling.remove(active)
        self._scheduler.leave(active)
        active.stage = Stage.ENDED
        self._let_go(active)

    def _let_go(self, active: ActiveRequest) -> None:
        """Give back what an ended request has, as far as nobody reads or writes it any more."""
        if active.num_launched:
            return  # the forward under way writes into its pages
        self._is_stuck = False
        if not active.is_prompt_only or active.is_released:
            self._scheduler.give_back(active)
        elif active.slot >= 0:
            self._scheduler.slots.give_back(active)


def _is_settled(active: ActiveRequest) -> bool:
    return active.compiling is None or active.compiling.done()
