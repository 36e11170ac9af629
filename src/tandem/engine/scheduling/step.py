"""The interfaces of a step: the launcher, the outcome of a forward, the step's result, and counters.

```
 Engine (core.py) ── batch ──▶ Launcher ─┬─ ModelLauncher (launcher.py)       model and sampler on a device
        ◀─ StepResult ── Outcome ◀───────┴─ SimulatedLauncher (simulated.py)  clock, no model
```
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tandem.engine.scheduling.forward import Batch, Chunk, Ints, OnLayerWritten, Slots
from tandem.engine.scheduling.request import ActiveRequest
from tandem.telemetry.histogram import Histogram
from tandem.wire.errors import TandemError
from tandem.wire.generation import Finish, GenerateRequest, TokenLogprobs

# Histogram buckets, from a small batch on a fast GPU to a long chunk on a CPU.
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# With fewer prompt tokens, reading the weights dominates the time of a forward.
_MIN_PROMPT = 64
# Weight of the newest forward in `prompt_token_s`, so that the last ten make up two thirds of it.
_NEWEST = 0.1


# ── results ──────────────────────────────────────────────────────────────────────────────────────


class Token(msgspec.Struct, frozen=True, gc=False):
    """One generated token.

    Attributes:
        index: Position among the generated tokens of all attempts.
        logprobs: None unless requested and computed on this node.
    """

    request: ActiveRequest
    index: int
    token: int
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; 0 except for the first token."""
        is_first = self.index == self.request.request.num_prior_tokens
        return self.request.num_cached if is_first else 0

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """The part of `cached_tokens` that was loaded from tiers for this request, by tier."""
        left, by_tier = self.cached_tokens, {}
        for name, num_tokens in (self.request.from_tiers or {}).items() if left else ():
            by_tier[name] = min(left, num_tokens)
            left -= by_tier[name]
        return by_tier


@dataclass(frozen=True, slots=True)
class CompletePages:
    """Pages of a prompt-only request that can be pushed, because no later forward changes them."""

    request: ActiveRequest
    first_page: int
    page_ids: list[int]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt positions. The runs of a request come in order."""

    request: ActiveRequest
    first_position: int
    entries: list[TokenLogprobs]

    @classmethod
    def run(
        cls, active: ActiveRequest, start: int, entries: list[TokenLogprobs]
    ) -> "PromptLogprobs":
        """Return a run of entries. The first run also gets an empty entry for position 0, which has no probability."""
        logprobs = active.request.logprobs
        if start == 1 and logprobs is not None and logprobs.prompt_start == 0:
            return cls(active, 0, [TokenLogprobs(logprob=None), *entries])
        return cls(active, start, entries)


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed on its own; its pages are freed."""

    request: ActiveRequest
    error: TandemError


@dataclass(slots=True)
class StepResult:
    """The results of a step, on which the role acts. `chunks` belong to the collected forward."""

    tokens: list[Token] = field(default_factory=list)
    pages: list[CompletePages] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


# ── launching ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a forward.

    Attributes:
        token_ids: Sampled tokens, in the order of `Batch.sampled`. Shape (num_sampled,).
        device_s: Time in seconds from the forward's start on the device until its tokens are sampled.
        host_cpu_s: CPU time in seconds of the launching thread during `device_s`; 0 unless the device is the CPU.
        token_logprobs: Requested log-probabilities of sampled tokens, by index in `token_ids`.
        prompt_logprobs: Log-probabilities of prompt positions: `Chunk.logprob_positions` of each chunk in turn.
    """

    token_ids: Ints
    device_s: float = 0.0
    host_cpu_s: float = 0.0
    token_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A forward in flight.

    Attributes:
        pages: Pages of prompt-only requests that the forward completes.
        sampled: Requests whose next token the forward samples.
        rows: Slots of `sampled`. Shape (len(sampled),).
        indexes: Indexes of the sampled tokens, as in `Token.index`.
        read: Waits for the forward. Called once per forward, in launch order.
    """

    batch: Batch
    pages: list[CompletePages]
    sampled: list[ActiveRequest]
    rows: Ints
    indexes: list[int]
    read: Callable[[], Outcome]


class Launcher(Protocol):
    """Computes forwards and samples tokens."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether forwards run asynchronously to the host."""

    def seed(self, request: GenerateRequest, drawn: int) -> int:
        """Return the seed that a request samples with.

        Args:
            drawn: The client's seed, or a random one if the client set none.

        Raises:
            InvalidRequest: The launcher does not support a parameter of the request.
        """

    def launch(
        self, batch: Batch, slots: Slots, on_layer_written: OnLayerWritten | None
    ) -> Callable[[], Outcome]:
        """Start a forward over `batch`, which may use tokens sampled by the previous forward.

        Args:
            on_layer_written: Called with the number of each layer, in order, once its K and V are in the pool.
                Calls may come from a different thread and may skip layers.

        Returns:
            A function that waits for the forward and returns its outcome.
        """


# ── counters ─────────────────────────────────────────────────────────────────────────────────────


class StepCounts:
    """Metrics of the collected forwards.

    Attributes:
        device_seconds, requests, tokens: Histograms of device time, requests and computed tokens per forward.
        host_cpu_s: Total CPU time in seconds of the engine's thread in forwards; see `Outcome`.
        prompt_token_s: Moving average of the device time per prompt token in seconds; 0 before the first.
    """

    def __init__(self) -> None:
        self.device_seconds = Histogram(_SECONDS)
        self.requests = Histogram(_REQUESTS)
        self.tokens = Histogram(_TOKENS)
        self.num_collected = 0
        self.host_cpu_s = 0.0
        self.prompt_token_s = 0.0

    def record(self, batch: Batch, outcome: Outcome) -> None:
        """Count a collected forward."""
        self.num_collected += 1
        self.device_seconds.observe(outcome.device_s)
        self.host_cpu_s += outcome.host_cpu_s
        self.requests.observe(len(batch.decodes) + len(batch.chunks))
        num_prompt = sum(chunk.num_tokens for chunk in batch.chunks)
        num_tokens = len(batch.decodes) + num_prompt
        self.tokens.observe(num_tokens)
        # The time per token is that of a prompt token only if prompts make up most of the forward.
        if num_prompt >= max(_MIN_PROMPT, len(batch.decodes)):
            weight = _NEWEST if self.prompt_token_s else 1.0
            self.prompt_token_s += weight * (outcome.device_s / num_tokens - self.prompt_token_s)
