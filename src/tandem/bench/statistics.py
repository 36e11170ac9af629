"""What samples come to. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.bench.config import Load
from tandem.bench.records import UNFINISHED, Sample
from tandem.bench.report import ClientCost, Failure, Goodput, LoadReport, Times

Array = NDArray[np.float64]
# Of throughput over time: as many steps as a plot shows, none so short that single tokens make it jump.
MAX_STEPS, LEAST_STEP_S = 60, 0.25
PERCENTS = tuple(range(101))


def summarise(
    load: Load,
    samples: Sequence[Sample],
    client_cpu_s: Sequence[float] = (),
    *,
    objectives: Goodput | None = None,
    is_stopped: bool = False,
) -> LoadReport:
    """Sum up one load.

    Args:
        load: Which.
        samples: Of all clients.
        client_cpu_s: Processor time of each.
        objectives: What a request has to meet to count for goodput; None asks for none.
        is_stopped: The load was ended early.
    """
    done = [sample for sample in samples if not sample.failure]
    heard = [s for s in samples if s.failure in ("", UNFINISHED) and s.arrival_s]
    failed = [s for s in samples if s.failure not in ("", UNFINISHED)]
    start_s = min((sample.sent_s for sample in samples), default=0.0)
    arrivals = [sample.times() + (sample.sent_s - start_s) for sample in heard]
    duration_s = max((float(times[-1]) for times in arrivals), default=0.0)
    num_in, num_out = (
        sum(sample.prompt_tokens for sample in heard),
        sum(sample.output_tokens for sample in heard),
    )
    num_steps = min(max(int(duration_s / LEAST_STEP_S), 1), MAX_STEPS)
    return LoadReport(
        name=load.name,
        kind=load.kind,
        concurrency=load.concurrency,
        rate=load.rate if 0 < load.rate < float("inf") else None,
        is_stopped=is_stopped,
        num_requests=len(samples),
        num_done=len(done),
        num_failed=len(failed),
        num_unfinished=len(samples) - len(done) - len(failed),
        duration_s=duration_s,
        input_tokens=num_in,
        cached_tokens=sum(sample.cached_tokens for sample in heard),
        output_tokens=num_out,
        requests_per_s=_over(len(done), duration_s),
        input_tokens_per_s=_over(num_in, duration_s),
        output_tokens_per_s=_over(num_out, duration_s),
        ttft_ms=_times([sample.times()[:1] for sample in heard]),
        itl_ms=_times([gaps(sample) for sample in heard]),
        tpot_ms=_times([_tpot(sample) for sample in done if sample.arrival_s]),
        e2e_ms=_times([sample.times()[-1:] for sample in done]),
        step_s=duration_s / num_steps,
        tokens_per_s=_rates(heard, arrivals, np.linspace(0, duration_s, num_steps + 1)),
        failures=_failures(failed),
        goodput=_goodput(objectives, done, len(failed), duration_s),
        client=_cost(samples, client_cpu_s, num_out, duration_s),
    )


def gaps(sample: Sample) -> Array:
    """Return the time between tokens, one for each after the first arrival.

    Tokens that arrived together share the time since the arrival before them, as
    `sglang.bench_serving` counts; those of the first arrival have none.
    """
    counts = np.diff(sample.counts())
    shared: Array = np.diff(sample.times()) / counts
    found: Array = np.repeat(shared, counts)
    return found


def _tpot(sample: Sample) -> Array:
    """Return from the first token to the last over the tokens after the first; nothing for one token."""
    times = sample.times()
    if sample.output_tokens < 2 or len(times) < 2:
        return times[:0]
    each: Array = (times[-1:] - times[0]) / (sample.output_tokens - 1)
    return each


def _times(parts: Sequence[Array]) -> Times:
    values = np.concatenate([*parts, np.empty(0)]) * 1000
    if not len(values):
        return Times(count=0, mean=0.0, p50=0.0, p90=0.0, p99=0.0, quantiles=[])
    quantiles: list[float] = np.percentile(values, PERCENTS).tolist()
    p50, p90, p99 = (quantiles[percent] for percent in (50, 90, 99))
    mean = float(values.mean())
    return Times(count=len(values), mean=mean, p50=p50, p90=p90, p99=p99, quantiles=quantiles)


def _rates(heard: Sequence[Sample], arrivals: Sequence[Array], edges: Array) -> list[float]:
    """Return tokens a second between each two edges; nothing where nothing arrived."""
    if not heard:
        return []
    tokens = [np.diff(sample.counts(), prepend=0) for sample in heard]
    counts, _ = np.histogram(np.concatenate(arrivals), edges, weights=np.concatenate(tokens))
    rates: list[float] = (counts / np.diff(edges)).tolist()
    return rates


def _failures(failed: Sequence[Sample]) -> list[Failure]:
    """Return them by kind, the most frequent first."""
    kinds: dict[str, list[Sample]] = {}
    for sample in failed:
        kinds.setdefault(sample.failure, []).append(sample)
    found = [Failure(kind, len(those), those[0].error) for kind, those in kinds.items()]
    return sorted(found, key=lambda failure: -failure.count)


def _goodput(
    objectives: Goodput | None, done: Sequence[Sample], num_failed: int, duration_s: float
) -> Goodput | None:
    if objectives is None:
        return None
    num_good = sum(_is_good(sample, objectives) for sample in done)
    return Goodput(
        ttft_ms=objectives.ttft_ms,
        itl_ms=objectives.itl_ms,
        e2e_ms=objectives.e2e_ms,
        share=_over(num_good, len(done) + num_failed),
        requests_per_s=_over(num_good, duration_s),
    )


def _is_good(sample: Sample, objectives: Goodput) -> bool:
    times = sample.times()
    measured = (
        (objectives.ttft_ms, times[:1]),
        (objectives.itl_ms, _tpot(sample)),
        (objectives.e2e_ms, times[-1:]),
    )
    return all(most is None or (value * 1000 <= most).all() for most, value in measured)


def _cost(
    samples: Sequence[Sample], cpu_s: Sequence[float], num_tokens: int, duration_s: float
) -> ClientCost:
    late = [max(sample.sent_s - sample.due_s, 0.0) * 1000 for sample in samples]
    return ClientCost(
        num_processes=len(cpu_s),
        cpu_us_per_token=_over(sum(cpu_s) * 1e6, num_tokens),
        busiest_share=_over(max(cpu_s, default=0.0), duration_s),
        late_p99_ms=float(np.percentile(late, 99)) if late else 0.0,
    )


def _over(value: float, divisor: float) -> float:
    return value / divisor if divisor else 0.0
