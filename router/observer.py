"""One edge worker's view of the cluster, looked at once a second and made into an `Overview`.

Requests pay nothing for it but what they count anyway: rates are found by comparing one look with earlier ones.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tandem.router.backend import ClusterBackend
from tandem.router.cluster import Cluster
from tandem.router.config import node_id
from tandem.router.node import Node
from tandem.router.overview import (
    NUM_SHOWN,
    NodeRates,
    NodeView,
    Overview,
    PairView,
    Rates,
    Totals,
    latencies,
)
from tandem.router.pairing import PairUse
from tandem.router.policy import Pair
from tandem.telemetry.version import package_version
from tandem.wire.messages import NodeLoad

LOOK_INTERVAL_S = 1.0
# Long enough that a node's loads, five a second, are smooth; short enough to see a burst end.
RATE_SPAN_S = 5.0
# However many ask: four documents a second.
KEEP_S = 0.25
REQUESTS = "requests"

Values = tuple[float, ...]


class Risers:
    """Rows of counters that only rise, each under a key, over the last seconds: how fast they rise. No clock."""

    def __init__(self) -> None:
        self._rows: dict[object, deque[tuple[float, Values]]] = {}

    def note(self, now: float, rows: Mapping[object, Sequence[float]]) -> None:
        """Note all rows as they are at `now`, which never falls; rows of other keys are forgotten."""
        self._rows = {key: self._rows.get(key, deque()) for key in rows}
        for key, values in rows.items():
            row, seen = self._rows[key], tuple(values)
            if row and any(new < old for new, old in zip(seen, row[-1][1], strict=True)):
                row.clear()  # the counters began anew with their process
            row.append((now, seen))
            # One at the beginning of the span, or before it, stays: the difference is to that.
            while len(row) > 1 and row[1][0] <= now - RATE_SPAN_S:
                row.popleft()

    def per_second(self, key: object, num_values: int = 1) -> Values:
        """Return how fast each counter of a row rises; zeros of an unknown row."""
        if not (row := self._rows.get(key)):
            return (0.0,) * num_values
        (first_at, first), (last_at, last) = row[0], row[-1]
        past_s = last_at - first_at
        return tuple((n - o) / past_s if past_s else 0.0 for n, o in zip(last, first, strict=True))


class Observer:
    """Looks at what one edge worker has. It is a `TimingsSink` too, and keeps the requests that ended last.

    Args:
        clock: Seconds that never fall.
    """

    def __init__(
        self,
        cluster: Cluster,
        backend: ClusterBackend,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._backend, self._clock = cluster, backend, clock
        self._risers = Risers()
        self._recent: deque[tuple[float, object]] = deque(maxlen=NUM_SHOWN)
        self._made_at, self._made = -KEEP_S, self._make()

    async def run(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_INTERVAL_S)

    def request_ended(self, report: object) -> None:
        """Keep the timings of a request, a struct or a dict that is not changed any more."""
        self._recent.append((time.time(), report))

    def look(self) -> None:
        """Note all counters."""
        counts, pairs = self._backend.counts(), self._backend.pairing
        pairs.forget({node.url for node in self._cluster.roster})
        ended = counts.num_finished + counts.num_failed + counts.num_cancelled
        rows: dict[object, Sequence[float]] = {REQUESTS: [ended]}
        rows |= {pair: [use.num_tokens] for pair, use in pairs.uses.items()}
        for node in self._cluster.roster:
            # Zeros of a node that is yet to report would make all it ever counted the work of one second.
            if (load := _load(node)) is not None:
                rows[node.url] = [getattr(load, name) for name in NodeRates.__struct_fields__]
        self._risers.note(self._clock(), rows)

    def overview(self) -> Overview:
        """Return what there is to see of this worker. It may be a quarter of a second old."""
        now = self._clock()
        if now - self._made_at >= KEEP_S:
            self._made_at, self._made = now, self._make()
        return self._made

    def _make(self) -> Overview:
        cluster, backend = self._cluster, self._backend
        health, counts, model = cluster.health(), backend.counts(), cluster.last_model
        nodes = [self._node_view(node) for node in cluster.roster]
        decodes = [node.rates for node in nodes if node.role == "decode"]
        [ended] = self._risers.per_second(REQUESTS)
        recent = [_with_end(at, report) for at, report in self._recent]
        return Overview(
            now_unix_s=time.time(),
            version=package_version(),
            is_serving=health.is_serving,
            detail=health.detail,
            model=model.name if model is not None else "",
            num_in_flight=counts.num_in_flight,
            num_queued=counts.num_queued,
            nodes=nodes,
            pairs=[self._pair_view(pair, use) for pair, use in backend.pairing.uses.items()],
            totals=Totals(**{name: getattr(counts, name) for name in Totals.__struct_fields__}),
            rates=Rates(
                requests=ended,
                prompt_tokens=sum(rates.prompt_tokens for rates in decodes),
                generated_tokens=sum(rates.generated_tokens for rates in decodes),
                pushed_bytes=sum(node.rates.pushed_bytes for node in nodes),
            ),
            latencies=latencies(recent),
            recent=recent,
        )

    def _node_view(self, node: Node) -> NodeView:
        names = NodeRates.__struct_fields__
        rates = self._risers.per_second(node.url, len(names))
        return NodeView(
            id=node_id(node.url),
            url=node.url,
            role=node.role,
            state=node.state,
            reason=node.shown_reason,
            zone=node.zone,
            load=_load(node) or NodeLoad(),
            rates=NodeRates(**dict(zip(names, rates, strict=True))),
            in_flight_requests=node.in_flight_requests,
        )

    def _pair_view(self, pair: Pair, use: PairUse) -> PairView:
        [tokens_per_s] = self._risers.per_second(pair)
        return PairView(
            prefill=pair.prefill,
            decode=pair.decode,
            num_running=use.num_running,
            num_started=use.num_started,
            prompt_tokens_per_s=tokens_per_s,
        )


def _load(node: Node) -> NodeLoad | None:
    """Return what a node last reported; None before it reported anything over its link."""
    client = node.client
    return client.load if client is not None and client.answered.is_set() else None


def _with_end(ended_unix_s: float, report: object) -> dict[str, Any]:
    return {**msgspec.to_builtins(report), "ended_unix_s": ended_unix_s}
