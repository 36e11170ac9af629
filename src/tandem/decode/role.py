"""The life of a request on a decode node, or on `tandem serve`, which has no transfer agent.

```
 start ──▶ queued in the engine ─▶ granted: prefill may write ──RoomLanded──▶ running ──▶ end
                  │                 │ cancel, RoomLost: pages quarantined      ▲
                  │                 └──RoomFailed, RoomSafe: no write can arrive; pages free
                  └──whole request: its prompt is computed here────────────────┘
```
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from typing_extensions import override

from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.request import ActiveRequest, Stage
from tandem.engine.scheduling.step import Token
from tandem.kvtransfer.agents.group import DecodeGroup, Receiver
from tandem.kvtransfer.agents.receiver import DecodeAgent
from tandem.kvtransfer.events import RoomFailed, RoomLanded, RoomLost
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
from tandem.wire.errors import EngineFailed, InvalidRequest, KVCorrupted, Overloaded, TandemError
from tandem.wire.generation import Phase, Room
from tandem.wire.messages import NodeLoad, StartDecode, StartPrefill


@dataclass(slots=True, eq=False)
class _DecodeHalf(Half):
    """Decode's half of an attempt, or a whole request if `hand_off` is None.

    Attributes:
        hand_off: Message that started the half.
        since_s: Time at which it began to wait, first for its pages, then for its first step; -1: not waiting.
    """

    hand_off: StartDecode | None = None
    since_s: float = -1.0


class DecodeRole(Role[_DecodeHalf]):
    """Grants pages to prefill, takes over the prompts that land in them, and generates; see `Role`.

    Args:
        agent: Transfer agent; None: only whole requests are accepted.
    """

    def __init__(
        self,
        engine: Engine,
        agent: Receiver | None,
        answers: Answers,
        max_running: int,
        max_waiting: int,
        *,
        tiering: Tiering | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(engine, answers, max_waiting, tiering, clock)
        self._agent, self._max_running = agent, max_running
        # Halves whose pages prefill may write, even after a cancel.
        self._granted: dict[Room, _DecodeHalf] = {}
        self._num_corrupted = 0
        engine.watch_reserved(self._on_reserved)

    @override
    def start(self, ticket: Ticket, message: Start) -> None:
        hand_off = message if isinstance(message, StartDecode) else None
        if self._agent is None and (hand_off or isinstance(message, StartPrefill)):
            raise InvalidRequest("this is a colocated node: send whole requests")
        if isinstance(message, StartPrefill):
            raise InvalidRequest(
                "this is a decode node: send StartDecode or whole requests here, and StartPrefill to a prefill node"
            )
        if hand_off is not None and self._is_used(hand_off.room):
            raise InvalidRequest(f"room {hand_off.room} is in use")
        num_waiting = self._engine.num_waiting + len(self._tiering.waiting)
        if num_waiting >= self._max_waiting:
            raise Overloaded(f"{num_waiting} requests are waiting for pages; try again later")
        active = self._engine.check(message.request, is_remote=hand_off is not None)
        half = _DecodeHalf(ticket, active, Timeline(self._clock), hand_off=hand_off)
        self._by_ticket[ticket] = half
        self._deadlines.note(half, message.request.deadline_s)
        if hand_off is not None or not self._tiering.begin(active):
            self._engine.queue(active)
        self._engine.admit()

    @override
    def poll(self) -> None:
        for event in () if self._agent is None else self._agent.events():
            half = self._granted[event.room]
            if isinstance(event, RoomFailed | RoomLost):
                self._num_corrupted += isinstance(event.error, KVCorrupted)
            if isinstance(event, RoomLanded):
                self._on_landed(half, event)
            elif isinstance(event, RoomLost):
                self._fail(half, event.error)
                self._engine.quarantine(half.active)
            else:
                self._on_safe(half, event.error if isinstance(event, RoomFailed) else None)
        self._tiering.poll()
        for active in self._tiering.ready():
            self._half(active).timeline.end("kv_tier")
            self._engine.queue(active)
        for half in self._deadlines.passed():
            # A granted request waits for prefill, which enforces the deadline.
            is_waiting = half.active.stage in (Stage.WAITING, Stage.RUNNING)
            if half.has_client and is_waiting and not half.active.is_begun:
                self._fail(half, not_started())
                self._stop(half)
        self._engine.admit()

    @override
    def step(self) -> None:
        began = self._clock()
        result = self._engine.step()
        for chunk in result.chunks:
            half = self._half(chunk.request)
            if half.hand_off is None:
                half.timeline.add_chunk(began)
        for run in result.prompt_logprobs:
            half = self._half(run.request)
            # In a hand-off, prefill has sent them. Decode computes them again only after a retraction; do not send them.
            if half.hand_off is None:
                self._send_prompt_logprobs(half, run)
        for token in result.tokens:
            half = self._half(token.request)
            if half.since_s >= 0:
                half.timeline.end_parallel("first_step", half.since_s)
                half.since_s = -1.0
            self._answer(half, token)
        # Handle failures last, so that a failing request's prompt log-probabilities are sent first.
        for failure in result.failures:
            self._fail(self._half(failure.request), failure.error)

    @override
    def fail_all(self, error: TandemError) -> None:
        for half in list(self._by_ticket.values()):
            # A request that ended in the failed step has lost its last token.
            is_affected = half.active.stage in (Stage.RUNNING, Stage.ENDED) or half.active.is_begun
            if is_affected:
                self._engine.cancel(half.active)
                self._fail(half, error)

    @override
    def load(self) -> NodeLoad:
        load = self._engine_load()
        waiting = self._tiering.waiting
        load = msgspec.structs.replace(
            load,
            max_running=self._max_running,
            num_waiting=load.num_waiting + len(waiting),
            queued_tokens=load.queued_tokens + sum(active.num_prompt for active in waiting),
            num_transferring=len(self._granted),
            num_corrupted=self._num_corrupted,
        )
        if self._agent is None:
            return load
        moved = self._agent.statistics()
        return msgspec.structs.replace(
            load,
            received_bytes=moved.received_bytes,
            saved_bytes=moved.saved_bytes,
            num_refused_transfers=moved.num_refused,
            ending_s=moved.ending_s,
        )

    @override
    def _log_line(self, now: NodeLoad, before: NodeLoad, elapsed_s: float) -> str | None:
        num_generated = now.generated_tokens - before.generated_tokens
        if not num_generated:
            return None
        halves = self._by_ticket.values()
        num_new = sum(h.active.stage is Stage.WAITING and not h.active.is_begun for h in halves)
        return (
            f"Decode batch, #running-req: {now.num_running}, "
            f"#token: {now.pages_held * now.page_size}, {token_usage(now)}, "
            f"#prealloc-req: {num_new}, #transfer-req: {len(self._granted)}, "
            f"#retracted-req: {now.num_retracted - before.num_retracted}, "
            f"gen throughput (token/s): {num_generated / elapsed_s:.2f}, "
            f"#queue-req: {now.num_waiting}, {cache_hits(now, before)}"
        )

    # ── hand-off ─────────────────────────────────────────────────────────────────────────────────

    def _is_used(self, room: Room) -> bool:
        return room in self._granted or any(
            half.hand_off is not None and half.hand_off.room == room
            for half in self._by_ticket.values()
        )

    def _on_reserved(self, active: ActiveRequest) -> None:
        """Grant the pages that the engine reserved for a prompt to its prefill node."""
        half = self._half(active)
        assert half.hand_off is not None
        assert self._agent is not None
        self._granted[half.hand_off.room] = half
        half.since_s = half.timeline.now()
        self._agent.request(
            half.hand_off.room,
            half.hand_off.bootstrap_host,
            half.hand_off.bootstrap_port,
            active.granted_pages,
            active.num_computed,
        )

    def _on_landed(self, half: _DecodeHalf, event: RoomLanded) -> None:
        del self._granted[event.room]
        half.timeline.end_parallel("landed", half.since_s)
        half.since_s = half.timeline.now()
        try:
            token = self._engine.land(
                half.active, event.first_token, event.seed, event.first_logprobs
            )
        except EngineFailed as error:
            self._engine.cancel(half.active)
            self._fail(half, error)
        else:
            self._answer(half, token)

    # ── tokens and errors ────────────────────────────────────────────────────────────────────────

    def _answer(self, half: _DecodeHalf, token: Token) -> None:
        self._send(half, token, self._phases(half, token))
        if token.finish is not None and half.has_client:
            self._detach_client(half)

    def _phases(self, half: _DecodeHalf, token: Token) -> list[Phase] | None:
        """Return the phases to send with the first token of a prompt computed here, or with a last token; else None."""
        if half.hand_off is None and token.index == half.active.request.num_prior_tokens:
            half.timeline.end("prefill")
        elif token.finish is None:
            return None
        return half.timeline.take()

    def _on_safe(self, half: _DecodeHalf, error: TandemError | None) -> None:
        """Free the granted pages, which no write can reach any more, and report the error, if any."""
        assert half.hand_off is not None
        del self._granted[half.hand_off.room]
        self._engine.cancel(half.active)
        self._engine.reclaim(half.active)
        if error is not None:
            self._fail(half, error)

    @override
    def _stop(self, half: _DecodeHalf, error: TandemError | None = None) -> None:
        if half.active.stage is Stage.RESERVED:
            assert half.hand_off is not None
            assert self._agent is not None
            self._engine.quarantine(half.active)
            self._agent.withdraw(half.hand_off.room, error)
        else:
            self._engine.cancel(half.active)


def make_role(parts: Parts) -> DecodeRole:
    """Return the role of a decode node, or of a colocated node if there is no transfer agent."""
    assert parts.agent is None or isinstance(parts.agent, DecodeAgent | DecodeGroup)
    return DecodeRole(
        parts.engine,
        parts.agent,
        parts.answers,
        max_running=parts.config.engine.max_running_requests,
        max_waiting=parts.config.engine.max_waiting_requests,
        tiering=parts.tiering,
    )


if __name__ == "__main__":
    end_process(main(make_role))
