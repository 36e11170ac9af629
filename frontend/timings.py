"""Where one request's time went, from its arrival to its last token; docs/tracing.md explains each phase.

```
 tokenize ─ queue ─ pair ─ (lost_attempt ─ pair)* ─ reserve ─ kv_tier ─ prefill_queue ─ prefill ─ link ─ detokenize │ stream
 └───────────────────────────────── one after the other: their sum is the time to first token ─────────────────────┘
 beside them:                                       prefill_chunk ... push    landed    first_step
```

Each machine measures durations with its own clock. Times of two nodes differ by what a message takes.
"""

import time
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from tandem.wire.generation import Phase
from tandem.wire.messages import TokenDelta

HEADER = "X-Tandem-Timings"
# The phases that follow each other until the first token.
_ROW = frozenset(
    ["tokenize", "queue", "pair", "lost_attempt", "reserve", "kv_tier", "prefill_queue", "prefill"]
)

Outcome = Literal["running", "finished", "failed", "cancelled"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one request, for clients, the console and traces.

    Attributes:
        ttft_s: None if there was no token.
        cached_by_tier: How many of the cached tokens came from each tier behind the cache.
        prefill: URL of the node that computed the prompt. Empty if decode did.
        phases: One after the other. Those up to `detokenize` add up to `ttft_s`, and all to `e2e_s`.
        beside: Phases that ran beside them, after the first token, or in later attempts.
    """

    request_id: str
    outcome: Outcome
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


class TimingsSink(Protocol):
    """Gets the report of every generation that ended."""

    def request_ended(self, report: Report) -> None:
        """Note the report. Must neither wait nor raise."""


class Timings:
    """Collects one generation's times.

    Args:
        arrived: When its HTTP request came, by `clock`.
        is_wanted: Whether the client asked for the report.
    """

    def __init__(
        self,
        arrived: float | None = None,
        *,
        is_wanted: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._arrived = clock() if arrived is None else arrived
        self._started_unix_s = time.time() - self.elapsed_s()
        self.is_wanted = is_wanted
        self._sent_s = 0.0
        self._told: list[Phase] = []
        self._first_at_s: float | None = None
        self._ttft_s: float | None = None
        self._ended_s: float | None = None
        self.num_cached_tokens = self.num_output_tokens = 0
        self.cached_by_tier: dict[str, int] = {}
        self.outcome: Outcome = "finished"

    def elapsed_s(self) -> float:
        """Return the time since the request came."""
        return self._clock() - self._arrived

    def sent(self) -> None:
        """Note that the backend got the request. The backend's phases count from now."""
        self._sent_s = self.elapsed_s()

    def came(self, delta: TokenDelta) -> bool:
        """Note the phases and tokens of a delta. Return whether it has the first tokens."""
        self._told += delta.phases
        if delta.cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = delta.cached_tokens
            self.cached_by_tier = delta.cached_by_tier
        is_first = self._first_at_s is None and bool(delta.token_ids)
        if is_first:
            self._first_at_s = self.elapsed_s()
        return is_first

    def token_read(self) -> float | None:
        """Note that a token is text. Returns the time to first token if it is the first, else None."""
        if self._ttft_s is not None:
            return None
        self._ttft_s = self.elapsed_s()
        return self._ttft_s

    def ended(self) -> float:
        """Note that the last token is text, and return the time. Later reports end here too."""
        self._ended_s = self.elapsed_s()
        return self._ended_s

    def report(self, request_id: str, num_prompt_tokens: int) -> Report:
        """Return the report so far."""
        e2e_s = self.elapsed_s() if self._ended_s is None else self._ended_s
        row, beside = self._laid_out(e2e_s)
        nodes = {phase.name: phase.node for phase in (*row, *beside) if phase.node}
        decode, prefill = nodes.get("pair", ""), nodes.get("prefill", "")
        return Report(
            request_id=request_id,
            outcome=self.outcome,
            started_unix_s=self._started_unix_s,
            ttft_s=self._ttft_s,
            e2e_s=e2e_s,
            num_attempts=1 + sum(phase.name == "lost_attempt" for phase in self._told),
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            prefill="" if prefill == decode else prefill,
            decode=decode,
            phases=[_shown(phase) for phase in row],
            beside=[_shown(phase) for phase in beside],
            cached_by_tier=self.cached_by_tier,
        )

    def _laid_out(self, e2e_s: float) -> tuple[list[Phase], list[Phase]]:
        """Return the phases without gaps until `e2e_s`, and all others."""
        until_s = e2e_s if self._first_at_s is None else self._first_at_s
        row, beside, at_s = [Phase("tokenize", 0.0, self._sent_s)], list[Phase](), self._sent_s
        for phase in self._told:
            start_s = self._sent_s + phase.start_s
            # An attempt that was lost after the first token did not delay it.
            at_stake_s = start_s + (phase.duration_s if phase.name == "lost_attempt" else 0.0)
            if phase.name in _ROW and at_stake_s <= until_s:
                # Cut at the end: another node's token may have come before it was over.
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


def _shown(phase: Phase) -> dict[str, str | float]:
    times = {"start_s": round(phase.start_s, 6), "duration_s": round(phase.duration_s, 6)}
    return {"name": phase.name, **times, "node": phase.node}
