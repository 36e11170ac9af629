"""What a node tells of the tiers behind its prefix cache, for Prometheus. Explained in docs/metrics.md."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from tandem.telemetry.histogram import Spread
from tandem.wire.messages import TierLoad

STATES = ("up", "backing_off", "full")

# Field of `TierLoad`: name without `tandem_kv_tier_`, help.
GAUGES = {
    "num_pages": ("pages", "Pages of KV in the tier, as far as this node knows."),
    "num_bytes": ("bytes", "Bytes of KV in the tier, as far as this node knows."),
    "limit_bytes": ("limit_bytes", "Bytes that the tier may hold; 0: the store's own limit."),
}
COUNTERS = {
    "hit_tokens": ("hit_tokens", "Prompt tokens that came from the tier and were not computed."),
    "missed_tokens": ("missed_tokens", "Prompt tokens that were not in the tier."),
    "late_tokens": (
        "late_tokens",
        "Prompt tokens that were not there when a request's wait ended.",
    ),
    "put_bytes": ("put_bytes", "Bytes of KV put into the tier."),
    "got_bytes": ("got_bytes", "Bytes of KV got from the tier."),
    "num_evicted": ("evicted", "Pages that the tier gave up for others."),
    "num_corrupted": (
        "corrupted",
        "Entries that were not what had been put; they were removed, and computed anew.",
    ),
    "num_failures": ("failures", "Calls to the tier that failed or took too long."),
}
_LABELS = ["role", "tier"]


def tier_families(
    tiers: Sequence[TierLoad],
    seconds: Mapping[str, Spread],
    role: str,
    buckets: Callable[[Spread], list[tuple[str, float]]],
) -> Iterator[Metric]:
    """Yield every family; those of a node without tiers are empty.

    Args:
        seconds: How long requests waited, by the slowest tier that had something.
    """
    for field, (name, help_text) in GAUGES.items():
        gauge = GaugeMetricFamily(f"tandem_kv_tier_{name}", help_text, labels=_LABELS)
        for tier in tiers:
            gauge.add_metric([role, tier.name], getattr(tier, field))
        yield gauge
    for field, (name, help_text) in COUNTERS.items():
        counter = CounterMetricFamily(f"tandem_kv_tier_{name}", help_text, labels=_LABELS)
        for tier in tiers:
            counter.add_metric([role, tier.name], getattr(tier, field))
        yield counter
    yield _states(tiers, role)
    yield _costs(tiers, role)
    histogram = HistogramMetricFamily(
        "tandem_kv_tier_fetch_seconds",
        "Seconds that requests waited for tiers, by the slowest that had something.",
        labels=_LABELS,
    )
    for name, spread in seconds.items():
        histogram.add_metric([role, name], buckets(spread), spread.total)
    yield histogram


def _states(tiers: Sequence[TierLoad], role: str) -> Metric:
    states = GaugeMetricFamily(
        "tandem_kv_tier_state",
        "1 for the state that the tier is in, else 0.",
        labels=[*_LABELS, "state"],
    )
    for tier in tiers:
        for state in STATES:
            states.add_metric([role, tier.name, state], state == tier.state)
    return states


def _costs(tiers: Sequence[TierLoad], role: str) -> Metric:
    costs = GaugeMetricFamily(
        "tandem_kv_tier_token_cost_ratio",
        "Time to bring a token from the tier by the time to compute one.",
        labels=_LABELS,
    )
    for tier in tiers:
        if tier.token_cost >= 0:  # -1: not known yet
            costs.add_metric([role, tier.name], tier.token_cost)
    return costs
