"""The console: `GET /overview`, for all edge workers, and the page at `/` that draws it.

Each worker looks once a second at what is counted anyway, so that requests pay nothing for it. The page's files hold
nothing of the cluster and are open without a key. The page fetches `/overview` with the key that its user enters.
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

from tandem.frontend.middleware import json_response
from tandem.frontend.timings import Report
from tandem.router.backend import ClusterBackend
from tandem.router.cluster import Cluster
from tandem.router.config import node_id
from tandem.router.control import Link
from tandem.router.node import Node
from tandem.router.overview import (
    NUM_SHOWN,
    NodeRates,
    NodeView,
    Overview,
    PairView,
    Rates,
    after,
    latencies,
    merged,
)
from tandem.telemetry.version import package_version
from tandem.wire.errors import InvalidRequest
from tandem.wire.messages import NodeLoad

LOOK_INTERVAL_S = 1.0
# Long enough that a node's loads, five a second, are smooth; short enough to see a burst end.
RATE_SPAN_S = 5.0
# A worker makes at most four documents a second, however many ask.
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
    # Asked for each time, and answered with 304: a router that was upgraded shows its own page.
    "Cache-Control": "no-cache",
    # The page loads nothing from elsewhere, runs no script that is not a file of ours, and stands in no frame.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

Values = tuple[float, ...]
_COUNTERS = operator.attrgetter(*NodeRates.__struct_fields__)


class Observer:
    """Looks at what one edge worker has. It is a `TimingsSink` too, and keeps the requests that ended last.

    Args:
        live: Returns the timings so far of the requests that the worker answers.
        clock: Seconds that never fall.
    """

    def __init__(
        self,
        cluster: Cluster,
        backend: ClusterBackend,
        live: Callable[[], Sequence[Report]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._backend, self._live, self._clock = cluster, backend, live, clock
        # Counters that only rise, by what they are of: each row is the last seconds of one.
        self._rows: dict[object, deque[tuple[float, Values]]] = {}
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
        totals, pairs = self._backend.counts().totals, self._backend.pairing
        pairs.forget({node.url for node in self._cluster.roster})
        ended = totals.num_finished + totals.num_failed + totals.num_cancelled
        self._note(REQUESTS, (ended,))
        for pair, use in pairs.uses.items():
            self._note(pair, (use.num_tokens,))
        for node in self._cluster.roster:
            # Zeros of a node that is yet to report would make all it ever counted the work of one second.
            if (load := _load(node)) is not None:
                self._note(node.url, _COUNTERS(load))
        oldest = self._clock() - RATE_SPAN_S
        self._rows = {key: row for key, row in self._rows.items() if row[-1][0] > oldest}

    def _note(self, key: object, counters: Values) -> None:
        now, row = self._clock(), self._rows.setdefault(key, deque())
        # The one look of a row that does not rise is the last; else its counters began anew with their process.
        if row and (row[0][1] == counters or any(map(operator.lt, counters, row[-1][1]))):
            row.clear()
        row.append((now, counters))
        # One at the beginning of the span, or before it, stays: the difference is to that.
        while len(row) > 1 and row[1][0] <= now - RATE_SPAN_S:
            row.popleft()

    def _per_second(self, key: object, num_counters: int = 1) -> Values:
        """Return how fast the counters of a row rise; zeros of an unknown row."""
        row = self._rows.get(key)
        if not row or row[-1][0] == row[0][0]:
            return (0.0,) * num_counters
        (first_at, first), (last_at, last) = row[0], row[-1]
        return tuple((n - o) / (last_at - first_at) for n, o in zip(last, first, strict=True))

    def overview(self) -> Overview:
        """Return what there is to see of this worker. It may be a quarter of a second old."""
        now = self._clock()
        if now - self._made_at >= KEEP_S:
            self._made_at, self._made = now, self._make()
        return self._made

    def _make(self) -> Overview:
        health, counts = self._cluster.health(), self._backend.counts()
        model = self._cluster.last_model
        nodes = [self._node_view(node) for node in self._cluster.roster]
        decodes = [node.rates for node in nodes if node.role == "decode"]
        [ended] = self._per_second(REQUESTS)
        recent = [
            {**msgspec.to_builtins(report), "ended_unix_s": at} for at, report in self._recent
        ]
        return Overview(
            now_unix_s=time.time(),
            version=package_version(),
            is_serving=health.is_serving,
            detail=health.detail,
            model=model.name if model is not None else "",
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
            in_flight_requests=node.in_flight_requests,
        )


def _load(node: Node) -> NodeLoad | None:
    """Return what a node last reported; None before it reported anything over its link."""
    client = node.client
    return client.load if client is not None and client.answered.is_set() else None


class OverviewApi:
    """Answers `GET /overview` in one edge worker.

    Args:
        link: Asks the other workers; None where there are none.
    """

    def __init__(self, observer: Observer, link: Link | None = None) -> None:
        self._observer, self._link = observer, link

    def routes(self) -> list[web.RouteDef]:
        """Return those that clients reach."""
        return [web.get(OVERVIEW_ROUTE, self.show)]

    async def show(self, request: web.Request) -> web.Response:
        """Show the whole router; with `?after=UNIX_S` only requests that ended since then.

        Raises:
            InvalidRequest: `after` is no time.
        """
        try:
            since = float(request.query.get("after", "0"))
        except ValueError:
            raise InvalidRequest("after: must be a Unix time in seconds") from None
        shown = self._observer.overview()
        if self._link is not None:
            others = await self._link.ask_others("overview")
            given = [msgspec.json.decode(answer, type=Overview) for answer in others.given]
            shown = merged(shown, given, others.silent)
        return json_response(after(shown, since), headers={"Cache-Control": "no-store"})


class PageFiles:
    """All files of the page, and the routes they are at.

    Attributes:
        paths: Where they are: these routes need no key.
    """

    def __init__(self) -> None:
        found = sorted(file for file in PAGE.iterdir() if file.suffix in MEDIA_TYPES)
        self._files = {
            ROOT_ROUTE if file.name == INDEX else FILES_ROUTE + file.name: file for file in found
        }
        self.paths = frozenset(self._files)

    def routes(self) -> list[web.RouteDef]:
        """Return one for each file."""
        return [web.get(path, _handler(file)) for path, file in self._files.items()]


def _handler(file: Path) -> Handler:
    headers = HEADERS | {"Content-Type": f"{MEDIA_TYPES[file.suffix]}; charset=utf-8"}

    async def show(_request: web.Request) -> web.StreamResponse:
        # It has an ETag, and answers a request that names that with 304.
        return web.FileResponse(file, headers=headers)

    return show
