"""One edge worker's view of the cluster, looked at once a second and made into an `Overview`.

Requests pay nothing for it but what they count anyway: rates are found by comparing one look with earlier ones.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
from typing_extensions import override

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
    shared_pushes,
)
from tandem.router.policy import Pair
from tandem.router.request import PairUse
from tandem.telemetry.log import get_logger
from tandem.telemetry.version import package_version
from tandem.wire.messages import NodeLoad

log = get_logger(__name__)

LOOK_INTERVAL_S = 1.0
# Long enough that a node's loads, five a second, are smooth; short enough to see a burst end.
RATE_SPAN_S = 5.0
# However many ask: four documents a second.
KEEP_S = 0.25
REQUESTS = "requests"

Values = tuple[float, ...]


class Counters:
    """The last `span_s` of rows of counters that only rise, each under a key: how fast they rise. No clock.

    A counter that falls began anew with its process: what was seen of the row before is forgotten.
    """

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._rows: dict[str, deque[tuple[float, Values]]] = {}

    @override
    def __repr__(self) -> str:
        return f"<Counters of {len(self._rows)} over {self._span_s:g} s>"

    def note(self, key: str, now: float, values: Sequence[float]) -> None:
        """Note a row as it is at `now`, which never falls. All rows of one key are of one length."""
        row, seen = self._rows.setdefault(key, deque()), tuple(values)
        if row and any(new < old for new, old in zip(seen, row[-1][1], strict=True)):
            row.clear()
        row.append((now, seen))
        # One at the beginning of the span, or before it, stays: the difference is to that.
        while len(row) > 1 and row[1][0] <= now - self._span_s:
            row.popleft()

    def keep(self, keys: Collection[str]) -> None:
        """Forget the rows of all other keys."""
        for key in self._rows.keys() - set(keys):
            del self._rows[key]

    def per_second(self, key: str) -> Values:
        """Return how fast each counter of a row rises; nothing of an unknown one."""
        if not (row := self._rows.get(key)):
            return ()
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
        self._cluster, self._backend = cluster, backend
        self._clock = clock
        self._nodes, self._pairs = Counters(RATE_SPAN_S), Counters(RATE_SPAN_S)
        self._requests = Counters(RATE_SPAN_S)
        self._recent: deque[tuple[float, object]] = deque(maxlen=NUM_SHOWN)
        self._tiers: dict[tuple[str, str], str] = {}
        self._made_at, self._made = -KEEP_S, self._make()

    @override
    def __repr__(self) -> str:
        return f"<Observer of {self._cluster!r}>"

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
        now, counts = self._clock(), self._backend.counts()
        self._note_nodes(now)
        self._backend.pairs.forget({node.url for node in self._cluster.roster})
        for pair, use in self._backend.pairs.uses.items():
            self._pairs.note(_key(pair), now, [use.num_tokens])
        self._pairs.keep({_key(pair) for pair in self._backend.pairs.uses})
        ended = counts.num_finished + counts.num_failed + counts.num_cancelled
        self._requests.note(REQUESTS, now, [ended])

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
        pairs = [self._pair_view(pair, use) for pair, use in backend.pairs.uses.items()]
        decodes = [node.rates for node in nodes if node.role == "decode"]
        [ended] = self._requests.per_second(REQUESTS) or (0.0,)
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
            pairs=shared_pushes(pairs, nodes),
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
        rates = self._nodes.per_second(node.url)
        return NodeView(
            id=node_id(node.url),
            url=node.url,
            role=node.role,
            state=node.state,
            reason=node.shown_reason,
            zone=node.zone,
            load=_load(node) or NodeLoad(),
            rates=NodeRates(**dict(zip(NodeRates.__struct_fields__, rates, strict=False))),
            in_flight_requests=node.in_flight_requests,
        )

    def _pair_view(self, pair: Pair, use: PairUse) -> PairView:
        [tokens_per_s] = self._pairs.per_second(_key(pair)) or (0.0,)
        return PairView(
            prefill=pair.prefill,
            decode=pair.decode,
            num_running=use.num_running,
            num_started=use.num_started,
            prompt_tokens_per_s=tokens_per_s,
        )

    def _note_nodes(self, now: float) -> None:
        heard = set[str]()
        for node in self._cluster.roster:
            # Zeros of a node that is yet to report would make all it ever counted the work of one second.
            if (load := _load(node)) is not None:
                heard.add(node.url)
                values = [getattr(load, name) for name in NodeRates.__struct_fields__]
                self._nodes.note(node.url, now, values)
                self._log_tiers(node.url, load)
        self._nodes.keep(heard)

    def _log_tiers(self, url: str, load: NodeLoad) -> None:
        """Log what became of a node's tiers. One that is up when it is first seen is no news."""
        for tier in load.tiers:
            if tier.state != self._tiers.get((url, tier.name), "up"):
                tell = log.info if tier.state == "up" else log.warning
                tell("node.tier", url=url, tier=tier.name, state=tier.state)
            self._tiers[url, tier.name] = tier.state


def _load(node: Node) -> NodeLoad | None:
    """Return what a node last reported; None before it reported anything over its link."""
    client = node.client
    return client.load if client is not None and client.answered.is_set() else None


def _with_end(ended_unix_s: float, report: object) -> dict[str, Any]:
    return {**msgspec.to_builtins(report), "ended_unix_s": ended_unix_s}


def _key(pair: Pair) -> str:
    return msgspec.json.encode([pair.prefill, pair.decode]).decode()
