"""The engine: requests in, tokens out, one `step` at a time. No loop, no socket, no clock of its own.

A role's loop calls `submit`/`reserve`, `step` and `cancel`, and acts on what they return. Every page
a request holds goes back through exactly one of `_end` (here), `release` (prefill, once pushed) or
`reclaim` (decode, once no write can arrive).
"""

import secrets
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from typing_extensions import override

from engine.batcher import Slice, next_batch
from engine.config import EngineConfig
from engine.forward import ForwardInputs
from engine.kv_cache import KVCache
from engine.model import ModelShape
from engine.pages import PageCounts
from engine.request import ActiveRequest, Stage
from engine.runner import Runner
from engine.sampler import sample
from wire.errors import InvalidRequest, OutOfPages, Overloaded
from wire.messages import Finish, GenerateRequest


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        index: Among the generated tokens of all attempts.
    """

    request: ActiveRequest
    index: int
    token: int
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class CompletePages:
    """Pages of a prompt-only request that no later forward changes: they may be pushed."""

    request: ActiveRequest
    first_page: int
    page_ids: list[int]


@dataclass(slots=True)
class StepResult:
    """What one step produced."""

    tokens: list[Token] = field(default_factory=list)
    pages: list[CompletePages] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_decodes: int = 0


class Engine:
    """A model, its pages and its batches.

    Args:
        runner: Computes forwards over the same pages that `num_pages` counts.
    """

    def __init__(
        self, runner: Runner, shape: ModelShape, config: EngineConfig, num_pages: int
    ) -> None:
        self.shape = shape
        self.cache = KVCache(
            num_pages, config.page_size, is_prefix_cache_enabled=config.is_prefix_cache_enabled
        )
        self._runner = runner
        self._config = config
        self._waiting: deque[ActiveRequest] = deque()
        self._running: list[ActiveRequest] = []
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0

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
        if len(self._waiting) >= self._config.max_waiting_requests:
            raise Overloaded(f"{len(self._waiting)} requests are waiting; try again later")
        self._waiting.append(active)
        return active

    def check(self, request: GenerateRequest, *, is_prompt_only: bool = False) -> ActiveRequest:
        """Return the request in this engine's terms, neither queued nor holding anything.

        Raises:
            InvalidRequest: The prompt is empty, too long or holds ids that are not in the vocabulary.
            OutOfPages: The prompt can never fit into the pool.
        """
        prompt = request.prompt_ids
        if not prompt:
            raise InvalidRequest("the prompt is empty")
        if min(prompt) < 0 or max(prompt) >= self.shape.vocab_size:
            raise InvalidRequest(f"prompt ids must be in 0 ... {self.shape.vocab_size - 1}")
        if any(not 0 <= i < self.shape.vocab_size for i in request.sampling.logit_bias):
            raise InvalidRequest(f"logit_bias ids must be in 0 ... {self.shape.vocab_size - 1}")
        if len(prompt) >= self.shape.context_length:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens and the context holds "
                f"{self.shape.context_length}, the answer included"
            )
        if len(prompt) >= self.max_tokens:
            raise OutOfPages(self.cache.num_pages_for(len(prompt) + 1), self.cache.num_pages)
        new_tokens = request.sampling.max_new_tokens - request.num_prior_tokens
        return ActiveRequest(
            request,
            max_tokens=min(len(prompt) + max(1, new_tokens), self.max_tokens),
            is_prompt_only=is_prompt_only,
            token_ids=list(prompt),
            seed=secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed,
        )

    def reserve(self, active: ActiveRequest) -> bool:
        """Set pages aside for a prompt that another node computes; False when too few are free.

        On success the request holds its cached prefix and its pages for the answer, and
        `active.granted_pages` may be written from afar until `land` or `reclaim`.
        """
        match = self.cache.match(active.token_ids[:-1], active.request.cache_salt)
        num_prompt = self.cache.num_pages_for(active.num_prompt) - len(match.page_ids)
        num_total = self.cache.num_pages_for(active.max_tokens) - len(match.page_ids)
        own = self.cache.allocate(num_total - num_prompt)
        granted = None if own is None else self.cache.grant(num_prompt)
        if own is None or granted is None:
            self.cache.release(match.page_ids + (own or []))
            return False
        active.page_ids = match.page_ids + granted + own
        active.granted_from, active.num_granted = len(match.page_ids), num_prompt
        active.num_computed = active.num_cached = match.num_tokens
        active.stage = Stage.RESERVED
        return True

    def land(self, active: ActiveRequest, first_token: int, seed: int) -> Token:
        """Take over a prompt whose pages all arrived; it decodes from the next step on."""
        self.cache.land(active.granted_pages)
        active.num_granted = 0
        active.num_computed = active.num_prompt
        active.seed = seed
        active.stage = Stage.RUNNING
        self.cache.remember(active.request.prompt_ids, active.page_ids, active.request.cache_salt)
        self.num_prompt_tokens += active.num_prompt
        self.num_cached_tokens += active.num_cached
        self._running.append(active)
        return self._accept(active, first_token)

    # ── what runs ────────────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute."""
        return bool(self._running or self._waiting)

    def step(self) -> StepResult:
        """Admit, run one forward, sample, and return what came out."""
        self._admit()
        batch = next_batch(self._running, self._config.chunked_prefill_size)
        result = StepResult()
        if not batch:
            return result
        batch.sort(key=lambda piece: piece.num_tokens > 1)
        logits = self._runner.forward(_inputs(batch, self.cache.page_size))
        sampled = [piece.request for piece in batch if piece.is_last]
        for piece in batch:
            is_prompt = piece.request.num_computed < piece.request.num_prompt
            result.num_prompt_tokens += piece.num_tokens if is_prompt else 0
            result.num_decodes += not is_prompt
            piece.request.num_computed += piece.num_tokens
            if piece.request.is_prompt_only:
                result.pages.append(self._complete_pages(piece.request))
        tokens = sample(logits, sampled, self.shape.eos_token_ids) if sampled else []
        for active, token in zip(sampled, tokens, strict=True):
            if active.num_computed == active.num_prompt:
                salt = active.request.cache_salt
                self.cache.remember(active.request.prompt_ids, active.page_ids, salt)
            result.tokens.append(self._accept(active, token))
        self.num_prompt_tokens += result.num_prompt_tokens
        return result

    # ── what goes back ───────────────────────────────────────────────────────────────────────────

    def cancel(self, active: ActiveRequest) -> None:
        """Stop a request; its pages go back now, with two exceptions.

        Those of a prompt-only request wait for `release`, granted ones for `reclaim`.
        """
        if active.stage is Stage.WAITING and active in self._waiting:
            self._waiting.remove(active)
        if active.stage is not Stage.ENDED:
            self._end(active)

    def release(self, active: ActiveRequest) -> None:
        """Give back the pages of an ended prompt-only request: nobody reads them any more."""
        assert active.stage is Stage.ENDED, f"release of a request that is {active.stage.value}"
        self._give_back(active)

    def quarantine(self, active: ActiveRequest) -> None:
        """Withdraw a grant: the granted pages wait for `reclaim`, the others go back now."""
        self.cache.quarantine(active.granted_pages)
        self.cancel(active)

    def reclaim(self, active: ActiveRequest) -> None:
        """Free granted or quarantined pages: no write can arrive any more."""
        self.cache.reclaim(active.granted_pages)
        active.page_ids = []
        active.num_granted = 0

    def counts(self) -> PageCounts:
        """Return how many pages are in each state."""
        return self.cache.counts()

    @property
    def num_running(self) -> int:
        """Requests with pages."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without pages."""
        return len(self._waiting)

    @override
    def __repr__(self) -> str:
        return (
            f"Engine({len(self._running)} running, {len(self._waiting)} waiting, {self.counts()})"
        )

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._config.max_running_requests:
            active = self._waiting[0]
            if not self._find_pages(active):
                return
            self._waiting.popleft()
            active.stage = Stage.RUNNING
            self._running.append(active)

    def _find_pages(self, active: ActiveRequest) -> bool:
        """Give a request its cached prefix and all the pages it can come to need."""
        match = self.cache.match(active.token_ids[:-1], active.request.cache_salt)
        length = active.num_prompt if active.is_prompt_only else active.max_tokens
        own = self.cache.allocate(self.cache.num_pages_for(length) - len(match.page_ids))
        if own is None:
            self.cache.release(match.page_ids)
            return False
        active.page_ids = match.page_ids + own
        active.num_computed = active.num_cached = match.num_tokens
        self.num_cached_tokens += match.num_tokens
        return True

    def _complete_pages(self, active: ActiveRequest) -> CompletePages:
        """Return the pages that became complete; the last one of a prompt may be partly filled."""
        is_done = active.num_computed == active.num_prompt
        end = (
            self.cache.num_pages_for(active.num_prompt)
            if is_done
            else active.num_computed // self.cache.page_size
        )
        first, active.num_pushable = active.num_pushable, end
        return CompletePages(active, first, active.page_ids[first:end])

    def _accept(self, active: ActiveRequest, token: int) -> Token:
        index = active.next_index
        finish = active.accept(token, self.shape.eos_token_ids)
        self.num_generated_tokens += 1
        if finish is not None or active.is_prompt_only:
            self._end(active)
        return Token(active, index, token, finish)

    def _end(self, active: ActiveRequest) -> None:
        was_running = active.stage is Stage.RUNNING
        is_reserved = active.stage is Stage.RESERVED
        active.stage = Stage.ENDED
        if was_running:
            self._running.remove(active)
        if active.is_prompt_only:
            return
        if is_reserved:
            self._give_back_ungranted(active)
        else:
            self._give_back(active)

    def _give_back(self, active: ActiveRequest) -> None:
        known = active.token_ids[: active.num_computed]
        if active.page_ids:
            self.cache.remember(known, active.page_ids, active.request.cache_salt)
        self.cache.release(active.page_ids)
        active.page_ids = []

    def _give_back_ungranted(self, active: ActiveRequest) -> None:
        granted = active.granted_pages
        end = active.granted_from + active.num_granted
        self.cache.release(active.page_ids[: active.granted_from] + active.page_ids[end:])
        active.page_ids, active.granted_from = granted, 0


def _inputs(batch: list[Slice], page_size: int) -> ForwardInputs:
    ids: list[int] = []
    positions: list[int] = []
    starts, kv_lens, last_rows = [0], [], []
    for piece in batch:
        begin, end = piece.request.num_computed, piece.request.num_computed + piece.num_tokens
        ids += piece.request.token_ids[begin:end]
        positions += range(begin, end)
        starts.append(len(ids))
        kv_lens.append(end)
        if piece.is_last:
            last_rows.append(len(ids) - 1)
    table = np.zeros((len(batch), -(-max(kv_lens) // page_size)), np.int32)
    for row, piece in enumerate(batch):
        pages = piece.request.page_ids[: table.shape[1]]
        table[row, : len(pages)] = pages
    return ForwardInputs(
        token_ids=np.array(ids),
        sources=np.full(len(ids), -1),
        positions=np.array(positions),
        query_starts=np.array(starts, np.int32),
        kv_lens=np.array(kv_lens, np.int32),
        page_table=table,
        num_decodes=sum(piece.num_tokens == 1 for piece in batch),
        logit_rows=np.array(last_rows, np.int64),
    )
