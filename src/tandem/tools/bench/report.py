"""Turns samples into the report of `tandem bench`: JSON (`--output-file`) and a table.

The JSON is stable for scripts: new fields have defaults, no field is renamed or reused. Latencies are in milliseconds.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from tandem.tools.bench.client import Sample
from tandem.tools.query import plain

SCHEMA = "tandem.bench/4"
# A client that is busier than this reads tokens late, so that its own delay is part of the latencies.
BUSY_SHARE = 0.7
# In a shorter load the start-up dominates the client's CPU time, so there is no warning.
SHORT_S = 1.0
Array = NDArray[np.float64]


class LatencyStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one latency over a load, in milliseconds."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class GoodputLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that a request must meet to count for goodput; None: no limit.

    Attributes:
        itl_ms: The limit of a request's mean time between tokens (its TPOT), as in vLLM.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one load.

    Attributes:
        failures: The number of failed requests by kind, most frequent first; `errors` has an example of each.
        goodput_share: The share of finished and failed requests that met every limit; None without limits.
        client_busy_share: The CPU time of each load process, as a share of one core.
    """

    num_requests: int
    num_done: int
    num_failed: int
    duration_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: LatencyStats
    itl_ms: LatencyStats
    tpot_ms: LatencyStats
    e2e_ms: LatencyStats
    failures: dict[str, int]
    errors: dict[str, str]
    goodput_share: float | None = None
    goodput_requests_per_s: float | None = None
    client_busy_share: float = 0.0


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run; `settings` has the flags that are not secret."""

    schema: str = SCHEMA
    version: str
    started_at: str
    settings: dict[str, object]
    load: LoadReport


def summarise(
    samples: Sequence[Sample], client_cpu_s: float = 0.0, limits: GoodputLimits | None = None
) -> LoadReport:
    """Return the report of a load. `client_cpu_s` is the CPU time of each load process."""
    done = [sample for sample in samples if not sample.failure]
    failed = [sample for sample in samples if sample.failure]
    start_s = min((sample.sent_s for sample in samples), default=0.0)
    duration_s = max((s.sent_s + s.times[-1] - start_s for s in done if s.times), default=0.0)
    num_in = sum(sample.prompt_tokens for sample in done)
    num_out = sum(sample.output_tokens for sample in done)
    num_good = sum(_is_good(sample, limits) for sample in done) if limits else 0
    return LoadReport(
        num_requests=len(samples),
        num_done=len(done),
        num_failed=len(failed),
        duration_s=duration_s,
        input_tokens=num_in,
        cached_tokens=sum(sample.cached_tokens for sample in done),
        output_tokens=num_out,
        requests_per_s=_over(len(done), duration_s),
        input_tokens_per_s=_over(num_in, duration_s),
        output_tokens_per_s=_over(num_out, duration_s),
        ttft_ms=_times([sample.times[:1] for sample in done]),
        itl_ms=_times([gaps(sample) for sample in done]),
        tpot_ms=_times([_tpot(sample) for sample in done]),
        e2e_ms=_times([sample.times[-1:] for sample in done]),
        failures=dict(Counter(sample.failure for sample in failed).most_common()),
        errors={sample.failure: sample.error for sample in reversed(failed)},
        goodput_share=_over(num_good, len(done) + len(failed)) if limits else None,
        goodput_requests_per_s=_over(num_good, duration_s) if limits else None,
        client_busy_share=_over(client_cpu_s, duration_s),
    )


def gaps(sample: Sample) -> Array:
    """Return the seconds between tokens, one value for each token after the first arrival.

    Tokens of one arrival share the time since the previous arrival evenly, as in `sglang.bench_serving`.
    Tokens of the first arrival have no value.
    """
    counts, times = np.array(sample.counts, np.int64), np.array(sample.times, np.float64)
    new = counts[1:] - counts[:-1]
    found: Array = np.repeat((times[1:] - times[:-1]) / new, new)
    return found


def _tpot(sample: Sample) -> list[float]:
    """Return the mean seconds between tokens as a list of one; empty without a second arrival."""
    if sample.output_tokens < 2 or len(sample.times) < 2:
        return []
    return [(sample.times[-1] - sample.times[0]) / (sample.output_tokens - 1)]


def _times(parts: Sequence[Sequence[float] | Array]) -> LatencyStats:
    values = np.concatenate([*parts, []]) * 1000
    if not len(values):
        return LatencyStats()
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return LatencyStats(count=len(values), mean=float(values.mean()), p50=p50, p90=p90, p99=p99)


def _is_good(sample: Sample, limits: GoodputLimits) -> bool:
    measured = ((limits.ttft_ms, sample.times[:1]), (limits.itl_ms, _tpot(sample)))
    return all(most is None or all(s * 1000 <= most for s in found) for most, found in measured)


def _over(value: float, divisor: float) -> float:
    return value / divisor if divisor else 0.0


def render(report: BenchReport, name: str, console: Console) -> None:
    """Print a table of all latencies, then throughput, goodput, failures and warnings.

    Args:
        name: The load in words.
    """
    load = report.load
    table = Table("latency", box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("mean", "p50", "p90", "p99"):
        table.add_column(title, justify="right", no_wrap=True)
    for measure in ("ttft", "itl", "tpot", "e2e"):
        times: LatencyStats = getattr(load, f"{measure}_ms")
        cells = [f"{v:,.1f}" for v in (times.mean, times.p50, times.p90, times.p99)]
        table.add_row(f"{measure.upper()}, ms", *(cells if times.count else ["-"] * 4))
    console.print(table)
    for line in _sentences(load, name):
        console.print(line, soft_wrap=True)


def _sentences(load: LoadReport, name: str) -> Iterator[str]:
    cached = f" ({load.cached_tokens:,} of {load.input_tokens:,} from a cache)"
    yield (
        f"{name}: {load.num_done} of {load.num_requests} requests in {load.duration_s:.1f} s; "
        f"{load.requests_per_s:.2f} requests/s, output {load.output_tokens_per_s:,.1f} tokens/s, input "
        f"{load.input_tokens_per_s:,.1f} tokens/s" + (cached if load.cached_tokens else "")
    )
    if load.goodput_share is not None:
        rate = f"{load.goodput_requests_per_s:.2f} requests/s"
        yield f"  goodput: {load.goodput_share:.1%} of requests met the limits: {rate}"
    for kind, count in load.failures.items():
        yield f"  failed, {kind}: {count}, such as: {plain(load.errors[kind])}"
    if load.client_busy_share > BUSY_SHARE and load.duration_s > SHORT_S:
        yield (
            f"  warning: the load client was busy {load.client_busy_share:.0%} of the time, so it sends and reads "
            "late: use more --processes"
        )
