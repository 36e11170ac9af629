"""Prometheus metrics of the edge. Each app has its own registry."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client import Histogram as PrometheusHistogram

from tandem.telemetry.histogram import Histogram

# `_created` series would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]

# From a short cached prompt on a GPU (10 ms) to a long queue on a CPU.
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Finest in the range of common latency targets, 10 to 100 ms. A replay causes a gap of seconds.
_ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
)
# Maximum number of keys with their own series per process. Further keys share one series.
MAX_KEYS = 100
OTHER_KEYS = "other"
_LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class _BatchHistogram(PrometheusHistogram):
    """A histogram that accepts many values in one call."""

    def observe_all(self, counts: list[int], total: float) -> None:
        """Add the number of values in each bucket, and the sum of all values."""
        # Calling `observe` for each value would cost 2 µs.
        self._sum.inc(total)
        for bucket, num in zip(self._buckets, counts, strict=True):
            if num:
                bucket.inc(num)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """Metrics of one model. Its histograms hold the values in seconds since the last `flush`.

    Attributes:
        gaps: Times between tokens.
    """

    running: Gauge
    prompt_tokens: Counter
    output_tokens: Counter
    time_to_first_token: Histogram
    duration: Histogram
    gaps: Histogram


class FrontendMetrics:
    """Metrics of one app."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        histogram = partial(_BatchHistogram, registry=registry)
        # As in vLLM and SGLang. The values are the names in answers, which operators choose.
        by_model = ["model_name"]
        # `labels` takes several times as long as `inc`, so its results are kept.
        self.requests = cache(
            counter(
                "tandem_http_requests",
                "HTTP requests answered, by route and status; 499: the client disconnected.",
                ["route", "status"],
            ).labels
        )
        self._running = Gauge(
            "tandem_edge_generations_running",
            "Generations in progress at the edge, including queued ones.",
            by_model,
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._prompt_tokens = counter(
            "tandem_edge_prompt_tokens",
            "Prompt tokens of generations that produced a token; rejected requests are not counted.",
            by_model,
        )
        self._output_tokens = counter(
            "tandem_edge_output_tokens",
            "Tokens of finished generations, including those whose client disconnected.",
            by_model,
        )
        self._time_to_first_token = histogram(
            "tandem_edge_time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token, including queueing.",
            by_model,
            buckets=_TTFT_BUCKETS_S,
        )
        self._duration = histogram(
            "tandem_edge_generation_seconds",
            "Seconds from a request's arrival to its last token.",
            by_model,
            buckets=_E2E_BUCKETS_S,
        )
        self.loop_lag = histogram(
            "tandem_edge_loop_lag_seconds",
            "Seconds by which a timer of this process fired late: the extra delay of every token.",
            buckets=_LAG_BUCKETS_S,
        )
        self._inter_token = histogram(
            "tandem_edge_inter_token_latency_seconds",
            "Seconds between two tokens of a generation; tokens that arrive together share the gap equally.",
            by_model,
            buckets=_ITL_BUCKETS_S,
        )
        self._key_generations = counter(
            "tandem_edge_key_generations",
            "Generations by API key and outcome: finished, failed or cancelled.",
            ["key", "outcome"],
        )
        self._key_tokens = counter(
            "tandem_edge_key_tokens",
            "Tokens of generations by API key and kind: prompt or output.",
            ["key", "kind"],
        )
        self._keys = set[str]()
        self._models: dict[str, ModelMetrics] = {}
        self._flushed: list[tuple[Histogram, _BatchHistogram]] = []

    def of(self, model: str) -> ModelMetrics:
        """Return the metrics of a model by its name."""
        if model not in self._models:
            self._models[model] = ModelMetrics(
                self._running.labels(model),
                self._prompt_tokens.labels(model),
                self._output_tokens.labels(model),
                self._flushed_into(self._time_to_first_token.labels(model), _TTFT_BUCKETS_S),
                self._flushed_into(self._duration.labels(model), _E2E_BUCKETS_S),
                self._flushed_into(self._inter_token.labels(model), _ITL_BUCKETS_S),
            )
        return self._models[model]

    def _flushed_into(self, registered: _BatchHistogram, bounds: Sequence[float]) -> Histogram:
        values = Histogram(bounds)
        self._flushed.append((values, registered))
        return values

    def count_generation_of(self, client: str, outcome: str) -> None:
        """Count an ended generation of a key by its name. Does nothing on a server without keys."""
        if client:
            self._key_generations.labels(self._label_of(client), outcome).inc()

    def count_tokens_of(self, client: str, kind: Literal["prompt", "output"], number: int) -> None:
        """Count tokens of a key by its name. Does nothing on a server without keys."""
        if client:
            self._key_tokens.labels(self._label_of(client), kind).inc(number)

    def _label_of(self, client: str) -> str:
        if len(self._keys) < MAX_KEYS:
            self._keys.add(client)
        return client if client in self._keys else OTHER_KEYS

    def flush(self) -> None:
        """Move the values recorded since the last call into the registry, which the processes of a pool share."""
        for values, registered in self._flushed:
            spread = values.take()
            registered.observe_all(spread.counts, spread.total)

    def render(self) -> str:
        """Return all metrics in Prometheus' text format."""
        self.flush()
        return generate_latest(self._registry).decode()
