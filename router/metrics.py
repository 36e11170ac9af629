"""What one edge worker counts of its requests and nodes, for Prometheus: each metric is declared here, once."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from typing_extensions import override

from tandem.router.overview import Totals
from tandem.router.policy import ClusterSnapshot
from tandem.telemetry.process_metrics import BuildCollector, ProcessesCollector
from tandem.wire.errors import TandemError

# From the time it takes to find a place to the time after which common proxies give an answer up.
WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# From a tenth of the 1 ms that pairing may take to ten times it.
PAIRING_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01)


GaugeMode = Literal["livesum", "livemostrecent"]


@dataclass(frozen=True, slots=True)
class Counts:
    """What one edge worker counts: requests now, and since it began."""

    num_in_flight: int
    num_queued: int
    totals: Totals


class RouterMetrics:
    """Counters in a registry of their own, so that two routers in one process do not share any.

    With several edge workers prometheus_client's multiprocess mode adds them up (`render_pool`).
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str, mode: GaugeMode = "livesum") -> Gauge:
            return Gauge(name, text, labels, registry=registry, multiprocess_mode=mode)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, registry=registry, buckets=buckets)

        self.requests = counter(
            "tandem_router_requests",
            "Requests by how they ended: finished, failed or cancelled.",
            "outcome",
        )
        self.in_flight = gauge("tandem_router_requests_in_flight", "Requests now running.")
        self.replays = counter(
            "tandem_router_replays",
            "Attempts after the first, by the error that ended the one before.",
            "error",
        )
        self.local_prompts = counter(
            "tandem_router_local_prompts",
            "Attempts whose prompt decode computes by itself, by why: little_to_compute or no_prefill.",
            "reason",
        )
        # Of these two the edge worker that is asked reports what it sees.
        self._nodes_up = gauge(
            "tandem_router_nodes_up", "Nodes that may be used.", "role", mode="livemostrecent"
        )
        self._nodes_known = gauge(
            "tandem_router_nodes_known",
            "Nodes that are members, those that cannot be used now included.",
            "role",
            mode="livemostrecent",
        )
        self.pairing = histogram(
            "tandem_router_pairing_seconds", "Seconds that choosing a pair took.", PAIRING_BUCKETS_S
        )
        self._found = counter(
            "tandem_router_prompt_tokens",
            "Prompt tokens given to nodes, by where the one that computes them was thought to find them: "
            "device, a tier by its name, or nowhere.",
            "found",
        )
        self._tier_blocks = gauge(
            "tandem_router_tier_blocks",
            "Blocks of 128 tokens known to be in the tiers of nodes; those of a shared store count once.",
            "tier",
            mode="livemostrecent",
        )
        self.queued = gauge("tandem_router_queued_requests", "Requests that wait for room.")
        self.queue_wait = histogram(
            "tandem_router_queue_wait_seconds",
            "Seconds that requests waited for room before they started.",
            WAIT_BUCKETS_S,
        )
        self.refused = counter(
            "tandem_router_refused", "Requests that were not started, by why.", "reason"
        )
        registry.register(ProcessesCollector(lambda: {"edge-0": os.getpid()}))
        registry.register(BuildCollector())
        self._found_at: dict[str, Counter] = {}
        self._tiers = set[str]()

    @contextmanager
    def rejections(self) -> Iterator[None]:
        """Count a request that is not started because of an error."""
        try:
            yield
        except TandemError as error:
            self.refused.labels(error.code).inc()
            raise

    def given(self, num_tokens: int, found: Mapping[str, int]) -> None:
        """Count a prompt that a node is given, and how many of its tokens are thought to be where."""
        for place, count in found.items():
            if count:
                self._counter_of(place).inc(count)
        self._counter_of("nowhere").inc(num_tokens - sum(found.values()))

    def _counter_of(self, place: str) -> Counter:
        # Finding it by its label takes several times as long as counting.
        if place not in self._found_at:
            self._found_at[place] = self._found.labels(place)
        return self._found_at[place]

    def counts(self) -> Counts:
        """Return what this process counted."""
        ended = _by_label(self.requests)
        return Counts(
            num_in_flight=sum(_by_label(self.in_flight).values()),
            num_queued=sum(_by_label(self.queued).values()),
            totals=Totals(
                num_finished=ended.get("finished", 0),
                num_failed=ended.get("failed", 0),
                num_cancelled=ended.get("cancelled", 0),
                num_replays=sum(_by_label(self.replays).values()),
                num_refused=sum(_by_label(self.refused).values()),
            ),
        )

    def render(self, snapshot: ClusterSnapshot, tier_blocks: Mapping[str, int]) -> str:
        """Return everything in Prometheus' text format.

        Args:
            tier_blocks: See `Cluster.tier_blocks`.
        """
        self._tiers |= tier_blocks.keys()
        for tier in self._tiers:
            self._tier_blocks.labels(tier).set(tier_blocks.get(tier, 0))
        for role, nodes in (("prefill", snapshot.prefills), ("decode", snapshot.decodes)):
            self._nodes_up.labels(role).set(sum(node.is_up for node in nodes))
            self._nodes_known.labels(role).set(len(nodes))
        return generate_latest(self._registry).decode()


class _WorkersCollector(Collector):
    """Streams of each edge worker, by its index."""

    def __init__(self, num_streams: Mapping[int, int]) -> None:
        self._num_streams = num_streams

    @override
    def collect(self) -> Iterator[Metric]:
        streams = GaugeMetricFamily(
            "tandem_edge_worker_streams", "Generations of an edge worker.", labels=["worker"]
        )
        for index, count in self._num_streams.items():
            streams.add_metric([str(index)], count)
        yield streams


def render_pool(directory: str, num_streams: Mapping[int, int], pids: Mapping[str, int]) -> str:
    """Return what all edge workers of a router counted, dead ones included.

    Args:
        directory: Where prometheus_client keeps what each process counted.
        num_streams: Of each worker, by its index.
        pids: Of this router's processes, by their names.
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


def _by_label(metric: Counter | Gauge) -> dict[str, int]:
    """Return the values of a metric by that of its label, if it has one."""
    [family] = metric.collect()
    return {
        "".join(sample.labels.values()): int(sample.value)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
