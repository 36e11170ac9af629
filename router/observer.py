"""What one edge worker sees of the cluster, looked at once a second and made into an `Overview`.

Requests pay nothing for it but what they count anyway: rates, changes of nodes and refusals are found by
comparing one look with the one before.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
from typing_extensions import override

from tandem.frontend.metrics import FrontendMetrics
from tandem.router.backend import ClusterBackend
from tandem.router.cluster import Cluster
from tandem.router.config import node_id
from tandem.router.counters import Counters
from tandem.router.events import TIER_EVENTS, TIER_UP, NodeLook, node_events
from tandem.router.node import Node
from tandem.router.nodes_api import state_of
from tandem.router.overview import (
    Histograms,
    HistogramView,
    NodeRates,
    NodeView,
    Overview,
    PairView,
    Rates,
    Totals,
    histogram,
    shared_pushes,
)
from tandem.router.policy import Pair
from tandem.telemetry.log import get_logger
from tandem.telemetry.version import package_version
from tandem.wire.messages import NodeLoad

log = get_logger(__name__)

LOOK_INTERVAL_S = 1.0
# Long enough that a node's reports, five a second, are smooth; short enough to see a burst end.
RATE_SPAN_S = 5.0
HISTOGRAM_SPAN_S = 300.0
# However many look: four documents a second.
KEEP_S = 0.25
HISTOGRAMS = {
    "ttft": "tandem_edge_time_to_first_token_seconds",
    "itl": "tandem_edge_inter_token_latency_seconds",
    "e2e": "tandem_edge_generation_seconds",
}
REQUESTS = "requests"


@dataclass(frozen=True, slots=True)
class _Made:
    at: float
    overview: Overview


class Observer:
    """Looks at what one edge worker has.

    Args:
        clock: Seconds that never fall.
    """

    def __init__(
        self,
        cluster: Cluster,
        backend: ClusterBackend,
        metrics: FrontendMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._backend, self._metrics = cluster, backend, metrics
        self._clock = clock
        self._nodes, self._pairs = Counters(RATE_SPAN_S), Counters(RATE_SPAN_S)
        self._requests, self._times = Counters(RATE_SPAN_S), Counters(HISTOGRAM_SPAN_S)
        self._bounds: dict[str, list[float]] = {}
        self._looks: dict[str, NodeLook] = {}
        self._refused: dict[str, int] = {}
        self._made: _Made | None = None

    @override
    def __repr__(self) -> str:
        return f"<Observer of {self._cluster!r}>"

    async def run(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_INTERVAL_S)

    def look(self) -> None:
        """Note all counters, and tell of what changed since the last look."""
        now = self._clock()
        self._note_nodes(now)
        self._note_pairs(now)
        self._note_refusals()
        totals = self._backend.counts()
        ended = totals.num_finished + totals.num_failed + totals.num_cancelled
        self._requests.note(REQUESTS, now, [ended])
        for key, name in HISTOGRAMS.items():
            if buckets := self._metrics.buckets(name):
                self._bounds[key] = [bound for bound, _ in buckets[:-1]]
                self._times.note(key, now, [count for _, count in buckets])

    def overview(self) -> Overview:
        """Return what there is to see of this worker. It may be a quarter of a second old."""
        now = self._clock()
        if self._made is None or now - self._made.at >= KEEP_S:
            self._made = _Made(now, self._make())
        return self._made.overview

    def _make(self) -> Overview:
        cluster, backend = self._cluster, self._backend
        health, counts = cluster.health(), backend.counts()
        nodes = [self._node_view(node) for node in cluster.roster]
        model = cluster.last_model
        decodes = [node.rates for node in nodes if node.role == "decode"]
        [ended] = self._requests.per_second(REQUESTS) or (0.0,)
        return Overview(
            now_unix_s=time.time(),
            version=package_version(),
            is_serving=health.is_serving,
            detail=health.detail,
            model=model.name if model is not None else "",
            num_in_flight=counts.num_in_flight,
            num_queued=counts.num_queued,
            nodes=nodes,
            pairs=shared_pushes(
                [self._pair_view(pair) for pair in tuple(backend.pairs.uses)], nodes
            ),
            totals=Totals(
                num_finished=counts.num_finished,
                num_failed=counts.num_failed,
                num_cancelled=counts.num_cancelled,
                num_replays=counts.num_replays,
                num_refused=sum(counts.refused.values()),
            ),
            rates=Rates(
                requests=ended,
                prompt_tokens=sum(rates.prompt_tokens for rates in decodes),
                generated_tokens=sum(rates.generated_tokens for rates in decodes),
                pushed_bytes=sum(node.rates.pushed_bytes for node in nodes),
            ),
            histogram_span_s=HISTOGRAM_SPAN_S,
            histograms=Histograms(
                ttft=self._histogram("ttft"),
                itl=self._histogram("itl"),
                e2e=self._histogram("e2e"),
            ),
            recent=backend.recent.all(),
            events=backend.events.all(),
        )

    def _node_view(self, node: Node) -> NodeView:
        rates = self._nodes.per_second(node.url)
        return NodeView(
            id=node_id(node.url),
            url=node.url,
            role=node.role,
            state=state_of(node),
            reason=node.shown_reason,
            zone=node.zone,
            load=_load(node) or NodeLoad(),
            rates=NodeRates(**dict(zip(NodeRates.__struct_fields__, rates, strict=False))),
            in_flight_requests=node.in_flight_requests,
        )

    def _pair_view(self, pair: Pair) -> PairView:
        use = self._backend.pairs.uses[pair]
        [tokens_per_s] = self._pairs.per_second(_pair_key(pair)) or (0.0,)
        return PairView(
            prefill=pair.prefill,
            decode=pair.decode,
            num_running=use.num_running,
            num_started=use.num_started,
            prompt_tokens_per_s=tokens_per_s,
        )

    def _histogram(self, key: str) -> HistogramView:
        counts = self._times.grown(key)
        return histogram(self._bounds.get(key, []), [int(count) for count in counts])

    def _note_nodes(self, now: float) -> None:
        looks, heard = {}, set[str]()
        for node in self._cluster.roster:
            load, before = _load(node), self._looks.get(node.url)
            known = before.num_corrupted if before is not None else 0
            looks[node.url] = NodeLook(
                role=node.role,
                state=state_of(node),
                reason=node.shown_reason,
                epoch=node.info.epoch if node.info else 0,
                num_corrupted=load.num_corrupted if load is not None else known,
                tiers=_tier_states(load, before),
            )
            # Of one that is yet to speak, zeros would make all it ever counted the work of a second.
            if load is not None:
                heard.add(node.url)
                values = [getattr(load, name) for name in NodeRates.__struct_fields__]
                self._nodes.note(node.url, now, values)
        self._nodes.keep(heard)
        for kind, text, url in node_events(self._looks, looks):
            self._backend.events.tell(kind, text, url)
            if kind in TIER_EVENTS:
                tell = log.info if kind == TIER_UP else log.warning
                tell("node.tier", url=url, change=text)
        self._looks = looks

    def _note_pairs(self, now: float) -> None:
        pairs = self._backend.pairs
        pairs.forget(set(self._looks))
        for pair, use in pairs.uses.items():
            self._pairs.note(_pair_key(pair), now, [use.num_tokens])
        self._pairs.keep({_pair_key(pair) for pair in pairs.uses})

    def _note_refusals(self) -> None:
        refused = dict(self._backend.counts().refused)
        for code, number in refused.items():
            new = number - self._refused.get(code, 0)
            if new:
                text = f"not started: {code.replace('_', ' ')}"
                self._backend.events.tell("refused", text, count=new)
        self._refused = refused


def _load(node: Node) -> NodeLoad | None:
    """Return what a node last said of itself; None before it said anything on its link."""
    client = node.client
    return client.load if client is not None and client.answered.is_set() else None


def _tier_states(load: NodeLoad | None, before: NodeLook | None) -> Mapping[str, str]:
    """Return how a node's tiers are; of one that is silent, as they were."""
    if load is None:
        return before.tiers if before is not None else {}
    return {tier.name: tier.state for tier in load.tiers}


def _pair_key(pair: Pair) -> str:
    return msgspec.json.encode([pair.prefill, pair.decode]).decode()
