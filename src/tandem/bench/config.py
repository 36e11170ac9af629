"""What `tandem bench` was told."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tandem.bench.records import Api


@dataclass(frozen=True, slots=True)
class Load:
    """One load: a bound on the streams, a rate, or a trace.

    Attributes:
        concurrency: Conversations under way at once, at most; 0: no bound.
        rate: Requests a second, infinity for all at once; 0: a next one when one has ended, or as
            the trace has it.
    """

    concurrency: int = 0
    rate: float = 0.0
    is_trace: bool = False

    @property
    def kind(self) -> Literal["closed", "open", "trace"]:
        """Return what decides when a request is sent."""
        if self.is_trace:
            return "trace"
        return "open" if self.rate else "closed"

    @property
    def name(self) -> str:
        """Return what people call it."""
        bound = (
            f"{self.concurrency} stream{'s' * (self.concurrency > 1)}" if self.concurrency else ""
        )
        if self.is_trace:
            return f"trace, at most {bound}" if bound else "trace"
        if not self.rate:
            return bound
        each = "all at once" if math.isinf(self.rate) else f"{self.rate:g} requests/s"
        return f"{each}, at most {bound}" if bound else each


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What `tandem bench` was told; the flags' help says what each is."""

    url: str
    api: Api
    model: str
    api_key: str
    extra_body: dict[str, object]
    is_eos_ignored: bool
    timeout_s: float
    loads: tuple[Load, ...]
    num_prompts: int
    burstiness: float
    trace: Path | None
    trace_speed: float
    trace_limit: int
    input_tokens: int
    output_tokens: int
    range_ratio: float
    shared_prefix_tokens: int
    num_prefixes: int
    turns: int
    think_time_s: float
    vocab_size: int
    seed: int
    warmup_requests: int
    clients: int
    slo_ttft_ms: float | None
    slo_itl_ms: float | None
    slo_e2e_ms: float | None
    output_file: Path | None
    html: Path | None
