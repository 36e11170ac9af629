"""What the roles of a node share: their place in the loop, the clocks of their requests, what they report.

A request has one identity at a node, its ticket. The role keeps one record for it (`Half`), which the
engine carries along as the owner of the request, so that a result leads to its record without a search.
"""

import heapq
import itertools
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from tandem.engine.core import Engine
from tandem.engine.request import ActiveRequest
from tandem.engine.step import PromptLogprobs, Token
from tandem.node.answers import Answers, Ticket
from tandem.node.tiering import Tiering
from tandem.wire.errors import DeadlinePassed, TandemError
from tandem.wire.generation import Phase
from tandem.wire.messages import NodeLoad, StartColocated, StartDecode, StartPrefill

T = TypeVar("T")
Start = StartPrefill | StartDecode | StartColocated

# The chunks of a longer prompt beyond this number are reported as one.
MAX_CHUNKS = 64


class Timeline:
    """The phases of one request since the node took it, for the tokens that report them.

    Phases of the row follow each other without a gap: each begins where the one before ended. Those
    beside the row have times of their own.

    Args:
        clock: Monotonic, in seconds.
    """

    __slots__ = ("_chunks", "_clock", "_is_begun", "_phases", "_row_s", "_started")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._row_s = 0.0
        self._is_begun = False
        self._phases: list[Phase] = []
        self._chunks: list[Phase] = []

    def now(self) -> float:
        """Return the seconds since the node took the request."""
        return self._clock() - self._started

    def end(self, name: str) -> None:
        """End the next phase of the row."""
        now = self.now()
        self._phases.append(Phase(name, self._row_s, now - self._row_s))
        self._row_s = now

    def computed(self, began: float) -> None:
        """Note a chunk of the prompt, computed since `began` by the clock; the first ends the queue."""
        start_s, now = max(began - self._started, self._row_s), self.now()
        # Once: what is computed again after a retraction is no wait for the first token.
        if not self._is_begun:
            self._is_begun = True
            self._phases.append(Phase("prefill_queue", self._row_s, start_s - self._row_s))
            self._row_s = start_s
        if len(self._chunks) == MAX_CHUNKS:
            start_s = self._chunks.pop().start_s
        self._chunks.append(Phase("prefill_chunk", start_s, now - start_s))

    def beside(self, name: str, start_s: float) -> None:
        """End a phase beside the row that began at `start_s`."""
        self._phases.append(Phase(name, start_s, self.now() - start_s))

    def take(self) -> list[Phase]:
        """Return what was not reported yet."""
        phases = self._phases + self._chunks
        self._phases, self._chunks = [], []
        return phases


class Deadlines(Generic[T]):
    """Requests by the end of their clients' patience, which keeps none alive.

    The caller skips those that began meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, weakref.ref[T]]] = []

    def note(self, item: T, seconds_left: float | None) -> None:
        """Note when an item's time is over, counted from now; None is never."""
        if seconds_left is not None:
            entry = (self._clock() + seconds_left, next(self._numbers), weakref.ref(item))
            heapq.heappush(self._heap, entry)

    def passed(self) -> Iterator[T]:
        """Yield, once, each item that is still there and whose time is over."""
        while self._heap and self._heap[0][0] <= self._clock():
            item = heapq.heappop(self._heap)[2]()
            if item is not None:
                yield item


def not_started() -> DeadlinePassed:
    """Return the error of a request that waited here until its client's time was over."""
    return DeadlinePassed("the time that the client would wait passed before a node could begin")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Half:
    """A node's part of one attempt. One that is not wanted, as its client has left, only waits for its pages."""

    ticket: Ticket
    active: ActiveRequest
    timeline: Timeline
    is_wanted: bool = True

    def __post_init__(self) -> None:
        self.active.owner = weakref.ref(self)


H = TypeVar("H", bound=Half)


class Role(ABC, Generic[H]):
    """What a node does with requests. All methods are called by the loop's thread.

    Args:
        max_waiting: Requests that may wait for pages or a grant; one more is rejected.
        tiering: Brings prefixes from tiers; None: there are none.
        clock: Of the phases that edge workers are sent.
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
        self._by_ticket: dict[Ticket, H] = {}  # whose clients listen
        self._deadlines: Deadlines[H] = Deadlines()
        self._num_aborted = 0
        self._logged = NodeLoad()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute."""
        return self._engine.has_work

    def tickets(self) -> list[Ticket]:
        """Return the requests whose edge workers still want them."""
        return list(self._by_ticket)

    @abstractmethod
    def start(self, ticket: Ticket, message: Start) -> None:
        """Take a request whose ticket no other has, or raise a `TandemError`: then nothing of it is left."""

    def cancel(self, ticket: Ticket) -> None:
        """Stop a request at whatever stage it is; an unknown ticket is no error."""
        half = self._by_ticket.get(ticket)
        if half is not None:
            self._num_aborted += 1
            self._part(half)
            self._let_go(half)

    @abstractmethod
    def poll(self) -> None:
        """Act on what transfers and tiers did beside the loop, and on deadlines."""

    @abstractmethod
    def step(self) -> None:
        """Run one forward and hand out what it produced."""

    @abstractmethod
    def fail_all(self, error: TandemError) -> None:
        """End every request that computes with `error`."""

    def hand_over(self, error: TandemError) -> None:
        """End every request with `error`, whatever its stage, and report it to the other half."""
        for half in list(self._by_ticket.values()):
            self._end(half, error)

    @abstractmethod
    def load(self) -> NodeLoad:
        """Return the node's load."""

    @abstractmethod
    def _let_go(self, half: H, error: TandemError | None = None) -> None:
        """Stop computing and transferring for a half; the other half is sent `error`."""

    @abstractmethod
    def _log_line(self, now: NodeLoad, before: NodeLoad, elapsed_s: float) -> str | None:
        """Return a line for operators about the time between two loads; None: there was no work."""

    def flush_cache(self) -> None:
        """Drop cached pages without a reader."""
        self._engine.cache.flush()

    def log_line(self, elapsed_s: float) -> str | None:
        """Return a line for operators if there was work since the last one."""
        now, before = self.load(), self._logged
        self._logged = now
        return self._log_line(now, before, elapsed_s)

    def _half(self, active: ActiveRequest) -> H:
        """Return the record of a request that the engine reports on."""
        half = active.owner and active.owner()
        assert half is not None, "a result of a request that no client waits for"
        return cast("H", half)

    def _end(self, half: H, error: TandemError) -> None:
        """End a half, for its client and for the other half."""
        self._fail(half, error)
        self._let_go(half, error)

    def _fail(self, half: H, error: TandemError) -> None:
        """Report an error to the client; the pages stay until no transfer uses them."""
        if half.is_wanted:
            self._part(half)
            self._answers.fail(half.ticket, error)

    def _part(self, half: H) -> None:
        """Note that the client has heard the last of this half: its id may be used again."""
        half.is_wanted = False
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
        index = run.request.request.num_prior_tokens  # before its first token
        self._answers.prompt_logprobs(half.ticket, run.first_position, run.entries, index)

    def _engine_load(self) -> NodeLoad:
        """Return the part of the load that roles report alike; transfers and queues are theirs."""
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
    """Return the part of a log line about pages that are neither free nor cached."""
    return f"token usage: {1 - (load.pages_free + load.pages_cached) / load.num_pages:.2f}"


def cache_hits(now: NodeLoad, before: NodeLoad) -> str:
    """Return the end of a log line: what came from the cache and from tiers between two loads."""
    num_prompt = now.prompt_tokens - before.prompt_tokens
    rate = (now.cached_tokens - before.cached_tokens) / num_prompt if num_prompt else 0.0
    known = {tier.name: tier.hit_tokens for tier in before.tiers}
    tiers = "".join(
        f", #{tier.name}-token: {tier.hit_tokens - known.get(tier.name, 0)}" for tier in now.tiers
    )
    return f"cache hit rate: {rate:.2f}{tiers}"
