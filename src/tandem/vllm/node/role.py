"""The states of a request on a node that runs vLLM. The connector moves the blocks; the role answers.

```
 prefill  start ──▶ vLLM waits for the grant, computes, pushes ──handed off──▶ end      ┐ failed, aborted: vLLM holds the
 decode   start ──▶ vLLM waits for the blocks ──landed──▶ generates                      ┘ blocks until no write can arrive
```
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tandem.node.answers import Answers, Ticket
from tandem.node.config import NodeRole
from tandem.node.role import Deadlines, Start, Timeline, not_started
from tandem.vllm.hand_offs import FirstToken
from tandem.vllm.node.outputs import Generator, HandOffParams, StepOutput
from tandem.wire.errors import (
    EngineFailed,
    InvalidRequest,
    Overloaded,
    TandemError,
    error_of_other_half,
)
from tandem.wire.generation import Finish, GenerateRequest, TokenLogprobs
from tandem.wire.messages import ChangeAdapter, NodeLoad, StartColocated, StartDecode, StartPrefill


@dataclass(slots=True, eq=False, weakref_slot=True)
class _VllmHalf:
    """A node's part of one attempt.

    Attributes:
        id: vLLM's id of the request.
        hand_off: None for a whole request.
        is_begun: Whether the engine, or prefill, has produced the first output.
    """

    ticket: Ticket
    id: str
    request: GenerateRequest
    timeline: Timeline
    hand_off: HandOffParams | None
    next_index: int
    is_begun: bool = False
    num_cached: int = 0


@dataclass(slots=True)
class _RequestTotals:
    """Counts of tokens and requests since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    num_aborted: int = 0


class VllmRole:
    """Runs a node's requests on vLLM. Implements `RequestRunner`.

    Args:
        max_waiting: Maximum number of requests that wait for blocks or a grant; more are rejected.
        clock: Clock for the phase durations that edge workers receive, in seconds.
    """

    def __init__(
        self,
        role: NodeRole,
        generator: Generator,
        answers: Answers,
        *,
        max_waiting: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._role, self._generator, self._answers = role, generator, answers
        self._max_waiting, self._clock = max_waiting, clock
        self._ids = itertools.count()
        self._by_ticket: dict[Ticket, _VllmHalf] = {}
        self._by_id: dict[str, _VllmHalf] = {}
        self._deadlines: Deadlines[_VllmHalf] = Deadlines()
        self._totals, self._logged = _RequestTotals(), _RequestTotals()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._generator.has_work

    def tickets(self) -> list[Ticket]:
        """Return the requests that edge workers still wait for."""
        return list(self._by_ticket)

    def start(self, ticket: Ticket, message: Start) -> None:
        """Accept a request under a new ticket, or raise a `TandemError` and keep no state of it."""
        hand_off = self._hand_off(message)
        counts = self._generator.counts()
        if counts.num_waiting >= self._max_waiting:
            raise Overloaded(f"{counts.num_waiting} requests are waiting; try again later")
        request = message.request
        checked = self._generator.check(request, hand_off)
        half = _VllmHalf(
            ticket,
            str(next(self._ids)),
            request,
            Timeline(self._clock),
            hand_off,
            request.num_prior_tokens,
        )
        self._generator.add(half.id, checked)
        self._by_ticket[ticket] = self._by_id[half.id] = half
        self._deadlines.note(half, request.deadline_s)

    def _hand_off(self, message: Start) -> HandOffParams | None:
        match message:
            case StartColocated(request=request):
                if self._role == "prefill" and request.sampling.max_new_tokens != 1:
                    raise InvalidRequest(
                        "this is a prefill node: a whole request must have max_new_tokens 1"
                    )
                return None
            case StartPrefill(room=room, waits_for_grant=waits) if self._role == "prefill":
                hand_off = HandOffParams(room, waits_for_grant=waits)
            case StartDecode(room=room, bootstrap_host=host, bootstrap_port=port) if (
                self._role == "decode"
            ):
                hand_off = HandOffParams(room, host, port)
            case _:
                raise InvalidRequest(
                    f"this is a {self._role} node: it does not accept this half of a request"
                )
        if any(
            half.hand_off and half.hand_off.room == hand_off.room for half in self._by_id.values()
        ):
            raise InvalidRequest(f"room {hand_off.room} is in use")
        return hand_off

    def cancel(self, ticket: Ticket) -> None:
        """Stop a request at any stage; an unknown ticket is ignored."""
        if (half := self._by_ticket.get(ticket)) is not None:
            self._totals.num_aborted += 1
            self._generator.abort(half.id)
            self._forget(half)

    def poll(self) -> None:
        """Process ended transfers, expired deadlines and changes of adapters.

        Afterwards `has_work` holds for all data-parallel ranks.
        """
        self._poll_transfers()
        self._generator.adapters.poll()
        for half in self._deadlines.passed():
            if half.id in self._by_id and not half.is_begun:
                self._end(half, not_started())
        self._generator.meet()

    def _poll_transfers(self) -> None:
        transfers = self._generator.take_transfers()
        for request_id, first in transfers.landed.items():
            if (half := self._by_id.get(request_id)) is not None:
                self._on_landed(half, first)
        for request_id in transfers.handed_off:
            if (half := self._by_id.get(request_id)) is not None:
                half.timeline.end_parallel("push", 0.0)
                finish, phases = Finish(reason="handed_off"), half.timeline.take()
                self._answers.token(half.ticket, half.next_index, [], finish, phases=phases)
                self._forget(half)
        for request_id, error in transfers.failed.items():
            if (half := self._by_id.get(request_id)) is not None:
                self._end(half, error_of_other_half(error))

    def _on_landed(self, half: _VllmHalf, first: FirstToken) -> None:
        """Send the first token, which prefill sampled. vLLM continues after it, unless it ends the answer."""
        half.num_cached = first.num_cached
        half.timeline.end_parallel("landed", 0.0)
        try:
            finish = self._generator.land(half.id, first.token)
        except EngineFailed as error:
            self._end(half, error)
            return
        if finish is not None:
            self._generator.abort(half.id)
        self._note_begun(half)
        logprobs = [] if first.logprobs is None else [first.logprobs]
        self._send(half, StepOutput(half.id, [first.token], logprobs, finish=finish))

    def step(self) -> None:
        """Run one step of vLLM and send its results."""
        outputs = self._generator.step()
        self._poll_transfers()  # first, because a landed first token precedes the generated ones
        for output in outputs:
            if (half := self._by_id.get(output.request_id)) is not None:
                self._on_output(half, output)

    def fail_all(self, error: TandemError) -> None:
        """Fail every request, because vLLM computes them in one batch."""
        self.hand_over(error)

    def hand_over(self, error: TandemError) -> None:
        """Fail every request at any stage with `error`."""
        for half in list(self._by_id.values()):
            self._end(half, error)

    def load(self) -> NodeLoad:
        """Return the node's load. Free pages include cached ones, as vLLM counts them."""
        counts, totals = self._generator.counts(), self._totals
        waiting = [half for half in self._by_id.values() if not half.is_begun]
        return NodeLoad(
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            num_transferring=sum(half.hand_off is not None for half in waiting),
            num_pages=counts.num_pages,
            pages_free=counts.pages_free,
            pages_held=counts.num_pages - counts.pages_free,
            page_size=counts.page_size,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            generated_tokens=totals.generated_tokens,
            pushed_bytes=counts.moved_bytes if self._role == "prefill" else 0,
            received_bytes=counts.moved_bytes if self._role == "decode" else 0,
            num_aborted=totals.num_aborted,
            num_failed=self._answers.num_failed,
            max_running=counts.max_running,
            queued_tokens=sum(len(half.request.prompt_ids) for half in waiting),
            ending_s=counts.ending_s,
            tiers=list(counts.tiers),
            adapters=self._generator.adapters.loaded(),
        )

    def flush_cache(self) -> None:
        """Drop the cached blocks that no request reads."""
        self._generator.flush_cache()

    def change_adapter(
        self, change: ChangeAdapter, answer: Callable[[str | TandemError], None]
    ) -> None:
        """Load or unload a LoRA adapter; see `RequestRunner`."""
        self._generator.adapters.change(change, answer)

    def log_line(self, elapsed_s: float) -> str | None:
        """Return a log line about the work since the last call; None if there was none."""
        now, before = self._totals, self._logged
        num_generated = now.generated_tokens - before.generated_tokens
        num_prompt = now.prompt_tokens - before.prompt_tokens
        if not (num_generated or num_prompt):
            return None
        self._logged = _RequestTotals(now.prompt_tokens, now.cached_tokens, now.generated_tokens)
        counts = self._generator.counts()
        return (
            f"vLLM batch, #running-req: {counts.num_running}, #queue-req: {counts.num_waiting}, "
            f"token usage: {1 - counts.pages_free / counts.num_pages:.2f}, "
            f"input throughput (token/s): {num_prompt / elapsed_s:.2f}, "
            f"gen throughput (token/s): {num_generated / elapsed_s:.2f}"
        )

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def _on_output(self, half: _VllmHalf, output: StepOutput) -> None:
        if output.error:
            self._fail(half, EngineFailed(output.error))
            self._forget(half)
            return
        if not half.is_begun:
            half.num_cached = half.num_cached or output.cached_tokens
            self._note_begun(half)
        if output.prompt_logprobs:
            self._send_prompt_logprobs(half, output.prompt_logprobs)
        is_hand_off = (
            self._role == "prefill" and half.hand_off is not None and half.hand_off.waits_for_grant
        )
        if is_hand_off and output.finish is not None and output.finish.reason == "length":
            output = replace(output, finish=None)  # the hand-off finishes this half
        self._send(half, output)

    def _note_begun(self, half: _VllmHalf) -> None:
        half.is_begun = True
        half.timeline.end("prefill")
        self._totals.prompt_tokens += len(half.request.prompt_ids)
        self._totals.cached_tokens += half.num_cached

    def _send(self, half: _VllmHalf, output: StepOutput) -> None:
        self._totals.generated_tokens += len(output.token_ids)
        last = len(output.token_ids) - 1
        is_first = half.next_index == half.request.num_prior_tokens
        for place, token_id in enumerate(output.token_ids):
            is_end = place == last and output.finish is not None
            has_phases = is_end or (is_first and place == 0)
            self._answers.token(
                half.ticket,
                half.next_index,
                [token_id],
                output.finish if place == last else None,
                half.num_cached if is_first and place == 0 else 0,
                logprobs=output.logprobs[place] if output.logprobs else None,
                phases=half.timeline.take() if has_phases else None,
            )
            half.next_index += 1
        if output.finish is not None:
            if not output.token_ids:
                self._answers.token(half.ticket, half.next_index, [], output.finish)
            self._forget(half)

    def _send_prompt_logprobs(self, half: _VllmHalf, entries: list[TokenLogprobs]) -> None:
        options = half.request.logprobs
        if options is None or options.prompt_start < 0:
            return
        start = options.prompt_start
        requested = [TokenLogprobs(logprob=None), *entries][start:]
        if requested:
            self._answers.prompt_logprobs(half.ticket, start, requested, half.next_index)

    def _end(self, half: _VllmHalf, error: TandemError) -> None:
        self._fail(half, error)
        self._generator.abort(half.id)
        self._forget(half)

    def _fail(self, half: _VllmHalf, error: TandemError) -> None:
        self._answers.fail(half.ticket, error)

    def _forget(self, half: _VllmHalf) -> None:
        del self._by_id[half.id], self._by_ticket[half.ticket]
