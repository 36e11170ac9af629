"""What one edge worker counts of its requests and nodes, for Prometheus."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.policy import ClusterSnapshot
from wire.errors import TandemError

# From what a place takes to be found to where common proxies give an answer up.
WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# From a tenth of the 1 ms that pairing may take to ten times it.
PAIRING_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01)


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
        self._pairing = Histogram(
            "tandem_router_pairing_seconds",
            "Time to choose a pair.",
            registry=self._registry,
            buckets=PAIRING_BUCKETS_S,
        )

        self._queued = Gauge(
            "tandem_router_queued_requests",
            "Requests that wait for room.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self._wait = Histogram(
            "tandem_router_queue_wait_seconds",
            "How long requests waited for room before they started.",
            registry=self._registry,
            buckets=WAIT_BUCKETS_S,
        )
        self._refused = Counter(
            "tandem_router_refused",
            "Requests that were not started, by why.",
            ["reason"],
            registry=self._registry,
        )

    def queued(self, num_waiting: int) -> None:
        """Tell how many wait for room now."""
        self._queued.set(num_waiting)

    def waited(self, wait_s: float) -> None:
        """Count a request that starts, and how long it waited for room."""
        self._wait.observe(wait_s)

    def refused(self, error: TandemError) -> None:
        """Count a request that is not started."""
        self._refused.labels(error.code).inc()

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

    def stayed_on_decode(self, reason: str) -> None:
        """Count an attempt whose prompt decode computes by itself."""
        self._local.labels(reason).inc()

    def replayed(self, error: TandemError) -> None:
        """Count an attempt that follows one which ended with `error`."""
        self._replays.labels(error.code).inc()

    def render(self, snapshot: ClusterSnapshot) -> str:
        """Return everything in Prometheus' text format."""
        for role, nodes in (("prefill", snapshot.prefills), ("decode", snapshot.decodes)):
            self._nodes_up.labels(role).set(sum(node.is_up for node in nodes))
        return generate_latest(self._registry).decode()
