"""What `tandem bench --output-file` writes: the shape that scripts may count on.

A new field has a default, none is renamed or reused. Times are in milliseconds.
"""

from typing import Literal

import msgspec

SCHEMA = "tandem.bench/1"


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of time over a load.

    Attributes:
        quantiles: The 0th, 1st, ... 100th percentile: enough to draw the distribution.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    quantiles: list[float]


class Failure(msgspec.Struct, frozen=True):
    """Requests that failed in one way.

    Attributes:
        example: What was said of the first.
    """

    kind: str
    count: int
    example: str


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that met every objective that was set, in milliseconds.

    Attributes:
        itl_ms: Of a request's mean time between tokens (its TPOT), as vLLM judges it.
        share: Of those that ended; one that failed met none.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None
    share: float = 0.0
    requests_per_s: float = 0.0


class ClientCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the load client itself took.

    Attributes:
        busiest_share: Of one core, by the busiest process.
        late_p99_ms: How long after it was due, and had a place, a request was sent.
    """

    num_processes: int = 0
    cpu_us_per_token: float = 0.0
    busiest_share: float = 0.0
    late_p99_ms: float = 0.0


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one load was served.

    Attributes:
        is_stopped: It was ended before all requests had been sent and answered.
        duration_s: From the first request to the last token.
        num_unfinished: Under way when the load was stopped. Their tokens, times to first token and
            times between tokens count; of failed requests nothing does.
        ttft_ms: Time to first token, from sending the request.
        itl_ms: Time between tokens; those that arrived together share what they took.
        tpot_ms: Of a request: from its first token to its last over the tokens after the first.
        e2e_ms: From sending a request to its last token.
        tokens_per_s: Output in each `step_s` of the load.
    """

    name: str
    kind: Literal["closed", "open", "trace"]
    concurrency: int
    rate: float | None
    is_stopped: bool = False
    num_requests: int
    num_done: int
    num_failed: int
    num_unfinished: int
    duration_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Times
    itl_ms: Times
    tpot_ms: Times
    e2e_ms: Times
    step_s: float
    tokens_per_s: list[float]
    failures: list[Failure]
    goodput: Goodput | None = None
    client: ClientCost = ClientCost()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        settings: The flags it had, but for the key.
    """

    schema: str = SCHEMA
    version: str
    started_at: str
    url: str
    api: str
    model: str
    settings: dict[str, object]
    loads: list[LoadReport]
