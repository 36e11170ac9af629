"""One step's seams: what is launched and by whom, what comes out of it, and what is counted of it.

```
 Engine (core.py) ── batch ──▶ Launcher ─┬─ ModelLauncher (launcher.py)      a model on a device, a sampler
        ◀─ StepResult ── Outcome ◀───────┴─ SimulatedLauncher (simulated.py)  a clock, no model
```
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tandem.engine.forward import Batch, Chunk, Ints, Slots, Wrote
from tandem.engine.request import ActiveRequest
from tandem.telemetry.histogram import Histogram
from tandem.wire.errors import TandemError
from tandem.wire.generation import Finish, GenerateRequest, TokenLogprobs

# From a small batch on a fast GPU to a long chunk on a CPU.
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# Below so many prompt tokens, reading the weights takes most of a forward.
_MIN_PROMPT = 64
# Weight of the newest forward in the cost of a prompt token: the last ten are two thirds of it.
_NEWEST = 0.1


# ── what comes out ───────────────────────────────────────────────────────────────────────────────


class Token(msgspec.Struct, frozen=True, gc=False):
    """One generated token.

    Attributes:
        index: Among the generated tokens of all attempts.
        logprobs: When wanted, and known here.
    """

    request: ActiveRequest
    index: int
    token: int
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; reported with the first token only."""
        is_first = self.index == self.request.request.num_prior_tokens
        return self.request.num_cached if is_first else 0

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """Of these, those that tiers brought for this request."""
        left, by_tier = self.cached_tokens, {}
        for name, num_tokens in (self.request.from_tiers or {}).items() if left else ():
            by_tier[name] = min(left, num_tokens)
            left -= by_tier[name]
        return by_tier


@dataclass(frozen=True, slots=True)
class CompletePages:
    """Pages of a prompt-only request that no later forward changes: they may be pushed."""

    request: ActiveRequest
    first_page: int
    page_ids: list[int]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a run of prompt positions; runs of a request come in order."""

    request: ActiveRequest
    first_position: int
    entries: list[TokenLogprobs]

    @classmethod
    def run(
        cls, active: ActiveRequest, start: int, entries: list[TokenLogprobs]
    ) -> "PromptLogprobs":
        """Return a run; position 0, which has no probability, goes with the first."""
        wanted = active.request.logprobs
        if start == 1 and wanted is not None and wanted.prompt_start == 0:
            return cls(active, 0, [TokenLogprobs(logprob=None), *entries])
        return cls(active, start, entries)


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended by an error of its own; it holds nothing any more."""

    request: ActiveRequest
    error: TandemError


@dataclass(slots=True)
class StepResult:
    """What one step produced, for a role to act on; `chunks` are those that were computed."""

    tokens: list[Token] = field(default_factory=list)
    pages: list[CompletePages] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


# ── what is launched ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a forward computed.

    Attributes:
        token_ids: Tokens chosen, in the order of `Batch.sampled`. Shape (num_sampled,).
        device_s: From its begin on the device until its tokens were chosen.
        host_cpu_s: CPU time of the launching thread in that; 0 unless the device is the CPU.
        token_logprobs: Of the tokens chosen where wanted, by their place in `token_ids`.
        prompt_logprobs: Of prompt positions, `Chunk.told` of chunk after chunk.
    """

    token_ids: Ints
    device_s: float = 0.0
    host_cpu_s: float = 0.0
    token_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Launched:
    """A forward under way.

    Attributes:
        pages: Pages of prompt-only requests that are complete after it.
        sampled: Requests whose next token it chooses.
        rows: Their slots. Shape (len(sampled),).
        indexes: Of these tokens.
        read: Waits for it. Called once, in the order of launches.
    """

    batch: Batch
    pages: list[CompletePages]
    sampled: list[ActiveRequest]
    rows: Ints
    indexes: list[int]
    read: Callable[[], Outcome]


class Launcher(Protocol):
    """Computes forwards and chooses tokens. The engine is given one."""

    @property
    def is_beside_host(self) -> bool:
        """Whether forwards run while the host does other things."""

    def seed(self, request: GenerateRequest, drawn: int) -> int:
        """Return the key of a request's draws.

        Args:
            drawn: The client's seed, or one that was drawn where it gave none.

        Raises:
            InvalidRequest: The launcher cannot do what the request asks for.
        """

    def launch(self, batch: Batch, slots: Slots, wrote: Wrote | None) -> Callable[[], Outcome]:
        """Begin a forward over `batch`; it may take tokens of the one launched before.

        Args:
            wrote: Called with the numbers of layers, in order, as their K and V are in the pool;
                perhaps from another thread, perhaps not for all of them.

        Returns:
            What waits for the forward and returns its outcome.
        """


# ── what is counted ──────────────────────────────────────────────────────────────────────────────


class StepCounts:
    """Counts of the forwards that were collected, for operators.

    Attributes:
        device_seconds, requests, tokens: Of each forward; tokens are those computed.
        host_cpu_s: CPU time of the engine's thread in all of them; see `Outcome`.
        prompt_token_s: Recent device time of one prompt token; 0 before any was computed.
    """

    def __init__(self) -> None:
        self.device_seconds = Histogram(_SECONDS)
        self.requests = Histogram(_REQUESTS)
        self.tokens = Histogram(_TOKENS)
        self.num_collected = 0
        self.host_cpu_s = 0.0
        self.prompt_token_s = 0.0

    def collected(self, batch: Batch, outcome: Outcome) -> None:
        """Count a forward whose tokens were read."""
        self.num_collected += 1
        self.device_seconds.observe(outcome.device_s)
        self.host_cpu_s += outcome.host_cpu_s
        self.requests.observe(len(batch.decodes) + len(batch.chunks))
        num_prompt = sum(chunk.num_tokens for chunk in batch.chunks)
        num_tokens = len(batch.decodes) + num_prompt
        self.tokens.observe(num_tokens)
        # Dividing a forward's time by its tokens is fair to prompts only where they have most of them.
        if num_prompt >= max(_MIN_PROMPT, len(batch.decodes)):
            weight = _NEWEST if self.prompt_token_s else 1.0
            self.prompt_token_s += weight * (outcome.device_s / num_tokens - self.prompt_token_s)
