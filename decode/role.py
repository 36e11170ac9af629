"""What a decode node does with a request.

```
 start ──▶ reserving (in line for pages) ──▶ granted: prefill may write ──Landed──▶ running ──▶ end
                                                │ cancel, lost: pages quarantined
                                                └──Failed, Safe: no write can arrive; pages free
```
"""

from dataclasses import dataclass

from engine.core import Engine
from engine.request import ActiveRequest, Stage
from engine.results import Token
from engine.waiting import Line
from kvtransfer.agent import Receiver
from kvtransfer.events import Failed, Landed, Lost
from node.answers import Answers, Ticket
from node.deadlines import Deadlines, not_started
from node.load import engine_load, hit_rate, token_usage
from node.loop import Start
from wire.errors import EngineFailed, InvalidRequest, KVCorrupted, Overloaded, TandemError
from wire.messages import NodeLoad, StartDecode


@dataclass(slots=True, eq=False)
class _Half:
    """Decode's half of one attempt; `active` holds its pages."""

    ticket: Ticket
    message: StartDecode
    active: ActiveRequest
    is_wanted: bool = True


class DecodeRole:
    """Grants pages, takes over what landed in them, generates.

    Args:
        max_running: Requests with pages at a time, granted ones included.
        max_waiting: Requests in line for pages; beyond it they are refused.
    """

    def __init__(
        self,
        engine: Engine,
        agent: Receiver,
        answers: Answers,
        max_running: int,
        max_waiting: int,
    ) -> None:
        self._engine = engine
        self._agent = agent
        self._answers = answers
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._reserving: Line[_Half] = Line(lambda half: half.active.rank)
        self._deadlines: Deadlines[_Half] = Deadlines()
        self._granted: dict[int, _Half] = {}  # by room, quarantined ones included
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
        if not isinstance(message, StartDecode):
            raise InvalidRequest("this is a decode node: it takes the answer's half of a request")
        if message.room in self._granted or any(
            half.message.room == message.room for half in self._reserving
        ):
            raise InvalidRequest(f"room {message.room} is in use")
        if len(self._reserving) >= self._max_waiting:
            raise Overloaded(f"{len(self._reserving)} requests wait for pages; try again later")
        half = _Half(ticket, message, self._engine.check(message.request))
        self._by_ticket[ticket] = half
        self._reserving.add(half)
        self._deadlines.note(half, message.request.deadline_s)
        self._reserve()

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
        self._reserve()

    def step(self) -> None:
        """See `Role.step`."""
        result = self._engine.step()
        for failure in result.failures:
            self._fail(self._by_active.pop(failure.request), failure.error)
        for token in result.tokens:
            self._answer(self._by_active[token.request], token)

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
        return engine_load(
            self._engine,
            max_running=self._max_running,
            num_waiting=len(self._reserving),
            num_transferring=len(self._granted),
            received_bytes=moved.received_bytes,
            saved_bytes=moved.saved_bytes,
            num_corrupted=self._num_corrupted,
            num_refused_transfers=moved.num_refused,
            num_failed=self._answers.num_failed,
            num_aborted=self._num_aborted,
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
            f"#prealloc-req: {len(self._reserving)}, #transfer-req: {len(self._granted)}, "
            f"#retracted-req: {now.num_retracted - before.num_retracted}, "
            f"gen throughput (token/s): {num_generated / elapsed_s:.2f}, "
            f"#queue-req: {now.num_waiting}, cache hit rate: {hit_rate(now, before):.2f}"
        )

    def _reserve(self) -> None:
        """Grant pages to those in line; nobody overtakes one that lacks pages."""
        for half in self._deadlines.passed():
            if half in self._reserving:
                self._reserving.remove(half)
                self._fail(half, not_started())
        for half in list(self._reserving):
            if len(self._granted) + self._engine.num_running >= self._max_running:
                return
            try:
                is_reserved = self._engine.reserve(half.active)
            except TandemError as error:
                self._reserving.remove(half)
                self._fail(half, error)
                continue
            if not is_reserved:
                if half.active.is_held or half.active.compiling is not None:
                    continue  # another brings its prompt, or its grammar is being compiled
                return
            self._reserving.remove(half)
            self._granted[half.message.room] = half
            self._agent.request(
                half.message.room,
                half.message.bootstrap_host,
                half.message.bootstrap_port,
                half.active.granted_pages,
                half.active.num_computed,
            )

    def _let_go(self, half: _Half, error: TandemError | None = None) -> None:
        """Stop a half that nobody waits for any more. Prefill is told `error`."""
        if half in self._reserving:
            self._reserving.remove(half)
        elif half.active.stage is Stage.RESERVED:
            self._engine.quarantine(half.active)
            self._agent.withdraw(half.message.room, error)
        else:
            del self._by_active[half.active]
            self._engine.cancel(half.active)

    def _landed(self, half: _Half, event: Landed) -> None:
        del self._granted[event.room]
        self._by_active[half.active] = half
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
            logprobs=token.logprobs,
        )
        if token.finish is not None:
            del self._by_active[half.active]
            self._by_ticket.pop(half.ticket, None)

    def _safe(self, half: _Half, error: TandemError | None) -> None:
        """No write can arrive any more: free the granted pages, and fail who still waits."""
        del self._granted[half.message.room]
        self._engine.cancel(half.active)
        self._engine.reclaim(half.active)
        if error is not None:
            self._fail(half, error)

    def _fail(self, half: _Half, error: TandemError) -> None:
        if half.is_wanted:
            half.is_wanted = False
            self._by_ticket.pop(half.ticket, None)
            self._answers.fail(half.ticket, error)
