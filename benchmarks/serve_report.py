"""What samples of a load come to: percentiles and throughput, and the table that shows them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.serve_client import Sample

PERCENTILES = (50, 95, 99)
TIMES = ("TTFT", "TPOT", "ITL", "E2E")


@dataclass(frozen=True, slots=True)
class Report:
    """One target under one load.

    Attributes:
        tokens_per_s: Generated tokens over the time from the first request to the last token.
        times_ms: For each of `TIMES`, the values at `PERCENTILES`.
    """

    target: str
    concurrency: int
    num_requests: int
    num_failed: int
    duration_s: float
    tokens_per_s: float
    times_ms: dict[str, tuple[float, ...]]


def is_complete(sample: Sample, output_tokens: int) -> bool:
    """Tell whether a request brought every token that was asked for."""
    return not sample.error and bool(sample.arrivals) and sample.arrivals[-1][1] == output_tokens


def report(target: str, concurrency: int, samples: Sequence[Sample], output_tokens: int) -> Report:
    """Sum up one load. Failed requests count for nothing but `num_failed`."""
    done = [sample for sample in samples if is_complete(sample, output_tokens)]
    start_s = min((sample.sent_s for sample in samples), default=0.0)
    duration_s = max((sample.arrivals[-1][0] for sample in done), default=start_s) - start_s
    return Report(
        target=target,
        concurrency=concurrency,
        num_requests=len(samples),
        num_failed=len(samples) - len(done),
        duration_s=duration_s,
        tokens_per_s=len(done) * output_tokens / duration_s if done else 0.0,
        times_ms={name: _percentiles(values) for name, values in _times(done).items()},
    )


def _times(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Return the seconds that each of `TIMES` took, a list over requests (ITL: over tokens)."""
    times: dict[str, list[float]] = {name: [] for name in TIMES}
    for sample in samples:
        first_s, (last_s, num_tokens) = sample.arrivals[0][0], sample.arrivals[-1]
        times["TTFT"].append(first_s - sample.sent_s)
        times["E2E"].append(last_s - sample.sent_s)
        if num_tokens > 1:
            times["TPOT"].append((last_s - first_s) / (num_tokens - 1))
        times["ITL"] += _gaps(sample)
    return times


def _gaps(sample: Sample) -> list[float]:
    """Return the time between tokens; those that come in one event share what it took."""
    gaps: list[float] = []
    for (before_s, before), (after_s, after) in zip(
        sample.arrivals, sample.arrivals[1:], strict=False
    ):
        gaps += [(after_s - before_s) / (after - before)] * (after - before)
    return gaps


def _percentiles(values: Sequence[float]) -> tuple[float, ...]:
    if not values:
        return tuple(float("nan") for _ in PERCENTILES)
    return tuple(float(value) * 1000 for value in np.percentile(values, PERCENTILES))


def table(reports: Sequence[Report]) -> str:
    """Return the reports as text, one line each; times in milliseconds."""
    heads = [f"{name} p{'/'.join(str(p) for p in PERCENTILES)} ms" for name in TIMES]
    rows = [["target", "streams", "requests", "failed", "tokens/s", *heads]]
    for one in reports:
        times = ["/".join(f"{value:.1f}" for value in one.times_ms[name]) for name in TIMES]
        counts = [str(n) for n in (one.concurrency, one.num_requests, one.num_failed)]
        rows.append([one.target, *counts, f"{one.tokens_per_s:.1f}", *times])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(lines)
