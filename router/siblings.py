"""One answer for the whole router, whichever of its edge workers was asked.

```
 client ─▶ any worker ─▶ its own answer ─┬─▶ merged
                            siblings' ───┘   each over its unix socket, at most `TIMEOUT_S`
```

`/metrics` needs no sibling: prometheus_client adds up what all workers, dead ones included, counted in
the files of the pool. A worker that does not answer in time is named in `silent_workers`.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from typing_extensions import override

from tandem.frontend import routes
from tandem.frontend.edge import EDGE, Edge
from tandem.frontend.middleware import answer_errors, json_response
from tandem.router.nodes_api import IS_NEWS, NODES_ROUTE, NodesApi
from tandem.router.overview_api import OVERVIEW_ROUTE, OverviewApi
from tandem.router.pool import Pool, Row
from tandem.telemetry.process_metrics import BuildCollector, ProcessesCollector

# A worker that serves answers in milliseconds; a person who asks would rather know of a stuck one.
TIMEOUT_S = 0.5
ABORT_ROUTE = "/abort_request"
INFO_ROUTES = frozenset({"/server_info", "/get_server_info"})
REFRESH_ROUTE = "/nodes/refresh"
METRICS_ROUTE = "/metrics"

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answers:
    """What the siblings said.

    Attributes:
        given: Of those that answered.
        silent: The indices of the others.
    """

    given: Sequence[Answer]
    silent: Sequence[int]


class Siblings:
    """The other workers of this worker's router."""

    def __init__(self, pool: Pool, index: int) -> None:
        self._pool, self.index = pool, index
        self._sessions: dict[int, aiohttp.ClientSession] = {}

    @asynccontextmanager
    async def reachable(
        self, edge: Edge, nodes: NodesApi | None = None, overview: OverviewApi | None = None
    ) -> AsyncIterator[None]:
        """Answer siblings for all of these, and have links to them, inside the block."""
        app = web.Application(middlewares=[answer_errors])
        app[EDGE] = edge
        app.router.add_post(ABORT_ROUTE, routes.abort_for_sibling)
        app.router.add_get(min(INFO_ROUTES), routes.server_info)
        if nodes is not None:
            app.router.add_get(NODES_ROUTE, nodes.show)
            app.router.add_post(REFRESH_ROUTE, nodes.refresh)
        if overview is not None:
            app.router.add_get(OVERVIEW_ROUTE, overview.show_own)
            overview.ask_siblings = partial(self.ask, "GET", OVERVIEW_ROUTE)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=TIMEOUT_S)
        async with AsyncExitStack() as stack:
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.UnixSite(runner, self._pool.socket_path(self.index)).start()
            for other in range(self._pool.num_workers):
                if other != self.index:
                    self._sessions[other] = await stack.enter_async_context(
                        _session(self._pool.socket_path(other))
                    )
            yield

    async def ask(self, method: str, path: str, body: bytes = b"") -> Answers:
        """Ask all siblings at once."""
        asked = [_ask(session, method, path, body) for session in self._sessions.values()]
        answers = dict(zip(self._sessions, await asyncio.gather(*asked), strict=True))
        return Answers(
            given=[answer for answer in answers.values() if answer is not None],
            silent=[index for index, answer in answers.items() if answer is None],
        )

    def answering(self) -> Middleware:
        """Return the middleware that answers for all workers. It goes behind those that refuse."""

        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            own = await handler(request)
            if request.path == METRICS_ROUTE:
                return self._metrics()
            if request.path == ABORT_ROUTE:
                others = await self.ask("POST", ABORT_ROUTE, await request.read())
                return json_response(merge_abort(_read(own), others))
            if IS_NEWS in request:
                others = await self.ask("POST", REFRESH_ROUTE)
                return json_response(_read(own) | _silence(others))
            if request.path == NODES_ROUTE and request.method == "GET":
                others = await self.ask("GET", NODES_ROUTE)
                return json_response(merge_info(_read(own), others))
            if request.path in INFO_ROUTES:
                others = await self.ask("GET", min(INFO_ROUTES))
                workers = {"workers": [_as_json(row) for row in self._pool.rows()]}
                return json_response(merge_info(_read(own), others) | workers)
            return own

        return answer

    def _metrics(self) -> web.Response:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, self._pool.metrics_path)  # type: ignore[no-untyped-call]
        for collector in (
            RowsCollector(self._pool),
            ProcessesCollector(self._pids),
            BuildCollector(),
        ):
            registry.register(collector)
        text = generate_latest(registry).decode()
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    def _pids(self) -> dict[str, int]:
        workers = {f"edge-{i}": row.pid for i, row in enumerate(self._pool.rows()) if row.pid}
        return {"parent": os.getppid(), **workers}


class RowsCollector(Collector):
    """The pool's rows as metrics, one series a worker."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @override
    def collect(self) -> Iterator[Metric]:
        connections = GaugeMetricFamily(
            "tandem_edge_worker_connections", "Connections of an edge worker.", labels=["worker"]
        )
        streams = GaugeMetricFamily(
            "tandem_edge_worker_streams", "Generations of an edge worker.", labels=["worker"]
        )
        for index, row in enumerate(self._pool.rows()):
            connections.add_metric([str(index)], row.num_connections)
            streams.add_metric([str(index)], row.num_streams)
        yield connections
        yield streams


def merge_abort(own: Answer, others: Answers) -> Answer:
    """Return whether any worker ended something."""
    aborted = own["aborted"] or any(answer["aborted"] for answer in others.given)
    return {"aborted": aborted, **_silence(others)}


def merge_info(own: Answer, others: Answers) -> Answer:
    """Return what one worker sees of the nodes, with what all of them run there."""
    nodes = {node["url"]: dict(node) for node in own["nodes"]}
    for answer in others.given:
        for node in answer["nodes"]:
            if node["url"] not in nodes:  # one has heard of it a moment before the other
                continue
            for name in ("in_flight_requests", "in_flight_tokens"):
                nodes[node["url"]][name] += node[name]
    return {**own, "nodes": list(nodes.values()), **_silence(others)}


def _silence(others: Answers) -> Answer:
    return {"silent_workers": list(others.silent)} if others.silent else {}


def _read(own: web.StreamResponse) -> Answer:
    assert isinstance(own, web.Response)
    assert isinstance(own.body, bytes)
    return msgspec.json.decode(own.body, type=Answer)


def _as_json(row: Row) -> Answer:
    return {
        "is_serving": row.is_open and row.is_serving,
        "num_connections": row.num_connections,
        "num_streams": row.num_streams,
    }


def _session(path: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        "http://sibling",
        connector=aiohttp.UnixConnector(path),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
    )


async def _ask(
    session: aiohttp.ClientSession, method: str, path: str, body: bytes
) -> Answer | None:
    """Return a sibling's answer; None when it gave none in time."""
    try:
        async with session.request(method, path, data=body) as response:
            answer = msgspec.json.decode(await response.read(), type=Answer)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
        return None
    return answer if response.ok else None
