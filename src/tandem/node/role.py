"""The base class of roles: the interface to the loop, request timelines and deadlines, load reports.

A request has one identity at a node: its ticket. The role keeps one record per request (`Half`). The engine's
request refers to the record as its owner, so results need no lookup.
"""

import heapq
import itertools
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.request import NO_ADAPTERS, ActiveRequest
from tandem.engine.scheduling.step import PromptLogprobs, Token
from tandem.node.answers import Answers, Ticket
from tandem.node.tiers.tiering import Tiering
from tandem.wire.errors import DeadlinePassed, InvalidRequest, TandemError
from tandem.wire.generation import Phase
from tandem.wire.messages import ChangeAdapter, NodeLoad, StartColocated, StartDecode, StartPrefill

T = TypeVar("T")
Start = StartPrefill | StartDecode | StartColocated

# Maximum number of reported chunks of a prompt; the last one covers the rest.
MAX_CHUNKS = 64


class Timeline:
    """The phases of one request since the node accepted it. They are sent to the edge worker with tokens.

    Sequential phases have no gaps: each starts where the previous one ended. Parallel phases have their own start times.

    Args:
        clock: Monotonic clock, in seconds.
    """

    __slots__ = ("_chunks", "_clock", "_is_begun", "_last_end_s", "_phases", "_started")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._last_end_s = 0.0
        self._is_begun = False
        self._phases: list[Phase] = []
        self._chunks: list[Phase] = []

    def now(self) -> float:
        """Return the seconds since the node accepted the request."""
        return self._clock() - self._started

    def end(self, name: str) -> None:
        """End the current sequential phase and name it."""
        now = self.now()
        self._phases.append(Phase(name, self._last_end_s, now - self._last_end_s))
        self._last_end_s = now

    def add_chunk(self, began: float) -> None:
        """Add a chunk of the prompt, computed since `began` (clock time). The first one ends `prefill_queue`."""
        start_s, now = max(began - self._started, self._last_end_s), self.now()
        # Only the first time: recomputation after a retraction does not delay the first token.
        if not self._is_begun:
            self._is_begun = True
            self._phases.append(
                Phase("prefill_queue", self._last_end_s, start_s - self._last_end_s)
            )
            self._last_end_s = start_s
        if len(self._chunks) == MAX_CHUNKS:
            start_s = self._chunks.pop().start_s
        self._chunks.append(Phase("prefill_chunk", start_s, now - start_s))

    def end_parallel(self, name: str, start_s: float) -> None:
        """End a parallel phase that started at `start_s`, in seconds as returned by `now`."""
        self._phases.append(Phase(name, start_s, self.now() - start_s))

    def take(self) -> list[Phase]:
        """Return the phases that have not been returned yet."""
        phases = self._phases + self._chunks
        self._phases, self._chunks = [], []
        return phases


class Deadlines(Generic[T]):
    """Requests ordered by deadline, held by weak references.

    The caller has to skip requests that have started in the meantime.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, weakref.ref[T]]] = []

    def note(self, item: T, seconds_left: float | None) -> None:
        """Add an item whose deadline is in `seconds_left`; None: no deadline."""
        if seconds_left is not None:
            entry = (self._clock() + seconds_left, next(self._numbers), weakref.ref(item))
            heapq.heappush(self._heap, entry)

    def passed(self) -> Iterator[T]:
        """Yield each live item whose deadline has passed, once."""
        while self._heap and self._heap[0][0] <= self._clock():
            item = heapq.heappop(self._heap)[2]()
            if item is not None:
                yield item


def not_started() -> DeadlinePassed:
    """Return the error for a request whose deadline passed while it was queued here."""
    return DeadlinePassed("the deadline passed while the request was queued")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Half:
    """A node's part of one attempt. `has_client`: False once the client has its result; only the pages remain."""

    ticket: Ticket
    active: ActiveRequest
    timeline: Timeline
    has_client: bool = True

    def __post_init__(self) -> None:
        self.active.owner = weakref.ref(self)


H = TypeVar("H", bound=Half)


class RequestRunner(Protocol):
    """The interface through which the loop runs requests. Only the loop's thread calls its methods."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute."""

    def tickets(self) -> list[Ticket]:
        """Return the requests that edge workers still wait for."""

    def start(self, ticket: Ticket, message: Start) -> None:
        """Accept a request under a new ticket, or raise a `TandemError` and keep no state of it."""

    def cancel(self, ticket: Ticket) -> None:
        """Stop a request at any stage; an unknown ticket is ignored."""

    def poll(self) -> None:
        """Process events of transfers and tiers, and expired deadlines."""

    def step(self) -> None:
        """Run one engine step and send its results."""

    def fail_all(self, error: TandemError) -> None:
        """Fail with `error` each request that the engine may be computing."""

    def hand_over(self, error: TandemError) -> None:
        """Fail every request at any stage with `error`, and report the error to the other half."""

    def load(self) -> NodeLoad:
        """Return the node's load."""

    def flush_cache(self) -> None:
        """Drop the cached pages that no request reads."""

    def change_adapter(
        self, change: ChangeAdapter, answer: Callable[[str | TandemError], None]
    ) -> None:
        """Load or unload a LoRA adapter, or raise a `TandemError`.

        Args:
            answer: Called once, here or in `poll`, with the adapter's id, or with an error.
        """

    def log_line(self, elapsed_s: float) -> str | None:
        """Return a log line about the work since the last call; None if there was none."""


class Role(ABC, Generic[H]):
    """Runs requests on a node. Only the loop's thread calls its methods.

    Args:
        max_waiting: Maximum number of requests that wait for pages or a grant; more are rejected.
        tiering: Fetches prefixes from tiers; None: no tiers.
        clock: Clock for the phase durations that edge workers receive, in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        answers: Answers,
        max_waiting: int,
        tiering: Tiering | None,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._answers = engine, answers
        self._tiering = tiering or Tiering(engine)
        self._max_waiting, self._clock = max_waiting, clock
        self._by_ticket: dict[Ticket, H] = {}  # only halves with a client
        self._deadlines: Deadlines[H] = Deadlines()
        self._num_aborted = 0
        self._logged = NodeLoad()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute."""
        return self._engine.has_work

    def tickets(self) -> list[Ticket]:
        """Return the requests that edge workers still wait for."""
        return list(self._by_ticket)

    @abstractmethod
    def start(self, ticket: Ticket, message: Start) -> None:
        """Accept a request under a new ticket, or raise a `TandemError` and keep no state of it."""

    def cancel(self, ticket: Ticket) -> None:
        """Stop a request at any stage; an unknown ticket is ignored."""
        half = self._by_ticket.get(ticket)
        if half is not None:
            self._num_aborted += 1
            self._detach_client(half)
            self._stop(half)

    @abstractmethod
    def poll(self) -> None:
        """Process events of transfers and tiers, and expired deadlines."""

    @abstractmethod
    def step(self) -> None:
        """Run one engine step and send its results."""

    @abstractmethod
    def fail_all(self, error: TandemError) -> None:
        """Fail with `error` each request that the engine may be computing."""

    def hand_over(self, error: TandemError) -> None:
        """Fail every request at any stage with `error`, and report the error to the other half."""
        for half in list(self._by_ticket.values()):
            self._end(half, error)

    @abstractmethod
    def load(self) -> NodeLoad:
        """Return the node's load."""

    @abstractmethod
    def _stop(self, half: H, error: TandemError | None = None) -> None:
        """Stop computing and transferring for a half; send `error` to the other half."""

    @abstractmethod
    def _log_line(self, now: NodeLoad, before: NodeLoad, elapsed_s: float) -> str | None:
        """Return a log line about the work between two loads; None if there was none."""

    def flush_cache(self) -> None:
        """Drop the cached pages that no request reads."""
        self._engine.cache.flush()

    def change_adapter(
        self, _change: ChangeAdapter, _answer: Callable[[str | TandemError], None]
    ) -> None:
        """Raise `InvalidRequest`: this engine has no adapters."""
        raise InvalidRequest(NO_ADAPTERS)

    def log_line(self, elapsed_s: float) -> str | None:
        """Return a log line about the work since the last call; None if there was none."""
        now, before = self.load(), self._logged
        self._logged = now
        return self._log_line(now, before, elapsed_s)

    def _half(self, active: ActiveRequest) -> H:
        """Return the record of a request in an engine result."""
        half = active.owner and active.owner()
        assert half is not None, "result of a request without a record"
        return cast("H", half)

    def _end(self, half: H, error: TandemError) -> None:
        """Fail a half: send the error to the client and to the other half, and stop its transfer."""
        self._fail(half, error)
        self._stop(half, error)

    def _fail(self, half: H, error: TandemError) -> None:
        """Send an error to the client. The half keeps its pages until no transfer uses them."""
        if half.has_client:
            self._detach_client(half)
            self._answers.fail(half.ticket, error)

    def _detach_client(self, half: H) -> None:
        """Mark a half as finished for its client; its ticket can be reused."""
        half.has_client = False
        self._tiering.cancel(half.active)
        del self._by_ticket[half.ticket]

    def _send(self, half: H, token: Token, phases: list[Phase] | None) -> None:
        """Send a token to the client."""
        self._answers.token(
            half.ticket,
            token.index,
            [token.token],
            token.finish,
            token.cached_tokens,
            cached_by_tier=token.cached_by_tier,
            logprobs=token.logprobs,
            phases=phases,
        )

    def _send_prompt_logprobs(self, half: H, run: PromptLogprobs) -> None:
        """Send log-probabilities of prompt positions to the client."""
        index = run.request.request.num_prior_tokens  # index of the first token generated here
        self._answers.prompt_logprobs(half.ticket, run.first_position, run.entries, index)

    def _engine_load(self) -> NodeLoad:
        """Return the load without the fields that the role adds: transfers and its own queues."""
        engine, pages = self._engine, self._engine.counts()
        return NodeLoad(
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            queued_tokens=engine.num_queued_tokens,
            num_pages=pages.total,
            pages_free=pages.free,
            pages_cached=pages.cached,
            pages_held=pages.held,
            pages_granted=pages.granted,
            pages_quarantined=pages.quarantined,
            page_size=engine.cache.page_size,
            prompt_tokens=engine.num_prompt_tokens,
            cached_tokens=engine.num_cached_tokens,
            generated_tokens=engine.num_generated_tokens,
            num_retracted=engine.num_retracted,
            num_failed=self._answers.num_failed,
            num_aborted=self._num_aborted,
            tiers=self._tiering.loads(),
        )


def token_usage(load: NodeLoad) -> str:
    """Return the log text with the fraction of pages that are neither free nor cached."""
    return f"token usage: {1 - (load.pages_free + load.pages_cached) / load.num_pages:.2f}"


def cache_hits(now: NodeLoad, before: NodeLoad) -> str:
    """Return the log text with the cache hit rate and the tokens from tiers between two loads."""
    num_prompt = now.prompt_tokens - before.prompt_tokens
    rate = (now.cached_tokens - before.cached_tokens) / num_prompt if num_prompt else 0.0
    known = {tier.name: tier.hit_tokens for tier in before.tiers}
    tiers = "".join(
        f", #{tier.name}-token: {tier.hit_tokens - known.get(tier.name, 0)}" for tier in now.tiers
    )
    return f"cache hit rate: {rate:.2f}{tiers}"
