"""Prometheus metrics of one edge worker. Every metric of the router is declared here, except those of processes."""

import collections
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from typing_extensions import override

from tandem.router.nodes.state import ClusterState
from tandem.telemetry.process_metrics import BuildCollector, ProcessesCollector
from tandem.wire.errors import TandemError

# `_created` series would double the number of series, and `counts` would add their values.
disable_created_metrics()  # type: ignore[no-untyped-call]

# From the time that admission itself takes to the timeout of common proxies.
WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# From a tenth of the budget for pairing, which is 1 ms, to ten times the budget.
PAIRING_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01)

# As in vLLM and SGLang. The values are the names in answers, which operators choose.
MODEL_LABEL = "model_name"


GaugeMode = Literal["livesum", "livemostrecent"]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Request counts since the workers started."""

    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_replays: int = 0
    num_refused: int = 0


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """Request counts of one edge worker: current, and since its start."""

    num_in_flight: int
    num_queued: int
    totals: Totals


@dataclass(frozen=True, slots=True)
class RouterModelMetrics:
    """The metrics of one model.

    Attributes:
        requests: Ended requests, by outcome.
        refused: The metric of all models: rejections are rare.
    """

    name: str
    requests: Mapping[str, Counter]
    in_flight: Gauge
    queued: Gauge
    queue_wait: Histogram
    refused: Counter

    @contextmanager
    def rejections(self) -> Iterator[None]:
        """Count an error inside the block as a rejected request, and re-raise it."""
        try:
            yield
        except TandemError as error:
            self.refused.labels(self.name, error.code).inc()
            raise


class RouterMetrics:
    """The metrics, in a separate registry, so that two routers in one process do not share counters.

    With several edge workers, prometheus_client's multiprocess mode adds them up (`render_pool`).
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str, mode: GaugeMode = "livesum") -> Gauge:
            return Gauge(name, text, labels, registry=registry, multiprocess_mode=mode)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, registry=registry, buckets=buckets)

        self._requests = counter(
            "tandem_router_requests",
            "Requests by outcome: finished, failed or cancelled.",
            MODEL_LABEL,
            "outcome",
        )
        self._in_flight = gauge(
            "tandem_router_requests_in_flight", "Requests running now.", MODEL_LABEL
        )
        self.replays = counter(
            "tandem_router_replays",
            "Attempts after the first, by the error that ended the previous attempt.",
            "error",
        )
        self.local_prompts = counter(
            "tandem_router_local_prompts",
            "Attempts whose prompt the decode node computes itself, by reason: little_to_compute, no_prefill or prefill_too_small.",
            "reason",
        )
        # The next two gauges show the view of the edge worker that answers the scrape.
        self._nodes_up = gauge(
            "tandem_router_nodes_up",
            "Nodes that can serve requests.",
            "role",
            mode="livemostrecent",
        )
        self._nodes_known = gauge(
            "tandem_router_nodes_known",
            "Member nodes, including those that cannot serve now.",
            "role",
            mode="livemostrecent",
        )
        self.pairing = histogram(
            "tandem_router_pairing_seconds", "Time to choose a pair, in seconds.", PAIRING_BUCKETS_S
        )
        self._found = counter(
            "tandem_router_prompt_tokens",
            "Prompt tokens sent to nodes, by where the router expected the computing node to find them: "
            "device, the name of a tier, or nowhere.",
            "found",
        )
        self._tier_blocks = gauge(
            "tandem_router_tier_blocks",
            "Blocks of 128 tokens known to be in the nodes' tiers; blocks in a shared store count once.",
            "tier",
            mode="livemostrecent",
        )
        self._queued = gauge(
            "tandem_router_queued_requests", "Requests in the router's queue.", MODEL_LABEL
        )
        self._queue_wait = histogram(
            "tandem_router_queue_wait_seconds",
            "Time that requests waited in the router's queue before they started, in seconds.",
            WAIT_BUCKETS_S,
            MODEL_LABEL,
        )
        self._refused = counter(
            "tandem_router_refused",
            "Requests rejected before they started, by reason.",
            MODEL_LABEL,
            "reason",
        )
        registry.register(ProcessesCollector(lambda: {"edge-0": os.getpid()}))
        registry.register(BuildCollector())
        self._found_at: dict[str, Counter] = {}
        self._models: dict[str, RouterModelMetrics] = {}
        self._tiers = set[str]()

    def of(self, model: str) -> RouterModelMetrics:
        """Return the metrics of a model by its name."""
        # `labels` takes several times as long as `inc`, so its results are kept.
        if model not in self._models:
            outcomes = ("finished", "failed", "cancelled")
            self._models[model] = RouterModelMetrics(
                model,
                {outcome: self._requests.labels(model, outcome) for outcome in outcomes},
                self._in_flight.labels(model),
                self._queued.labels(model),
                self._queue_wait.labels(model),
                self._refused,
            )
        return self._models[model]

    def count_prompt(self, num_tokens: int, found: Mapping[str, int]) -> None:
        """Count the tokens of a prompt sent to a node, by where the node is expected to find them."""
        for place, count in found.items():
            if count:
                self._counter_of(place).inc(count)
        self._counter_of("nowhere").inc(num_tokens - sum(found.values()))

    def _counter_of(self, place: str) -> Counter:
        if place not in self._found_at:
            self._found_at[place] = self._found.labels(place)
        return self._found_at[place]

    def counts(self) -> WorkerCounts:
        """Return the counts of this process."""
        ended = _by_label(self._requests, "outcome")
        return WorkerCounts(
            num_in_flight=_sum(self._in_flight),
            num_queued=_sum(self._queued),
            totals=Totals(
                num_finished=ended.get("finished", 0),
                num_failed=ended.get("failed", 0),
                num_cancelled=ended.get("cancelled", 0),
                num_replays=_sum(self.replays),
                num_refused=_sum(self._refused),
            ),
        )

    def render(self, state: ClusterState, tier_blocks: Mapping[str, int]) -> str:
        """Return all metrics in Prometheus' text format.

        Args:
            tier_blocks: See `Cluster.tier_blocks`.
        """
        self._tiers |= tier_blocks.keys()
        for tier in self._tiers:
            self._tier_blocks.labels(tier).set(tier_blocks.get(tier, 0))
        for role, nodes in (("prefill", state.prefills), ("decode", state.decodes)):
            self._nodes_up.labels(role).set(sum(node.is_up for node in nodes))
            self._nodes_known.labels(role).set(len(nodes))
        return generate_latest(self._registry).decode()


class _WorkersCollector(Collector):
    """The number of streams of each edge worker, by its index."""

    def __init__(self, num_streams: Mapping[int, int]) -> None:
        self._num_streams = num_streams

    @override
    def collect(self) -> Iterator[Metric]:
        streams = GaugeMetricFamily(
            "tandem_edge_worker_streams",
            "Running generations of an edge worker.",
            labels=["worker"],
        )
        for index, count in self._num_streams.items():
            streams.add_metric([str(index)], count)
        yield streams


def render_pool(directory: str, num_streams: Mapping[int, int], pids: Mapping[str, int]) -> str:
    """Return the metrics of all edge workers of a router, including workers that have ended.

    Args:
        directory: Directory in which prometheus_client keeps the counters of each process.
        num_streams: Running generations of each worker, by its index.
        pids: Process ids of this router, by process name.
    """
    registry = CollectorRegistry()
    MultiProcessCollector(registry, directory)  # type: ignore[no-untyped-call]
    for collector in (
        _WorkersCollector(num_streams),
        ProcessesCollector(lambda: pids),
        BuildCollector(),
    ):
        registry.register(collector)
    return generate_latest(registry).decode()


def _by_label(metric: Counter | Gauge, label: str) -> Mapping[str, int]:
    """Return the sums of a metric's values by one label."""
    sums = collections.Counter[str]()
    [family] = metric.collect()
    for sample in family.samples:
        sums[sample.labels.get(label, "")] += int(sample.value)
    return sums


def _sum(metric: Counter | Gauge) -> int:
    return sum(_by_label(metric, "").values())
