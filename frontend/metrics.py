"""The metrics of the edge, in one registry for each app."""

from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client import Histogram as PrometheusHistogram

from tandem.telemetry.histogram import Histogram

# They would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]

# From a cached short prompt on a GPU (10 ms) to a long queue on a CPU.
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Finest where people set their goals, 10 to 100 ms; a replay is a gap of seconds.
_ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
)
_LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class _Gathered(PrometheusHistogram):
    """A histogram that takes many values at once."""

    def gather(self, counts: list[int], total: float) -> None:
        """Add the number of values in each bucket, and their sum."""
        # `observe` takes one value: that would cost 2 µs for each token.
        self._sum.inc(total)
        for bucket, num in zip(self._buckets, counts, strict=True):
            if num:
                bucket.inc(num)


class FrontendMetrics:
    """Metrics of one app.

    Attributes:
        gaps: The time between tokens, until the next `gather`.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        histogram = partial(PrometheusHistogram, registry=registry)
        self.requests = counter(
            "tandem_http_requests",
            "HTTP requests answered, by route and status; 499 is a client that left.",
            ["route", "status"],
        )
        self.running = Gauge(
            "tandem_edge_generations_running",
            "Generations the edge holds, those that wait included.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.prompt_tokens = counter(
            "tandem_edge_prompt_tokens",
            "Prompt tokens of generations that began; those of refused requests are not counted.",
        )
        self.output_tokens = counter(
            "tandem_edge_output_tokens",
            "Tokens of generations that ended, those included whose client left.",
        )
        self.time_to_first_token = histogram(
            "tandem_edge_time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token, waiting for room included.",
            buckets=_TTFT_BUCKETS_S,
        )
        self.duration = histogram(
            "tandem_edge_generation_seconds",
            "Seconds from a request's arrival to its last token.",
            buckets=_E2E_BUCKETS_S,
        )
        self.loop_lag = histogram(
            "tandem_edge_loop_lag_seconds",
            "Seconds by which a timer of this process was late: what every token waits beside its work.",
            buckets=_LAG_BUCKETS_S,
        )
        self._inter_token = _Gathered(
            "tandem_edge_inter_token_latency_seconds",
            "Seconds between two tokens of a generation; of tokens that come together each has its share.",
            buckets=_ITL_BUCKETS_S,
            registry=registry,
        )
        self.gaps = Histogram(_ITL_BUCKETS_S)

    def gather(self) -> None:
        """Add what was counted beside it to Prometheus' registry, which the processes of a pool share."""
        spread = self.gaps.take()
        self._inter_token.gather(spread.counts, spread.total)

    def render(self) -> str:
        """Return all in Prometheus' text format."""
        self.gather()
        return generate_latest(self._registry).decode()
