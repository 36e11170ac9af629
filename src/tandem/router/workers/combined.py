"""Responses that cover all edge workers of a router, no matter which worker gets the request.

```
 client ─▶ any worker ─▶ its own response ──────────────────┬─▶ merged
   status of the others, through the parent (`control.py`) ─┘
```

`silent_workers` names the workers that do not reply in time. prometheus_client adds up the counters of all workers,
including workers that have ended.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from tandem.frontend.apis.routes import ABORT_BODY
from tandem.frontend.http.edge import Edge
from tandem.frontend.http.keys import owner_of
from tandem.frontend.http.middleware import json_response
from tandem.router.console.console import RequestObserver
from tandem.router.control import QuestionHandlers, WorkerLink
from tandem.router.metrics import render_pool
from tandem.router.nodes.api import NODES_ROUTE
from tandem.router.nodes.cluster import Cluster

ABORT_ROUTE, METRICS_ROUTE = "/abort_request", "/metrics"
INFO_ROUTES = frozenset({"/server_info", "/get_server_info"})

JsonObject = dict[str, Any]


class _Abort(msgspec.Struct, frozen=True):
    """The body of an `/abort_request`, which the receiving worker has validated, and the result of `owner_of`."""

    rid: str = ""
    abort_all: bool = False
    owner: str | None = None


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one worker at one moment.

    Attributes:
        is_serving: Whether it can use a pair of nodes.
        num_streams: Running generations.
        in_flight: Requests and prompt tokens in flight at each node, by URL.
    """

    index: int
    pid: int
    is_serving: bool
    num_streams: int
    in_flight: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """Replies to the questions of other workers, and merges their replies into this worker's responses."""

    index: int
    link: WorkerLink
    edge: Edge
    cluster: Cluster
    observer: RequestObserver
    metrics_directory: str

    def question_handlers(self) -> QuestionHandlers:
        """Return the handlers of other workers' questions."""
        return {
            "abort": self._abort,
            "overview": self._overview,
            "status": self._status,
        }

    async def _abort(self, body: msgspec.Raw) -> object:
        abort, edge = msgspec.json.decode(body, type=_Abort), self.edge
        if abort.abort_all:
            return await edge.abort_all()
        return await edge.abort(abort.rid, abort.owner)

    async def _overview(self, _body: msgspec.Raw) -> object:
        return self.observer.overview()

    async def _status(self, _body: msgspec.Raw) -> WorkerStatus:
        return WorkerStatus(
            index=self.index,
            pid=os.getpid(),
            is_serving=self.cluster.is_serving,
            num_streams=self.cluster.num_streams,
            in_flight={
                node.url: (node.entry.in_flight_requests, node.entry.in_flight_tokens)
                for node in self.cluster.roster
            },
        )

    def middleware(self) -> Middleware:
        """Return the middleware that answers for all workers. Place it behind those that reject requests."""

        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            own, path = await handler(request), request.path
            if path == ABORT_ROUTE:
                return await self._abort_everywhere(own, request)
            is_listing = path == NODES_ROUTE and request.method == "GET"
            if not is_listing and path != METRICS_ROUTE and path not in INFO_ROUTES:
                return own
            answers = await self.link.ask_others("status")
            others = [msgspec.json.decode(each, type=WorkerStatus) for each in answers.bodies]
            workers = sorted([await self._status(msgspec.Raw()), *others], key=lambda w: w.index)
            if path == METRICS_ROUTE:
                return self._metrics(workers)
            merged = with_others(_read(own), others, answers.silent)
            if not is_listing:
                merged["workers"] = [_shown(worker) for worker in workers]
            return json_response(merged)

        return answer

    async def _abort_everywhere(
        self, own: web.StreamResponse, request: web.Request
    ) -> web.StreamResponse:
        body = request[ABORT_BODY]  # not the raw body, which may have any size
        abort = _Abort(body.rid, body.abort_all, owner_of(request))
        others = await self.link.ask_others("abort", abort)
        aborted = _read(own)["aborted"] or any(map(msgspec.json.decode, others.bodies))
        return json_response({"aborted": aborted, **_silence(others.silent)})

    def _metrics(self, workers: Sequence[WorkerStatus]) -> web.Response:
        pids = {f"edge-{worker.index}": worker.pid for worker in workers}
        text = render_pool(
            self.metrics_directory,
            {worker.index: worker.num_streams for worker in workers},
            {"parent": os.getppid(), **pids},
        )
        return web.Response(text=text, content_type="text/plain", charset="utf-8")


def with_others(
    own: JsonObject, others: Sequence[WorkerStatus], silent: Sequence[int]
) -> JsonObject:
    """Return one worker's list of nodes, with the requests in flight of all workers."""
    nodes = [dict(node) for node in own["nodes"]]
    for node in nodes:
        for other in others:
            num_requests, num_tokens = other.in_flight.get(node["url"], (0, 0))
            node["in_flight_requests"] += num_requests
            node["in_flight_tokens"] += num_tokens
    return {**own, "nodes": nodes, **_silence(silent)}


def _shown(worker: WorkerStatus) -> JsonObject:
    shown = msgspec.structs.asdict(worker)
    del shown["in_flight"]  # already part of the nodes
    return shown


def _silence(silent: Sequence[int]) -> JsonObject:
    return {"silent_workers": silent} if silent else {}


def _read(own: web.StreamResponse) -> JsonObject:
    assert isinstance(own, web.Response)
    assert isinstance(own.body, bytes)
    return msgspec.json.decode(own.body, type=JsonObject)
