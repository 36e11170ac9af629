"""What a decode node does with a request.

```
 start ──▶ in line for pages ──▶ granted: prefill may write ──Landed──▶ running ──▶ end
                  │                 │ cancel, lost: pages quarantined      ▲
                  │                 └──Failed, Safe: no write can arrive; pages free
                  └──whole request, its prompt is computed here────────────┘
```
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.engine.core import Engine
from tandem.engine.request import ActiveRequest, Stage
from tandem.engine.results import Token
from tandem.engine.waiting import Line
from tandem.kvtransfer.events import Failed, Landed, Lost
from tandem.kvtransfer.group import Receiver
from tandem.node.answers import Answers, Ticket
from tandem.node.deadlines import Deadlines, not_started
from tandem.node.load import engine_load, hit_rate, tier_hits, token_usage
from tandem.node.loop import Start
from tandem.node.tiering import Tiering
from tandem.node.timeline import Timeline
from tandem.wire.errors import EngineFailed, InvalidRequest, KVCorrupted, Overloaded, TandemError
from tandem.wire.generation import Phase
from tandem.wire.ids import Room
from tandem.wire.messages import NodeLoad, StartDecode, StartPrefill


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Half:
    """Decode's half of one attempt, or all of it; `active` holds its pages.

    Attributes:
        hand_off: Where the prompt comes from; None when it is computed here.
        since_s: Since when it waits for what comes next, by the timeline: its pages, then its first
            step; -1 once that is done.
    """

    ticket: Ticket
    hand_off: StartDecode | None
    active: ActiveRequest
    timeline: Timeline
    is_wanted: bool = True
    since_s: float = -1.0


class DecodeRole:
    """Grants pages, takes over what landed in them, generates.

    Args:
        max_running: Requests with pages at a time, granted ones included.
        max_waiting: Requests in line for pages; beyond it they are refused.
        tiering: Brings prefixes from tiers, of prompts computed here; None: there are none.
        clock: Of the phases that edge workers are told.
    """

    def __init__(
        self,
        engine: Engine,
        agent: Receiver,
        answers: Answers,
        max_running: int,
        max_waiting: int,
        *,
        tiering: Tiering["_Half"] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._agent = agent
        self._answers = answers
        self._tiering = tiering or Tiering(engine)
        self._max_running = max_running
        self._max_waiting, self._clock = max_waiting, clock
        self._line: Line[_Half] = Line(lambda half: half.active.rank)
        self._deadlines: Deadlines[_Half] = Deadlines()
        self._granted: dict[Room, _Half] = {}  # quarantined ones included
        self._by_ticket: dict[Ticket, _Half] = {}
        self._by_active: dict[ActiveRequest, _Half] = {}  # running
        self._num_aborted = self._num_corrupted = 0
        self._logged = NodeLoad()

    @property
    def has_work(self) -> bool:
        """See `Role.has_work`."""
        return self._engine.has_work

    def tickets(self) -> list[Ticket]:
        """See `Role.tickets`."""
        return list(self._by_ticket)

    def start(self, ticket: Ticket, message: Start) -> None:
        """See `Role.start`."""
        if isinstance(message, StartPrefill):
            raise InvalidRequest(
                "this is a decode node: it takes the answer's half of a request, or all of it"
            )
        hand_off = message if isinstance(message, StartDecode) else None
        if hand_off is not None and self._is_used(hand_off.room):
            raise InvalidRequest(f"room {hand_off.room} is in use")
        if len(self._line) >= self._max_waiting:
            raise Overloaded(f"{len(self._line)} requests wait for pages; try again later")
        active = self._engine.check(message.request)
        half = _Half(ticket, hand_off, active, Timeline(self._clock))
        self._by_ticket[ticket] = half
        self._line.add(half)
        self._deadlines.note(half, message.request.deadline_s)
        if hand_off is None:
            prefix = active.token_ids[: active.num_matchable]
            self._tiering.begin(half, prefix, message.request.cache_salt)
        self._admit()

    def cancel(self, ticket: Ticket) -> None:
        """See `Role.cancel`."""
        half = self._by_ticket.pop(ticket, None)
        if half is not None:
            self._num_aborted += 1
            half.is_wanted = False
            self._let_go(half)

    def poll(self) -> None:
        """See `Role.poll`."""
        for event in self._agent.events():
            half = self._granted[event.room]
            if isinstance(event, Failed | Lost):
                self._num_corrupted += isinstance(event.error, KVCorrupted)
            if isinstance(event, Landed):
                self._landed(half, event)
            elif isinstance(event, Lost):
                self._fail(half, event.error)
                self._engine.quarantine(half.active)
            else:
                self._safe(half, event.error if isinstance(event, Failed) else None)
        self._tiering.poll()
        for ready in self._tiering.ready():
            ready.owner.active.from_tiers = ready.from_tiers
            ready.owner.timeline.end("kv_tier")
        self._admit()

    def step(self) -> None:
        """See `Role.step`."""
        began = self._clock()
        result = self._engine.step()
        for chunk in result.chunks:
            half = self._by_active[chunk.request]
            if half.hand_off is None:
                half.timeline.computed(began)
        for run in result.prompt_logprobs:
            half = self._by_active[run.request]
            if half.hand_off is None:  # else prefill told them; this is of one that was retracted
                index = run.request.request.num_prior_tokens  # before its first token
                self._answers.prompt_logprobs(half.ticket, run.first_position, run.entries, index)
        for token in result.tokens:
            half = self._by_active[token.request]
            if half.since_s >= 0:
                half.timeline.beside("first_step", half.since_s)
                half.since_s = -1.0
            self._answer(half, token)
        # Last: one that fails with its first token may have log-probabilities of its prompt above.
        for failure in result.failures:
            self._fail(self._by_active.pop(failure.request), failure.error)

    def fail_all(self, error: TandemError) -> None:
        """See `Role.fail_all`."""
        for active, half in list(self._by_active.items()):
            self._engine.cancel(active)
            self._fail(half, error)
        self._by_active.clear()

    def hand_over(self, error: TandemError) -> None:
        """See `Role.hand_over`."""
        for half in list(self._by_ticket.values()):
            self._fail(half, error)
            self._let_go(half, error)

    def flush_cache(self) -> None:
        """See `Role.flush_cache`."""
        self._engine.cache.flush()

    def load(self) -> NodeLoad:
        """See `Role.load`."""
        moved = self._agent.statistics()
        prompts = [half.active.num_prompt for half in self._line if half.hand_off is None]
        return engine_load(
            self._engine,
            max_running=self._max_running,
            num_waiting=len(self._line),
            queued_tokens=sum(prompts),
            num_transferring=len(self._granted),
            received_bytes=moved.received_bytes,
            saved_bytes=moved.saved_bytes,
            num_corrupted=self._num_corrupted,
            num_refused_transfers=moved.num_refused,
            num_failed=self._answers.num_failed,
            num_aborted=self._num_aborted,
            tiers=self._tiering.loads(),
        )

    def log_line(self, elapsed_s: float) -> str | None:
        """See `Role.log_line`."""
        now, before = self.load(), self._logged
        self._logged = now
        num_generated = now.generated_tokens - before.generated_tokens
        if not num_generated:
            return None
        return (
            f"Decode batch, #running-req: {now.num_running}, "
            f"#token: {now.pages_held * now.page_size}, token usage: {token_usage(now):.2f}, "
            f"#prealloc-req: {len(self._line)}, #transfer-req: {len(self._granted)}, "
            f"#retracted-req: {now.num_retracted - before.num_retracted}, "
            f"gen throughput (token/s): {num_generated / elapsed_s:.2f}, "
            f"#queue-req: {now.num_waiting}, cache hit rate: {hit_rate(now, before):.2f}"
            f"{tier_hits(now, before)}"
        )

    def _is_used(self, room: Room) -> bool:
        return room in self._granted or any(
            half.hand_off is not None and half.hand_off.room == room for half in self._line
        )

    def _admit(self) -> None:
        """Give pages to those in line; nobody overtakes one that lacks pages."""
        for half in self._deadlines.passed():
            if half in self._line:
                self._line.remove(half)
                self._fail(half, not_started())
        for half in list(self._line):
            if self._tiering.is_awaited(half):
                continue
            if len(self._granted) + self._engine.num_running >= self._max_running:
                return
            try:
                is_admitted = self._grant(half) if half.hand_off else self._begin(half)
            except TandemError as error:
                self._line.remove(half)
                self._fail(half, error)
                continue
            if is_admitted:
                self._line.remove(half)
            elif not half.active.is_held and half.active.compiling is None:
                return
            # Else another brings its prompt, or its grammar is being compiled.

    def _grant(self, half: _Half) -> bool:
        """Have prefill write the prompt's pages; False when they are short."""
        assert half.hand_off is not None
        if not self._engine.reserve(half.active):
            return False
        room = half.hand_off.room
        self._granted[room] = half
        half.since_s = half.timeline.now()
        self._agent.request(
            room,
            half.hand_off.bootstrap_host,
            half.hand_off.bootstrap_port,
            half.active.granted_pages,
            half.active.num_computed,
        )
        return True

    def _begin(self, half: _Half) -> bool:
        """Compute the prompt here, beside the answers; False when pages are short."""
        if not self._engine.enter(half.active):
            return False
        self._by_active[half.active] = half
        return True

    def _let_go(self, half: _Half, error: TandemError | None = None) -> None:
        """Stop a half that nobody waits for any more. Prefill is told `error`."""
        self._tiering.cancel(half)
        if half in self._line:
            self._line.remove(half)
        elif half.active.stage is Stage.RESERVED:
            assert half.hand_off is not None
            self._engine.quarantine(half.active)
            self._agent.withdraw(half.hand_off.room, error)
        else:
            del self._by_active[half.active]
            self._engine.cancel(half.active)

    def _landed(self, half: _Half, event: Landed) -> None:
        del self._granted[event.room]
        self._by_active[half.active] = half
        half.timeline.beside("landed", half.since_s)
        half.since_s = half.timeline.now()
        try:
            token = self._engine.land(
                half.active, event.first_token, event.seed, event.first_logprobs
            )
        except EngineFailed as error:
            del self._by_active[half.active]
            self._engine.cancel(half.active)
            self._fail(half, error)
        else:
            self._answer(half, token)

    def _answer(self, half: _Half, token: Token) -> None:
        self._answers.token(
            half.ticket,
            token.index,
            [token.token],
            token.finish,
            token.cached_tokens,
            cached_by_tier=token.cached_by_tier,
            logprobs=token.logprobs,
            phases=self._phases(half, token),
        )
        if token.finish is not None:
            del self._by_active[half.active]
            self._by_ticket.pop(half.ticket, None)

    def _phases(self, half: _Half, token: Token) -> list[Phase] | None:
        """Return what is told of with this token: a first one whose prompt was computed here, or the last."""
        if half.hand_off is None and token.index == half.active.request.num_prior_tokens:
            half.timeline.end("prefill")
        elif token.finish is None:
            return None
        return half.timeline.take()

    def _safe(self, half: _Half, error: TandemError | None) -> None:
        """No write can arrive any more: free the granted pages, and fail who still waits."""
        assert half.hand_off is not None
        del self._granted[half.hand_off.room]
        self._engine.cancel(half.active)
        self._engine.reclaim(half.active)
        if error is not None:
            self._fail(half, error)

    def _fail(self, half: _Half, error: TandemError) -> None:
        self._tiering.cancel(half)
        if half.is_wanted:
            half.is_wanted = False
            self._by_ticket.pop(half.ticket, None)
            self._answers.fail(half.ticket, error)
