"""What a decode node does with a request.

```
 start ──▶ queued in the engine ─▶ granted: prefill may write ──Landed──▶ running ──▶ end
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
from tandem.engine.step import Token
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
        self._deadlines: Deadlines[_Half] = Deadlines()
        self._granted: dict[Room, _Half] = {}  # quarantined ones included
        self._by_ticket: dict[Ticket, _Half] = {}
        self._by_active: dict[ActiveRequest, _Half] = {}  # queued, granted, running
        self._num_aborted = self._num_corrupted = 0
        self._logged = NodeLoad()
        engine.watch_reserved(self._granted_to)

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
        num_waiting = self._engine.num_waiting + len(self._tiering.awaited)
        if num_waiting >= self._max_waiting:
            raise Overloaded(f"{num_waiting} requests wait for pages; try again later")
        active = self._engine.check(message.request, is_remote=hand_off is not None)
        half = _Half(ticket, hand_off, active, Timeline(self._clock))
        self._by_ticket[ticket] = self._by_active[active] = half
        self._deadlines.note(half, message.request.deadline_s)
        prefix = active.token_ids[: active.num_matchable]
        salt = message.request.cache_salt
        if hand_off is not None or not self._tiering.begin(half, prefix, salt):
            self._engine.queue(active)
        self._engine.admit()

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
                self._by_active.pop(half.active, None)
                self._engine.quarantine(half.active)
            else:
                self._safe(half, event.error if isinstance(event, Failed) else None)
        self._tiering.poll()
        for ready in self._tiering.ready():
            ready.owner.active.from_tiers = ready.from_tiers
            ready.owner.timeline.end("kv_tier")
            self._engine.queue(ready.owner.active)
        for half in self._deadlines.passed():
            if self._is_waiting(half):
                self._fail(half, not_started())
                self._let_go(half)
        self._engine.admit()

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
            if active.stage is Stage.RUNNING or active.is_begun:
                self._fail(half, error)
                self._let_go(half)

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
        awaited = self._tiering.awaited
        return engine_load(
            self._engine,
            max_running=self._max_running,
            num_waiting=len(awaited),
            queued_tokens=sum(half.active.num_prompt for half in awaited),
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
        num_new = sum(map(self._is_waiting, self._by_active.values()))
        return (
            f"Decode batch, #running-req: {now.num_running}, "
            f"#token: {now.pages_held * now.page_size}, token usage: {token_usage(now):.2f}, "
            f"#prealloc-req: {num_new}, #transfer-req: {len(self._granted)}, "
            f"#retracted-req: {now.num_retracted - before.num_retracted}, "
            f"gen throughput (token/s): {num_generated / elapsed_s:.2f}, "
            f"#queue-req: {now.num_waiting}, cache hit rate: {hit_rate(now, before):.2f}"
            f"{tier_hits(now, before)}"
        )

    def _is_used(self, room: Room) -> bool:
        return room in self._granted or any(
            half.hand_off is not None and half.hand_off.room == room
            for half in self._by_active.values()
            if self._is_waiting(half)
        )

    def _is_waiting(self, half: _Half) -> bool:
        """Tell whether a half has never had pages."""
        return half.active.stage is Stage.WAITING and not half.active.is_begun

    def _granted_to(self, active: ActiveRequest) -> None:
        """Have prefill write a prompt into the pages that were set aside for it."""
        half = self._by_active[active]
        assert half.hand_off is not None
        room = half.hand_off.room
        self._granted[room] = half
        half.since_s = half.timeline.now()
        self._agent.request(
            room,
            half.hand_off.bootstrap_host,
            half.hand_off.bootstrap_port,
            active.granted_pages,
            active.num_computed,
        )

    def _let_go(self, half: _Half, error: TandemError | None = None) -> None:
        """Stop a half that nobody waits for any more. Prefill is told `error`."""
        self._tiering.cancel(half)
        del self._by_active[half.active]
        if half.active.stage is Stage.RESERVED:
            assert half.hand_off is not None
            self._engine.quarantine(half.active)
            self._agent.withdraw(half.hand_off.room, error)
        else:
            self._engine.cancel(half.active)

    def _landed(self, half: _Half, event: Landed) -> None:
        del self._granted[event.room]
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
        self._by_active.pop(half.active, None)
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
