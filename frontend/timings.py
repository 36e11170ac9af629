"""Where one request's time went, from its arrival to its last token. Pure but for its clock.

```
 tokenize ─ queue ─ pair ─ (lost_attempt ─ pair)* ─ reserve ─ kv_tier ─ prefill_queue ─ prefill ─ link ─ detokenize │ stream
 └───────────────────────────────── one after the other: their sum is the time to first token ─────────────────────┘
 beside them:                                       prefill_chunk ... push    landed    first_step
```

| phase | what passes |
|---|---|
| `tokenize` | the body comes in, is checked and becomes token ids |
| `queue` | no node has room for it, at the router |
| `pair` | a pair is chosen, and waited for when there is none; its `node` is decode |
| `lost_attempt` | all of an attempt that failed before its first token |
| `reserve` | decode sets pages aside and grants them to prefill |
| `kv_tier` | what tiers have of the prompt comes into the cache; where there are tiers and it was waited for |
| `prefill_queue` | the prompt waits for its first chunk |
| `prefill` | the prompt is computed and its first token chosen |
| `link` | the rest until the token is here: messages both ways, and loops that were busy |
| `detokenize` | the token becomes text |
| `stream` | all later tokens |
| `unanswered` | of a request that ended without a token: from its last phase to its end |

Each machine measures with its own clock, and only durations travel. So times of one node are true to
each other; beside those of another they are off by what a message takes.
"""

import time
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from tandem.wire.generation import Phase
from tandem.wire.messages import TokenDelta

HEADER = "X-Tandem-Timings"
# In which a request stands at any moment until its first token.
_ROW = frozenset(
    {
        *("tokenize", "queue", "pair", "lost_attempt", "reserve"),
        *("kv_tier", "prefill_queue", "prefill"),
    }
)

Outcome = Literal["finished", "failed", "cancelled"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What clients, the page and traces are told of one request.

    Attributes:
        ttft_s: None where there was no token.
        cached_by_tier: Of the cached tokens, how many came from which tier behind the cache.
        prefill: URL of the node that computed the prompt; empty where decode did it by itself.
        phases: One after the other; those up to `detokenize` add up to `ttft_s`, and all to `e2e_s`.
        beside: What ran beside them, or after the first token, or belongs to later attempts.
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
    """Who is told of every request that ended."""

    def request_ended(self, report: Report) -> None:
        """Take note. Must neither wait nor raise."""
        ...


class Timings:
    """Collects one generation's times.

    Args:
        arrived: When its HTTP request came, by `clock`.
        is_wanted: Whether the client asked to be told.

    Attributes:
        num_cached_tokens, cached_by_tier, num_output_tokens: To be reported.
        outcome: So too; finished until something else is known.
    """

    __slots__ = (
        "_arrived",
        "_clock",
        "_ended_s",
        "_first_at_s",
        "_sent_s",
        "_told",
        "_ttft_s",
        "cached_by_tier",
        "is_wanted",
        "num_cached_tokens",
        "num_output_tokens",
        "outcome",
    )

    def __init__(
        self,
        arrived: float | None = None,
        *,
        is_wanted: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._arrived = clock() if arrived is None else arrived
        self.is_wanted = is_wanted
        self._sent_s = 0.0
        self._told: list[Phase] = []
        self._first_at_s: float | None = None
        self._ttft_s: float | None = None
        self._ended_s: float | None = None
        self.num_cached_tokens = self.num_output_tokens = 0
        self.cached_by_tier: dict[str, int] = {}
        self.outcome: Outcome = "finished"

    @property
    def elapsed_s(self) -> float:
        """Time since the request arrived."""
        return self._clock() - self._arrived

    def sent(self) -> None:
        """The request is given to the backend: what it tells counts from now."""
        self._sent_s = self.elapsed_s

    def came(self, delta: TokenDelta) -> None:
        """The backend told of phases, of tokens or of both."""
        self._told += delta.phases
        if self._first_at_s is None and delta.token_ids:
            self._first_at_s = self.elapsed_s
        if delta.cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = delta.cached_tokens
            self.cached_by_tier = delta.cached_by_tier

    def token_read(self) -> float | None:
        """A token is text. Returns the time to first token when it is the first, else None."""
        if self._ttft_s is not None:
            return None
        self._ttft_s = self.elapsed_s
        return self._ttft_s

    def ended(self) -> float:
        """The last token is text: later reports end here too, others of its answer may go on. Returns its time."""
        self._ended_s = self.elapsed_s
        return self._ended_s

    def report(self, request_id: str, num_prompt_tokens: int) -> Report:
        """Return what is known by now."""
        elapsed_s = self.elapsed_s
        e2e_s = elapsed_s if self._ended_s is None else self._ended_s
        row, beside = self._laid_out(e2e_s)
        nodes = {phase.name: phase.node for phase in (*row, *beside) if phase.node}
        decode, prefill = nodes.get("pair", ""), nodes.get("prefill", "")
        return Report(
            request_id=request_id,
            outcome=self.outcome,
            started_unix_s=time.time() - elapsed_s,
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
        """Return the phases that follow each other without a gap until `e2e_s`, and all others."""
        until_s = e2e_s if self._first_at_s is None else self._first_at_s
        row, beside, at_s = [Phase("tokenize", 0.0, self._sent_s)], list[Phase](), self._sent_s
        for phase in self._told:
            start_s = self._sent_s + phase.start_s
            # An attempt that was lost after its first token is no part of the way to it.
            at_stake_s = start_s + (phase.duration_s if phase.name == "lost_attempt" else 0.0)
            if phase.name in _ROW and at_stake_s <= until_s:
                # Never over the end: a node may have been at it when another's token came.
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
    return {
        "name": phase.name,
        "start_s": round(phase.start_s, 6),
        "duration_s": round(phase.duration_s, 6),
        "node": phase.node,
    }
