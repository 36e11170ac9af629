"""The console: `GET /overview` for all edge workers, and the page at `/` that shows it.

Each worker samples existing counters once a second, so that requests have no extra cost. The page's files contain no data
of the cluster and need no key. The page fetches `/overview` with the key that its user enters.
"""

import asyncio
import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from tandem import __version__
from tandem.frontend.http.keys import owner_of
from tandem.frontend.http.middleware import json_response
from tandem.frontend.timings import ReportMaker, RequestReport
from tandem.router.config import node_id
from tandem.router.console.overview import (
    NUM_SHOWN,
    NodeRates,
    NodeView,
    Overview,
    PairView,
    Rates,
    latencies,
    merged,
    restricted,
)
from tandem.router.control import WorkerLink
from tandem.router.nodes.cluster import Cluster
from tandem.router.nodes.node import Node
from tandem.router.serving.backend import ClusterBackend
from tandem.wire.errors import InvalidRequest
from tandem.wire.messages import NodeLoad

SAMPLE_INTERVAL_S = 1.0
# Long enough to smooth a node's five load reports per second, short enough to show the end of a burst.
RATE_SPAN_S = 5.0
# How long an overview is reused: a worker makes at most four per second, for any number of clients.
KEEP_S = 0.25
REQUESTS = "requests"

OVERVIEW_ROUTE = "/overview"
ROOT_ROUTE, FILES_ROUTE = "/", "/page/"
PAGE, INDEX = Path(__file__).parent / "page", "index.html"
MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Browsers revalidate the files, usually with 304, so that an upgraded router shows its new page.
    "Cache-Control": "no-cache",
    # The page loads nothing from other hosts, runs only scripts from its own files, and cannot be framed.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

Values = tuple[float, ...]
_COUNTERS = operator.attrgetter(*NodeRates.__struct_fields__)


class RequestObserver:
    """Samples the counters of one edge worker. As a `TimingsSink`, it also keeps the requests that ended last.

    Args:
        live: Returns the timings so far of the running requests.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        backend: ClusterBackend,
        live: Callable[[], Sequence[RequestReport]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._backend, self._live, self._clock = cluster, backend, live, clock
        # Samples of the last seconds of each set of counters, by its key. Counters only rise.
        self._rows: dict[object, deque[tuple[float, Values]]] = {}
        self._recent: deque[tuple[float, ReportMaker]] = deque(maxlen=NUM_SHOWN)
        self._made_at, self._made = -KEEP_S, self._make()

    async def run(self) -> None:
        """Sample once a second, until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    def request_ended(self, report: ReportMaker) -> None:
        """Keep the timings of a request, whose report is made when the overview is."""
        self._recent.append((time.time(), report))

    def sample(self) -> None:
        """Sample all counters."""
        totals, pairs = self._backend.counts().totals, self._backend.pairing
        pairs.forget({node.url for node in self._cluster.roster})
        ended = totals.num_finished + totals.num_failed + totals.num_cancelled
        self._append(REQUESTS, (ended,))
        for pair, use in pairs.uses.items():
            self._append(pair, (use.num_tokens,))
        for node in self._cluster.roster:
            # Zeros of a node that has not reported would make its whole history look like the work of one second.
            if (load := _load(node)) is not None:
                self._append(node.url, _COUNTERS(load))
        oldest = self._clock() - RATE_SPAN_S
        self._rows = {key: row for key, row in self._rows.items() if row[-1][0] > oldest}

    def _append(self, key: object, counters: Values) -> None:
        now, row = self._clock(), self._rows.setdefault(key, deque())
        # Restart the row if nothing rose since its first sample, or if a counter fell (its process restarted).
        if row and (row[0][1] == counters or any(map(operator.lt, counters, row[-1][1]))):
            row.clear()
        row.append((now, counters))
        # Keep one sample from the start of the span or before it: rates are differences to that sample.
        while len(row) > 1 and row[1][0] <= now - RATE_SPAN_S:
            row.popleft()

    def _per_second(self, key: object, num_counters: int = 1) -> Values:
        """Return the rates of the counters of a row; zeros for an unknown row."""
        row = self._rows.get(key)
        if not row or row[-1][0] == row[0][0]:
            return (0.0,) * num_counters
        (first_at, first), (last_at, last) = row[0], row[-1]
        return tuple((n - o) / (last_at - first_at) for n, o in zip(last, first, strict=True))

    def overview(self) -> Overview:
        """Return the overview of this worker, which may be `KEEP_S` old."""
        now = self._clock()
        if now - self._made_at >= KEEP_S:
            self._made_at, self._made = now, self._make()
        return self._made

    def _make(self) -> Overview:
        health, counts = self._cluster.health(), self._backend.counts()
        models = [each.last_model for each in self._cluster.fleets if each.last_model is not None]
        nodes = [self._node_view(node) for node in self._cluster.roster]
        decodes = [node.rates for node in nodes if node.role == "decode"]
        [ended] = self._per_second(REQUESTS)
        recent = [
            {**msgspec.to_builtins(report()), "ended_unix_s": at} for at, report in self._recent
        ]
        return Overview(
            now_unix_s=time.time(),
            version=__version__,
            is_serving=health.is_serving,
            detail=health.detail,
            model=models[0].name if models else "",
            other_models=[model.name for model in models[1:]],
            num_in_flight=counts.num_in_flight,
            num_queued=counts.num_queued,
            nodes=nodes,
            pairs=[
                PairView(
                    prefill=pair.prefill,
                    decode=pair.decode,
                    num_running=use.num_running,
                    num_started=use.num_started,
                    prompt_tokens_per_s=self._per_second(pair)[0],
                )
                for pair, use in self._backend.pairing.uses.items()
            ],
            totals=counts.totals,
            rates=Rates(
                requests=ended,
                prompt_tokens=sum(rates.prompt_tokens for rates in decodes),
                generated_tokens=sum(rates.generated_tokens for rates in decodes),
                pushed_bytes=sum(node.rates.pushed_bytes for node in nodes),
            ),
            latencies=latencies(recent),
            live=[msgspec.to_builtins(report) for report in self._live()],
            recent=recent,
        )

    def _node_view(self, node: Node) -> NodeView:
        names = NodeRates.__struct_fields__
        rates = self._per_second(node.url, len(names))
        return NodeView(
            id=node_id(node.url),
            url=node.url,
            role=node.role,
            state=node.state,
            reason=node.shown_reason,
            zone=node.zone,
            load=_load(node) or NodeLoad(),
            rates=NodeRates(**dict(zip(names, rates, strict=True))),
            in_flight_requests=node.entry.in_flight_requests,
        )


def _load(node: Node) -> NodeLoad | None:
    """Return the last load report of a node; None before the first over its link."""
    client = node.client
    return client.load if client is not None and client.answered.is_set() else None


class OverviewApi:
    """Answers `GET /overview` in one edge worker.

    Args:
        link: Link to the parent, for the other workers' overviews; None for a single worker.
    """

    def __init__(self, observer: RequestObserver, link: WorkerLink | None = None) -> None:
        self._observer, self._link = observer, link

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get(OVERVIEW_ROUTE, self.show)]

    async def show(self, request: web.Request) -> web.Response:
        """Return the overview of the whole router. Clients get the requests of their own key, operators all.

        With `?after=UNIX_S`, requests that ended before that time are omitted.

        Raises:
            InvalidRequest: `after` is not a number.
        """
        try:
            since = float(request.query.get("after", "0"))
        except ValueError:
            raise InvalidRequest("after: must be a Unix time in seconds") from None
        overview = self._observer.overview()
        if self._link is not None:
            replies = await self._link.ask_others("overview")
            others = [msgspec.json.decode(reply, type=Overview) for reply in replies.bodies]
            overview = merged(overview, others, replies.silent)
        shown = restricted(overview, owner_of(request), since)
        return json_response(shown, headers={"Cache-Control": "no-store"})


class PageFiles:
    """The files of the page and their routes.

    Attributes:
        paths: Paths of the routes, which need no key.
    """

    def __init__(self) -> None:
        found = sorted(file for file in PAGE.iterdir() if file.suffix in MEDIA_TYPES)
        self._files = {
            ROOT_ROUTE if file.name == INDEX else FILES_ROUTE + file.name: file for file in found
        }
        self.paths = frozenset(self._files)

    def routes(self) -> list[web.RouteDef]:
        """Return one route for each file."""
        return [web.get(path, _handler(file)) for path, file in self._files.items()]


def _handler(file: Path) -> Handler:
    headers = HEADERS | {"Content-Type": f"{MEDIA_TYPES[file.suffix]}; charset=utf-8"}

    async def show(_request: web.Request) -> web.StreamResponse:
        # The response has an ETag; a request with this ETag gets 304.
        return web.FileResponse(file, headers=headers)

    return show
