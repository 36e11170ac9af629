"""What a prefill node does with a request.

```
 start ──▶ waiting for the grant ──Granted──▶ computing, pushing each layer while the next computes
             and for its prefix from tiers        └─ last chunk: first token to the client ──▶ landing
 landing ──PushDone──▶ handed off; the pages go back
 any stage: cancel, or Released by the transfer ──▶ the pages go back once no push reads them
```

A whole request of one token is computed without a grant: it shows that the node can do its work.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.engine.core import Engine
from tandem.engine.request import ActiveRequest
from tandem.engine.step import CompletePages, Token
from tandem.kvtransfer.events import Granted, PushDone, Released
from tandem.kvtransfer.group import Sender
from tandem.kvtransfer.push_room import PageRun, Wrote
from tandem.node.answers import Answers, Ticket
from tandem.node.deadlines import Deadlines, not_started
from tandem.node.load import engine_load, hit_rate, tier_hits, token_usage
from tandem.node.loop import Start
from tandem.node.tiering import Tiering
from tandem.node.timeline import Timeline
from tandem.telemetry.log import get_logger
from tandem.wire.errors import InvalidRequest, Overloaded, TandemError
from tandem.wire.generation import Finish, GenerateRequest
from tandem.wire.ids import Room
from tandem.wire.messages import NodeLoad, StartColocated, StartPrefill

log = get_logger(__name__)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Half:
    """Prefill's half of one attempt.

    Attributes:
        is_wanted: Whether the client still listens; a cancelled half only waits for its pages.
        is_granted: Whether decode has set pages aside.
        active: None until the grant came, and its prefix from the tiers.
        from_tiers: Tokens of that prefix, by tier.
        pushing_s: When its first page was given to the transfer, by the timeline; -1 before.
    """

    ticket: Ticket
    room: Room
    request: GenerateRequest
    timeline: Timeline
    is_wanted: bool = True
    is_granted: bool = False
    from_tiers: Mapping[str, int] | None = None
    active: ActiveRequest | None = None
    pushing_s: float = -1.0


class PrefillRole:
    """Computes prompts and hands them off.

    Args:
        max_waiting: Requests that wait for a grant or for pages; beyond it they are refused.
        tiering: Brings prefixes from tiers; None: there are none.
        pushes_layers: Whether layers are pushed while a forward still runs.
        clock: Of the phases that edge workers are told.
    """

    def __init__(
        self,
        engine: Engine,
        agent: Sender,
        answers: Answers,
        max_waiting: int,
        *,
        tiering: Tiering["_Half"] | None = None,
        pushes_layers: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._agent = agent
        self._answers = answers
        self._tiering = tiering or Tiering(engine)
        self._max_waiting, self._clock = max_waiting, clock
        self._deadlines: Deadlines[_Half] = Deadlines()
        self._by_room: dict[Room, _Half] = {}
        self._by_ticket: dict[Ticket, _Half] = {}
        self._by_active: dict[ActiveRequest, _Half] = {}
        self._alone: dict[ActiveRequest, Ticket] = {}  # whole requests of one token
        self._num_aborted = 0
        self._logged = NodeLoad()
        if pushes_layers:
            engine.watch_layers(self._push_by_layer)

    @property
    def has_work(self) -> bool:
        """See `Role.has_work`."""
        return self._engine.has_work

    def tickets(self) -> list[Ticket]:
        """See `Role.tickets`."""
        return [*self._by_ticket, *self._alone.values()]

    def start(self, ticket: Ticket, message: Start) -> None:
        """See `Role.start`."""
        if isinstance(message, StartColocated):
            self._start_alone(ticket, message.request)
            return
        if not isinstance(message, StartPrefill):
            raise InvalidRequest("this is a prefill node: it takes the prompt's half of a request")
        if message.room in self._by_room:
            raise InvalidRequest(f"room {message.room} is in use")
        num_waiting = len(self._by_room) - self._engine.num_running
        if num_waiting >= self._max_waiting:
            raise Overloaded(f"{num_waiting} requests are waiting; try again later")
        checked = self._engine.check(message.request, is_prompt_only=True)
        half = _Half(ticket, message.room, message.request, Timeline(self._clock))
        self._by_room[half.room] = self._by_ticket[ticket] = half
        self._deadlines.note(half, half.request.deadline_s)
        self._agent.expect(half.room)
        prefix = checked.token_ids[: checked.num_matchable]
        self._tiering.begin(half, prefix, message.request.cache_salt)

    def _start_alone(self, ticket: Ticket, request: GenerateRequest) -> None:
        if request.sampling.max_new_tokens != 1 or request.logprobs is not None:
            raise InvalidRequest("this is a prefill node: a whole request may have one token here")
        self._alone[self._engine.submit(request)] = ticket

    def cancel(self, ticket: Ticket) -> None:
        """See `Role.cancel`."""
        for active in [active for active, owner in self._alone.items() if owner == ticket]:
            del self._alone[active]
            self._engine.cancel(active)
        half = self._by_ticket.get(ticket)
        if half is not None:
            self._part(half)
            self._num_aborted += 1
            self._abandon(half, None)

    def poll(self) -> None:
        """See `Role.poll`."""
        for event in self._agent.events():
            half = self._by_room.get(event.room)
            if half is None:
                continue
            if isinstance(event, Granted):
                self._granted(half)
            elif isinstance(event, PushDone):
                self._handed_off(half)
            else:
                self._released(half, event)
        self._tiering.poll()
        for ready in self._tiering.ready():
            self._fetched(ready.owner, ready.from_tiers)
        self._drop_late()

    def step(self) -> None:
        """See `Role.step`."""
        began = self._clock()
        result = self._engine.step()
        for chunk in result.chunks:
            if (computed := self._by_active.get(chunk.request)) is not None:
                computed.timeline.computed(began)
        for failure in result.failures:
            if (ticket := self._alone.pop(failure.request, None)) is not None:
                self._answers.fail(ticket, failure.error)
                continue
            half = self._by_active[failure.request]
            self._fail(half, failure.error)
            self._abandon(half, failure.error)
        for pages in result.pages:
            self._push(pages)
        for run in result.prompt_logprobs:
            half = self._by_active[run.request]
            index = run.request.request.num_prior_tokens  # before its first token
            self._answers.prompt_logprobs(half.ticket, run.first_position, run.entries, index)
        for token in result.tokens:
            if (ticket := self._alone.pop(token.request, None)) is not None:
                self._answers.token(ticket, token.index, [token.token], token.finish)
            else:
                self._first_token(token)

    def fail_all(self, error: TandemError) -> None:
        """See `Role.fail_all`."""
        self._fail_alone(error)
        for half in list(self._by_active.values()):
            self._fail(half, error)
            self._abandon(half, error)

    def hand_over(self, error: TandemError) -> None:
        """See `Role.hand_over`."""
        self._fail_alone(error)
        for half in list(self._by_ticket.values()):
            self._fail(half, error)
            self._abandon(half, error)

    def _fail_alone(self, error: TandemError) -> None:
        while self._alone:
            active, ticket = self._alone.popitem()
            self._engine.cancel(active)
            self._answers.fail(ticket, error)

    def flush_cache(self) -> None:
        """See `Role.flush_cache`."""
        self._engine.cache.flush()

    def load(self) -> NodeLoad:
        """See `Role.load`."""
        pending = [half for half in self._by_room.values() if half.active is None]
        moved = self._agent.statistics()
        return engine_load(
            self._engine,
            num_waiting=len(pending),
            queued_tokens=sum(len(half.request.prompt_ids) for half in pending),
            num_transferring=len(self._by_active)
            + len(self._alone)
            - self._engine.num_running
            - self._engine.num_waiting,
            pushed_bytes=moved.pushed_bytes,
            saved_bytes=moved.saved_bytes,
            num_refused_transfers=moved.num_refused,
            num_strangers=moved.num_strangers,
            num_failed=self._answers.num_failed,
            num_aborted=self._num_aborted,
            tiers=self._tiering.loads(),
        )

    def log_line(self, elapsed_s: float) -> str | None:
        """See `Role.log_line`."""
        now, before = self.load(), self._logged
        self._logged = now
        num_cached = now.cached_tokens - before.cached_tokens
        num_new = now.prompt_tokens - before.prompt_tokens - num_cached
        if not num_new:
            return None
        return (
            f"Prefill batch, #new-seq: {now.generated_tokens - before.generated_tokens}, "
            f"#new-token: {num_new}, #cached-token: {num_cached}, "
            f"token usage: {token_usage(now):.2f}, #running-req: {now.num_running}, "
            f"#queue-req: {self._engine.num_waiting}, "
            f"#bootstrap-req: {now.num_waiting - self._engine.num_waiting}, "
            f"#inflight-req: {now.num_transferring}, "
            f"input throughput (token/s): {num_new / elapsed_s:.2f}, "
            f"cache hit rate: {hit_rate(now, before):.2f}{tier_hits(now, before)}"
        )

    def _drop_late(self) -> None:
        for half in self._deadlines.passed():
            if half.is_wanted and not (half.active is not None and half.active.is_begun):
                late = not_started()
                self._fail(half, late)
                self._abandon(half, late)

    def _granted(self, half: _Half) -> None:
        if not half.is_wanted:
            return
        half.timeline.end("reserve")
        half.is_granted = True
        if not self._tiering.is_awaited(half):
            self._submit(half)

    def _fetched(self, half: _Half, from_tiers: Mapping[str, int]) -> None:
        """What tiers have of the prompt is cached, or there was nothing."""
        half.from_tiers = from_tiers
        if half.is_granted:
            half.timeline.end("kv_tier")
            self._submit(half)

    def _submit(self, half: _Half) -> None:
        try:
            half.active = self._engine.submit(half.request, is_prompt_only=True)
        except TandemError as error:
            self._fail(half, error)
            self._abandon(half, error)
        else:
            half.active.from_tiers = half.from_tiers
            self._by_active[half.active] = half

    def _push_by_layer(self, coming: list[CompletePages]) -> Wrote:
        rooms = [self._pushing(pages).room for pages in coming]
        return self._agent.push_by_layer(
            [
                PageRun(room, pages.page_ids, pages.first_page)
                for room, pages in zip(rooms, coming, strict=True)
            ]
        )

    def _pushing(self, pages: CompletePages) -> _Half:
        """Return whose pages these are, and note when the first of them went."""
        half = self._by_active[pages.request]
        if half.pushing_s < 0:
            half.pushing_s = half.timeline.now()
        return half

    def _push(self, pages: CompletePages) -> None:
        half = self._pushing(pages)
        self._agent.push(half.room, pages.page_ids, pages.first_page)

    def _first_token(self, token: Token) -> None:
        half = self._by_active[token.request]
        active = token.request
        half.timeline.end("prefill")
        self._answers.token(
            half.ticket,
            token.index,
            [token.token],
            token.finish,
            token.cached_tokens,
            cached_by_tier=token.cached_by_tier,
            logprobs=token.logprobs,
            phases=half.timeline.take(),
        )
        self._agent.finish(
            half.room, token.token, active.seed, active.num_cached, logprobs=token.logprobs
        )
        if token.finish is not None:
            self._part(half)

    def _handed_off(self, half: _Half) -> None:
        assert half.active is not None
        index = half.active.next_index
        if half.is_wanted:
            half.timeline.beside("push", half.pushing_s)
            self._answers.token(
                half.ticket, index, [], Finish(reason="handed_off"), phases=half.timeline.take()
            )
        self._forget(half)

    def _released(self, half: _Half, event: Released) -> None:
        if event.error is not None:
            self._fail(half, event.error)
        if half.active is not None:
            self._engine.cancel(half.active)
        self._forget(half)

    def _fail(self, half: _Half, error: TandemError) -> None:
        """Tell the client; the pages stay until no push reads them."""
        if half.is_wanted:
            self._part(half)
            self._answers.fail(half.ticket, error)

    def _part(self, half: _Half) -> None:
        """The client has heard the last of this half: its id may be used again."""
        half.is_wanted = False
        self._tiering.cancel(half)
        del self._by_ticket[half.ticket]

    def _abandon(self, half: _Half, error: TandemError | None) -> None:
        """Stop computing and pushing; the agent answers with `Released`, whatever landed."""
        if half.active is not None:
            self._engine.cancel(half.active)
        self._agent.abort(half.room, error)

    def _forget(self, half: _Half) -> None:
        """The half is over: give its pages back."""
        if half.is_wanted:
            self._part(half)
        del self._by_room[half.room]
        if half.active is not None:
            del self._by_active[half.active]
            self._engine.release(half.active)
