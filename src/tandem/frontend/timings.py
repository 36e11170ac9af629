"""Timing report of one request, from its arrival to its last token. docs/tracing.md explains each phase.

```
 tokenize ─ queue ─ pair ─ (lost_attempt ─ pair)* ─ reserve ─ kv_tier ─ prefill_queue ─ prefill ─ link ─ detokenize │ stream
 └───────────────────────────────── sequential: their sum is the time to first token ──────────────────────────────┘
 in parallel:                                       prefill_chunk ... push    landed    first_step
```

Each machine measures durations with its own clock. Start times of different nodes are off by the latency of one message.
"""

import time
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from tandem.wire.generation import Phase
from tandem.wire.messages import TokenDelta

HEADER = "X-Tandem-Timings"
# Phases that run one after the other until the first token.
_SEQUENTIAL = frozenset(
    ["tokenize", "queue", "pair", "lost_attempt", "reserve", "kv_tier", "prefill_queue", "prefill"]
)

# A phase without a duration: a replay continues with other random draws.
RESAMPLED = "resampled"

RequestOutcome = Literal["running", "finished", "failed", "cancelled"]


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one request, for clients, the console and traces.

    Attributes:
        client: Name of the key that sent it. Empty if the server has no keys.
        ttft_s: Time to first token. None if no token was generated.
        prefill: URL of the node that computed the prompt. Empty if the decode node did.
        phases: Sequential phases. Those up to `detokenize` add up to `ttft_s`, all of them to `e2e_s`.
        beside: Phases that ran in parallel with `phases`, after the first token, or in later attempts.
        cached_by_tier: Cached tokens that each KV tier supplied.
    """

    request_id: str
    client: str
    outcome: RequestOutcome
    started_unix_s: float
    ttft_s: float | None
    e2e_s: float
    num_attempts: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    prefill: str
    decode: str
    phases: list[dict[str, str | float]]
    beside: list[dict[str, str | float]]
    cached_by_tier: dict[str, int] = {}


ReportMaker = Callable[[], RequestReport]
"""Returns the report of a generation. Making one costs more than the rest of a request's timing."""


class TimingsSink(Protocol):
    """Receives the report of every generation that ended."""

    def request_ended(self, report: ReportMaker) -> None:
        """Keep or process the report. Must neither block nor raise."""


class Timings:
    """Collects the timings of one generation.

    Args:
        received_s: When its HTTP request arrived, by `clock`.
        is_requested: Whether the client requested the report.
    """

    def __init__(
        self,
        received_s: float | None = None,
        *,
        is_requested: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._received_s = clock() if received_s is None else received_s
        self._started_unix_s = time.time() - self.elapsed_s()
        self.is_requested = is_requested
        self._sent_s = 0.0
        self._phases: list[Phase] = []
        self._first_at_s: float | None = None
        self._ttft_s: float | None = None
        self._ended_s: float | None = None
        self.num_cached_tokens = self.num_output_tokens = 0
        self.cached_by_tier: dict[str, int] = {}
        self.outcome: RequestOutcome = "finished"

    def elapsed_s(self) -> float:
        """Return the time since the request arrived."""
        return self._clock() - self._received_s

    def mark_sent(self) -> None:
        """Record that the backend received the request. Its phases start now."""
        self._sent_s = self.elapsed_s()

    def record_delta(self, delta: TokenDelta) -> bool:
        """Record the phases and cached tokens of a delta. True: it contains the first token."""
        self._phases += delta.phases
        if delta.cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = delta.cached_tokens
            self.cached_by_tier = delta.cached_by_tier
        is_first = self._first_at_s is None and bool(delta.token_ids)
        if is_first:
            self._first_at_s = self.elapsed_s()
        return is_first

    @property
    def is_resampled(self) -> bool:
        """Whether a replay continued the answer with other random draws."""
        return any(phase.name == RESAMPLED for phase in self._phases)

    def record_text(self) -> float | None:
        """Record a detokenized token. Returns the time to first token for the first one, else None."""
        if self._ttft_s is not None:
            return None
        self._ttft_s = self.elapsed_s()
        return self._ttft_s

    def finish(self) -> float:
        """Record the end and return the time until then. Later reports end here too. Safe to call twice."""
        if self._ended_s is None:
            self._ended_s = self.elapsed_s()
        return self._ended_s

    def report(self, request_id: str, client: str, num_prompt_tokens: int) -> RequestReport:
        """Return the report so far."""
        e2e_s = self.elapsed_s() if self._ended_s is None else self._ended_s
        row, beside = self._split_phases(e2e_s)
        nodes = {phase.name: phase.node for phase in (*row, *beside) if phase.node}
        decode, prefill = nodes.get("pair", ""), nodes.get("prefill", "")
        return RequestReport(
            request_id=request_id,
            client=client,
            outcome=self.outcome,
            started_unix_s=self._started_unix_s,
            ttft_s=self._ttft_s,
            e2e_s=e2e_s,
            num_attempts=1 + sum(phase.name == "lost_attempt" for phase in self._phases),
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            prefill="" if prefill == decode else prefill,
            decode=decode,
            phases=[_phase_json(phase) for phase in row],
            beside=[_phase_json(phase) for phase in beside],
            cached_by_tier=self.cached_by_tier,
        )

    def _split_phases(self, e2e_s: float) -> tuple[list[Phase], list[Phase]]:
        """Return the sequential phases, which cover the time until `e2e_s` without gaps, and all others."""
        until_s = e2e_s if self._first_at_s is None else self._first_at_s
        row, beside, at_s = [Phase("tokenize", 0.0, self._sent_s)], list[Phase](), self._sent_s
        for phase in self._phases:
            start_s = self._sent_s + phase.start_s
            # A phase delays the first token if it starts before that token; a lost attempt, if it ends before it.
            decisive_s = start_s + (phase.duration_s if phase.name == "lost_attempt" else 0.0)
            if phase.name in _SEQUENTIAL and decisive_s <= until_s:
                # Clip it: a token from a different node may have arrived before this phase ended.
                duration_s = min(phase.duration_s, until_s - at_s)
                row.append(Phase(phase.name, at_s, duration_s, phase.node))
                at_s += duration_s
            else:
                beside.append(Phase(phase.name, start_s, phase.duration_s, phase.node))
        if self._first_at_s is None or self._ttft_s is None:
            return [*row, Phase("unanswered", at_s, e2e_s - at_s)], beside
        row.append(Phase("link", at_s, until_s - at_s))
        row.append(Phase("detokenize", until_s, self._ttft_s - until_s))
        row.append(Phase("stream", self._ttft_s, e2e_s - self._ttft_s))
        return row, beside


def _phase_json(phase: Phase) -> dict[str, str | float]:
    times = {"start_s": round(phase.start_s, 6), "duration_s": round(phase.duration_s, 6)}
    return {"name": phase.name, **times, "node": phase.node}
