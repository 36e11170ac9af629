"""What one edge worker counts of its requests and nodes, for Prometheus."""

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tandem.router.policy import ClusterSnapshot
from tandem.telemetry.process_metrics import BuildCollector, ProcessesCollector
from tandem.wire.errors import TandemError

# From what a place takes to be found to where common proxies give an answer up.
WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# From a tenth of the 1 ms that pairing may take to ten times it.
PAIRING_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01)


@dataclass(frozen=True, slots=True)
class Counts:
    """What one edge worker has counted so far.

    Attributes:
        refused: Requests that were not started, by the code of the error.
    """

    num_in_flight: int
    num_queued: int
    num_finished: int
    num_failed: int
    num_cancelled: int
    num_replays: int
    refused: Mapping[str, int]


class Outcome:
    """How one request ended, as far as it is known."""

    name = ""

    def finished(self) -> None:
        """Its last token is on the way; whoever reads it may leave now."""
        self.name = "finished"


class RouterMetrics:
    """Counters in a registry of their own, so that two routers in one process do not meet.

    With several workers prometheus_client's multiprocess mode adds them up (`siblings.py`).
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "tandem_router_requests",
            "Requests by how they ended: finished, failed or cancelled.",
            ["outcome"],
            registry=self._registry,
        )
        self._in_flight = Gauge(
            "tandem_router_requests_in_flight",
            "Requests now running.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self._replays = Counter(
            "tandem_router_replays",
            "Attempts after the first, by the error that ended the one before.",
            ["error"],
            registry=self._registry,
        )
        self._local = Counter(
            "tandem_router_local_prompts",
            "Attempts whose prompt decode computes by itself, by why: little_to_compute or no_prefill.",
            ["reason"],
            registry=self._registry,
        )
        self._nodes_up = Gauge(
            "tandem_router_nodes_up",
            "Nodes that may be used.",
            ["role"],
            registry=self._registry,
            # As the worker that is asked sees it.
            multiprocess_mode="livemostrecent",
        )
        self._nodes_known = Gauge(
            "tandem_router_nodes_known",
            "Nodes that are members, those that cannot be used now included.",
            ["role"],
            registry=self._registry,
            multiprocess_mode="livemostrecent",
        )
        self._pairing = Histogram(
            "tandem_router_pairing_seconds",
            "Seconds that choosing a pair took.",
            registry=self._registry,
            buckets=PAIRING_BUCKETS_S,
        )

        self._found = Counter(
            "tandem_router_prompt_tokens",
            "Prompt tokens given to nodes, by where the one that computes them was thought to find them: "
            "device, a tier by its name, or nowhere.",
            ["found"],
            registry=self._registry,
        )
        self._tier_blocks = Gauge(
            "tandem_router_tier_blocks",
            "Blocks of 128 tokens known to be in the tiers of nodes; those of a shared store count once.",
            ["tier"],
            registry=self._registry,
            multiprocess_mode="livemostrecent",
        )
        self._places: dict[str, Counter] = {}
        self._tiers = set[str]()
        self._queued = Gauge(
            "tandem_router_queued_requests",
            "Requests that wait for room.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self._wait = Histogram(
            "tandem_router_queue_wait_seconds",
            "Seconds that requests waited for room before they started.",
            registry=self._registry,
            buckets=WAIT_BUCKETS_S,
        )
        self._refused = Counter(
            "tandem_router_refused",
            "Requests that were not started, by why.",
            ["reason"],
            registry=self._registry,
        )
        # With several workers `siblings.py` tells of all of them in their place.
        self._registry.register(ProcessesCollector(lambda: {"edge-0": os.getpid()}))
        self._registry.register(BuildCollector())

    def queued(self, num_waiting: int) -> None:
        """Tell how many wait for room now."""
        self._queued.set(num_waiting)

    def waited(self, wait_s: float) -> None:
        """Count a request that starts, and how long it waited for room."""
        self._wait.observe(wait_s)

    def refused(self, error: TandemError) -> None:
        """Count a request that is not started."""
        self._refused.labels(error.code).inc()

    def cancelled_in_queue(self) -> None:
        """Count a request whose client left before it started."""
        self._requests.labels("cancelled").inc()

    @contextmanager
    def request(self) -> Iterator[Outcome]:
        """Count one request and how it ends: cancelled when left before it said `finished`."""
        outcome = Outcome()
        self._in_flight.inc()
        try:
            yield outcome
        except (GeneratorExit, asyncio.CancelledError):
            outcome.name = outcome.name or "cancelled"
            raise
        finally:
            self._in_flight.dec()
            self._requests.labels(outcome.name or "failed").inc()

    @contextmanager
    def pairing(self) -> Iterator[None]:
        """Time one choice of a pair."""
        with self._pairing.time():
            yield

    def given(self, num_tokens: int, found: Mapping[str, int]) -> None:
        """Count a prompt that a node is given, and how much of it is thought to be where."""
        for place, count in found.items():
            if count:
                self._place(place).inc(count)
        self._place("nowhere").inc(num_tokens - sum(found.values()))

    def _place(self, place: str) -> Counter:
        # Finding it by its label takes several times as long as counting.
        if place not in self._places:
            self._places[place] = self._found.labels(place)
        return self._places[place]

    def stayed_on_decode(self, reason: str) -> None:
        """Count an attempt whose prompt decode computes by itself."""
        self._local.labels(reason).inc()

    def replayed(self, error: TandemError) -> None:
        """Count an attempt that follows one which ended with `error`."""
        self._replays.labels(error.code).inc()

    def counts(self) -> Counts:
        """Return what this process counted."""
        ended = _by_label(self._requests)
        return Counts(
            num_in_flight=sum(_by_label(self._in_flight).values()),
            num_queued=sum(_by_label(self._queued).values()),
            num_finished=ended.get("finished", 0),
            num_failed=ended.get("failed", 0),
            num_cancelled=ended.get("cancelled", 0),
            num_replays=sum(_by_label(self._replays).values()),
            refused=_by_label(self._refused),
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


def _by_label(metric: Counter | Gauge) -> dict[str, int]:
    """Return the values of a metric by that of its label, if it has one."""
    [family] = metric.collect()
    return {
        "".join(sample.labels.values()): int(sample.value)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
