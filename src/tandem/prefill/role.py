"""The life of a request on a prefill node.

```
 start ──▶ waiting for the grant ──RoomGranted──▶ computing, pushing each layer while the next one computes
             and for its prefix from tiers        └─ last chunk: first token to the client ──▶ landing
 landing ──PushDone──▶ handed off; pages released
 any stage ──cancel or RoomReleased──▶ pages released once no push reads them
```

If a router starts decode only after prefill's answer, a prompt is computed at once and its pages wait for the grant.

A whole request for one token is computed without a grant. Health checks use this to test the engine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from typing_extensions import override

from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.step import CompletePages, Token
from tandem.kvtransfer.agents.group import PrefillGroup, Sender
from tandem.kvtransfer.agents.sender import PrefillAgent
from tandem.kvtransfer.agents.sender_rooms import OnLayerWritten, PageRun
from tandem.kvtransfer.events import PushDone, RoomGranted, RoomReleased
from tandem.node.answers import Answers, Ticket
from tandem.node.life.ending import end_process
from tandem.node.process.engine_host import Parts, main
from tandem.node.role import (
    Half,
    Role,
    Start,
    Timeline,
    cache_hits,
    not_started,
    token_usage,
)
from tandem.node.tiers.tiering import Tiering
from tandem.wire.errors import InvalidRequest, Overloaded, TandemError
from tandem.wire.generation import Finish, GenerateRequest, Room
from tandem.wire.messages import NodeLoad, StartColocated, StartPrefill


@dataclass(slots=True, eq=False, weakref_slot=False)
class _PrefillHalf(Half):
    """Prefill's half of an attempt, or a whole request if `room` is None.

    Attributes:
        room: Room of the attempt.
        may_compute: Whether decode has granted pages, or the prompt does not wait for that.
        is_queued: Whether the request is in the engine.
        pushing_s: Time of the first push; -1: none yet.
    """

    room: Room | None = None
    may_compute: bool = False
    is_queued: bool = False
    pushing_s: float = -1.0


class PrefillRole(Role[_PrefillHalf]):
    """Computes prompts and hands them off; see `Role`.

    Args:
        pushes_layers: Whether to push each layer during the forward, instead of all layers after it.
    """

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
        # A half stays here until no push reads its pages, even if it is cancelled.
        self._by_room: dict[Room, _PrefillHalf] = {}
        if pushes_layers:
            engine.watch_layers(self._push_by_layer)

    @override
    def start(self, ticket: Ticket, message: Start) -> None:
        if isinstance(message, StartColocated):
            self._start_whole(ticket, message.request)
            return
        if not isinstance(message, StartPrefill):
            raise InvalidRequest(
                "this is a prefill node: send StartPrefill here, and the other half to a decode node"
            )
        if message.room in self._by_room:
            raise InvalidRequest(f"room {message.room} is in use")
        num_waiting = self._engine.num_waiting + len(self._pending())
        if num_waiting >= self._max_waiting:
            raise Overloaded(f"{num_waiting} requests are waiting; try again later")
        active = self._engine.check(message.request, is_prompt_only=True)
        half = _PrefillHalf(
            ticket,
            active,
            Timeline(self._clock),
            room=message.room,
            may_compute=not message.waits_for_grant,
        )
        self._by_room[message.room] = self._by_ticket[ticket] = half
        self._deadlines.note(half, message.request.deadline_s)
        self._agent.expect(message.room)
        self._tiering.begin(active)
        if half.may_compute and active not in self._tiering.waiting:
            self._queue(half)

    def _start_whole(self, ticket: Ticket, request: GenerateRequest) -> None:
        if request.sampling.max_new_tokens != 1 or request.logprobs is not None:
            raise InvalidRequest(
                "this is a prefill node: it accepts whole requests only with max_new_tokens 1 and without logprobs"
            )
        active = self._engine.submit(request)
        self._by_ticket[ticket] = _PrefillHalf(
            ticket, active, Timeline(self._clock), is_queued=True
        )

    @override
    def poll(self) -> None:
        for event in self._agent.events():
            half = self._by_room.get(event.room)
            if half is None:
                continue
            if isinstance(event, RoomGranted):
                self._on_granted(half)
            elif isinstance(event, PushDone):
                self._on_push_done(half)
            else:
                self._on_released(half, event)
        self._tiering.poll()
        for half in map(self._half, self._tiering.ready()):
            if half.may_compute:
                half.timeline.end("kv_tier")
                self._queue(half)
        for half in self._deadlines.passed():
            if half.has_client and not half.active.is_begun:
                self._end(half, not_started())

    @override
    def step(self) -> None:
        began = self._clock()
        result = self._engine.step()
        for chunk in result.chunks:
            self._half(chunk.request).timeline.add_chunk(began)
        for failure in result.failures:
            self._end(self._half(failure.request), failure.error)
        for pages in result.pages:
            room = self._begin_push(pages)
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
            ending_s=moved.ending_s,
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

    def _pending(self) -> list[_PrefillHalf]:
        """Return the halves that wait for a grant or for the tiers."""
        return [half for half in self._by_room.values() if not half.is_queued]

    # ── computing and pushing ────────────────────────────────────────────────────────────────────

    def _on_granted(self, half: _PrefillHalf) -> None:
        if not half.has_client or half.may_compute:
            return
        half.timeline.end("reserve")
        half.may_compute = True
        if half.active not in self._tiering.waiting:
            self._queue(half)

    def _queue(self, half: _PrefillHalf) -> None:
        half.is_queued = True
        self._engine.queue(half.active)

    def _push_by_layer(self, runs: list[CompletePages]) -> OnLayerWritten:
        return self._agent.push_by_layer(
            [PageRun(self._begin_push(pages), pages.page_ids, pages.first_page) for pages in runs]
        )

    def _begin_push(self, pages: CompletePages) -> Room:
        """Return the room that receives these pages; record the time of its first push."""
        half = self._half(pages.request)
        if half.pushing_s < 0:
            half.pushing_s = half.timeline.now()
        assert half.room is not None, "pages of a whole request must not be pushed"
        return half.room

    def _first_token(self, half: _PrefillHalf, token: Token) -> None:
        active = token.request
        half.timeline.end("prefill")
        self._send(half, token, half.timeline.take())
        if half.room is not None:
            self._agent.finish(
                half.room, token.token, active.seed, active.num_cached, logprobs=token.logprobs
            )
        if token.finish is not None:
            self._detach_client(half)

    def _on_push_done(self, half: _PrefillHalf) -> None:
        if half.has_client:
            half.timeline.end_parallel("push", half.pushing_s)
            finish, phases = Finish(reason="handed_off"), half.timeline.take()
            self._answers.token(half.ticket, half.active.next_index, [], finish, phases=phases)
        self._forget(half)

    # ── end of a half ────────────────────────────────────────────────────────────────────────────

    def _on_released(self, half: _PrefillHalf, event: RoomReleased) -> None:
        if event.error is not None:
            self._fail(half, event.error)
        self._engine.cancel(half.active)
        self._forget(half)

    @override
    def _stop(self, half: _PrefillHalf, error: TandemError | None = None) -> None:
        # The agent always reports `RoomReleased`, even if the pages have landed.
        self._engine.cancel(half.active)
        if half.room is not None:
            self._agent.abort(half.room, error)

    def _forget(self, half: _PrefillHalf) -> None:
        """Remove a half whose hand-off is over, and release its pages."""
        if half.has_client:
            self._detach_client(half)
        assert half.room is not None
        del self._by_room[half.room]
        self._engine.release(half.active)


def make_role(parts: Parts) -> PrefillRole:
    """Return the role of a prefill node."""
    assert isinstance(parts.agent, PrefillAgent | PrefillGroup)
    return PrefillRole(
        parts.engine,
        parts.agent,
        parts.answers,
        parts.config.engine.max_waiting_requests,
        tiering=parts.tiering,
        pushes_layers=parts.config.transfer.push_granularity == "layer",
    )


if __name__ == "__main__":
    end_process(main(make_role))
