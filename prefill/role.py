"""The life of a request on a prefill node.

```
 start ──▶ waiting for the grant ──Granted──▶ computing, pushing each layer while the next computes
             and for its prefix from tiers        └─ last chunk: first token to the client ──▶ landing
 landing ──PushDone──▶ handed off; pages released
 any stage: cancel, or Released by the transfer ──▶ pages released once no push reads them
```

A whole request for one token is computed without a grant. Health checks use it to test the engine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from typing_extensions import override

from tandem.engine.core import Engine
from tandem.engine.step import CompletePages, Token
from tandem.kvtransfer.events import Granted, PushDone, Released
from tandem.kvtransfer.group import Sender
from tandem.kvtransfer.push_room import PageRun, Wrote
from tandem.node.answers import Answers, Ticket
from tandem.node.role import (
    Half,
    Role,
    Start,
    Timeline,
    cache_hits,
    not_started,
    token_usage,
)
from tandem.node.tiering import Tiering
from tandem.wire.errors import InvalidRequest, Overloaded, TandemError
from tandem.wire.generation import Finish, GenerateRequest, Room
from tandem.wire.messages import NodeLoad, StartColocated, StartPrefill


@dataclass(slots=True, eq=False, weakref_slot=False)
class _Half(Half):
    """Prefill's half of one attempt; a whole request if `room` is None. `is_queued`: the engine has the request."""

    room: Room | None = None
    is_granted: bool = False
    is_queued: bool = False
    pushing_s: float = -1.0


class PrefillRole(Role[_Half]):
    """Computes prompts and hands them off; see `Role`. `pushes_layers`: push each layer during the forward."""

    def __init__(
        self,
        engine: Engine,
        agent: Sender,
        answers: Answers,
        max_waiting: int,
        *,
        tiering: Tiering | None = None,
        pushes_layers: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(engine, answers, max_waiting, tiering, clock)
        self._agent = agent
        self._by_room: dict[Room, _Half] = {}  # until no push reads their pages, even if cancelled
        if pushes_layers:
            engine.watch_layers(self._push_by_layer)

    @override
    def start(self, ticket: Ticket, message: Start) -> None:
        if isinstance(message, StartColocated):
            self._start_whole(ticket, message.request)
            return
        if not isinstance(message, StartPrefill):
            raise InvalidRequest("this is a prefill node: it takes the prompt's half of a request")
        if message.room in self._by_room:
            raise InvalidRequest(f"room {message.room} is in use")
        num_waiting = self._engine.num_waiting + len(self._pending())
        if num_waiting >= self._max_waiting:
            raise Overloaded(f"{num_waiting} requests are waiting; try again later")
        active = self._engine.check(message.request, is_prompt_only=True)
        half = _Half(ticket, active, Timeline(self._clock), room=message.room)
        self._by_room[message.room] = self._by_ticket[ticket] = half
        self._deadlines.note(half, message.request.deadline_s)
        self._agent.expect(message.room)
        self._tiering.begin(active)

    def _start_whole(self, ticket: Ticket, request: GenerateRequest) -> None:
        if request.sampling.max_new_tokens != 1 or request.logprobs is not None:
            raise InvalidRequest("this is a prefill node: a whole request may have one token here")
        active = self._engine.submit(request)
        self._by_ticket[ticket] = _Half(ticket, active, Timeline(self._clock), is_queued=True)

    @override
    def poll(self) -> None:
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
        for half in map(self._half, self._tiering.ready()):
            if half.is_granted:
                half.timeline.end("kv_tier")
                self._queue(half)
        for half in self._deadlines.passed():
            if half.is_wanted and not half.active.is_begun:
                self._end(half, not_started())

    @override
    def step(self) -> None:
        began = self._clock()
        result = self._engine.step()
        for chunk in result.chunks:
            self._half(chunk.request).timeline.computed(began)
        for failure in result.failures:
            self._end(self._half(failure.request), failure.error)
        for pages in result.pages:
            room = self._pushing(pages)
            self._agent.push(room, pages.page_ids, pages.first_page)
        for run in result.prompt_logprobs:
            self._send_prompt_logprobs(self._half(run.request), run)
        for token in result.tokens:
            self._first_token(self._half(token.request), token)

    @override
    def fail_all(self, error: TandemError) -> None:
        for half in {*self._by_ticket.values(), *self._by_room.values()}:
            if half.is_queued:
                self._end(half, error)

    @override
    def load(self) -> NodeLoad:
        load, moved = self._engine_load(), self._agent.statistics()
        pending = self._pending()
        num_whole = sum(half.room is None for half in self._by_ticket.values())
        num_queued = len(self._by_room) - len(pending) + num_whole
        return msgspec.structs.replace(
            load,
            num_waiting=load.num_waiting + len(pending),
            queued_tokens=load.queued_tokens + sum(half.active.num_prompt for half in pending),
            num_transferring=num_queued - load.num_running - load.num_waiting,
            pushed_bytes=moved.pushed_bytes,
            saved_bytes=moved.saved_bytes,
            num_refused_transfers=moved.num_refused,
            num_strangers=moved.num_strangers,
        )

    @override
    def _log_line(self, now: NodeLoad, before: NodeLoad, elapsed_s: float) -> str | None:
        num_cached = now.cached_tokens - before.cached_tokens
        num_new = now.prompt_tokens - before.prompt_tokens - num_cached
        if not num_new:
            return None
        return (
            f"Prefill batch, #new-seq: {now.generated_tokens - before.generated_tokens}, "
            f"#new-token: {num_new}, #cached-token: {num_cached}, "
            f"{token_usage(now)}, #running-req: {now.num_running}, "
            f"#queue-req: {self._engine.num_waiting}, "
            f"#bootstrap-req: {now.num_waiting - self._engine.num_waiting}, "
            f"#inflight-req: {now.num_transferring}, "
            f"input throughput (token/s): {num_new / elapsed_s:.2f}, {cache_hits(now, before)}"
        )

    def _pending(self) -> list[_Half]:
        """Return the halves that wait for a grant or for the tiers."""
        return [half for half in self._by_room.values() if not half.is_queued]

    # ── towards the hand-off ─────────────────────────────────────────────────────────────────────

    def _granted(self, half: _Half) -> None:
        if not half.is_wanted:
            return
        half.timeline.end("reserve")
        half.is_granted = True
        if half.active not in self._tiering.waiting:
            self._queue(half)

    def _queue(self, half: _Half) -> None:
        half.is_queued = True
        self._engine.queue(half.active)

    def _push_by_layer(self, coming: list[CompletePages]) -> Wrote:
        return self._agent.push_by_layer(
            [PageRun(self._pushing(pages), pages.page_ids, pages.first_page) for pages in coming]
        )

    def _pushing(self, pages: CompletePages) -> Room:
        """Return the room that receives these pages, and record the time of the room's first push."""
        half = self._half(pages.request)
        if half.pushing_s < 0:
            half.pushing_s = half.timeline.now()
        assert half.room is not None, "pages of a whole request are not pushed"
        return half.room

    def _first_token(self, half: _Half, token: Token) -> None:
        active = token.request
        half.timeline.end("prefill")
        self._send(half, token, half.timeline.take())
        if half.room is not None:
            self._agent.finish(
                half.room, token.token, active.seed, active.num_cached, logprobs=token.logprobs
            )
        if token.finish is not None:
            self._part(half)

    def _handed_off(self, half: _Half) -> None:
        if half.is_wanted:
            half.timeline.beside("push", half.pushing_s)
            finish, phases = Finish(reason="handed_off"), half.timeline.take()
            self._answers.token(half.ticket, half.active.next_index, [], finish, phases=phases)
        self._forget(half)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def _released(self, half: _Half, event: Released) -> None:
        if event.error is not None:
            self._fail(half, event.error)
        self._engine.cancel(half.active)
        self._forget(half)

    @override
    def _let_go(self, half: _Half, error: TandemError | None = None) -> None:
        # The agent reports `Released` in every case, even if pages have landed.
        self._engine.cancel(half.active)
        if half.room is not None:
            self._agent.abort(half.room, error)

    def _forget(self, half: _Half) -> None:
        """Release the pages of a half whose hand-off is over."""
        if half.is_wanted:
            self._part(half)
        assert half.room is not None
        del self._by_room[half.room]
        self._engine.release(half.active)
