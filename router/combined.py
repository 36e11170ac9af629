"""One answer for the whole router, whichever of its edge workers was asked.

```
 client ─▶ any worker ─▶ its own answer ─┬─▶ merged
   the others' status, asked through the parent (`control.py`) ─┘
```

A worker that does not answer in time is named in `silent_workers`. prometheus_client adds up what all workers
counted, dead ones included.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from tandem.frontend.edge import Edge
from tandem.frontend.middleware import json_response
from tandem.frontend.response_store import Wanted
from tandem.frontend.routes import ABORTED
from tandem.router.cluster import Cluster
from tandem.router.console import Observer
from tandem.router.control import Asked, Link
from tandem.router.metrics import render_pool
from tandem.router.nodes_api import NODES_ROUTE
from tandem.wire.errors import NoNodeAvailable

ABORT_ROUTE, METRICS_ROUTE = "/abort_request", "/metrics"
INFO_ROUTES = frozenset({"/server_info", "/get_server_info"})

Answer = dict[str, Any]


class _Abort(msgspec.Struct, frozen=True):
    """A body of `/abort_request` that the asked worker has checked."""

    rid: str = ""
    abort_all: bool = False


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker at one moment.

    Attributes:
        is_serving: It has met a prefill and a decode that can serve.
        num_streams: Generations running now.
        in_flight: Requests and prompt tokens that it runs at each node, by URL.
    """

    index: int
    pid: int
    is_serving: bool
    num_streams: int
    in_flight: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """What one of several workers replies to the others, and how it answers for all of them."""

    index: int
    link: Link
    edge: Edge
    cluster: Cluster
    observer: Observer
    metrics_directory: str

    def replies(self) -> Asked:
        """Return what answers the questions of other workers."""
        return {
            "abort": self._abort,
            "overview": self._overview,
            "response": self._response,
            "status": self._status,
        }

    async def _abort(self, body: msgspec.Raw) -> object:
        wanted, edge = msgspec.json.decode(body, type=_Abort), self.edge
        return await edge.abort_all() if wanted.abort_all else await edge.abort(wanted.rid)

    async def _response(self, body: msgspec.Raw) -> msgspec.Raw:
        entry = self.edge.responses.own(msgspec.json.decode(body, type=Wanted))
        return msgspec.Raw(entry or b"null")

    async def response_elsewhere(self, wanted: Wanted) -> bytes | None:
        """Return a stored response that another worker keeps.

        Raises:
            NoNodeAvailable: A worker that may keep it did not answer.
        """
        answers = await self.link.ask_others("response", wanted)
        found = [bytes(each) for each in answers.given if bytes(each) != b"null"]
        if not found and answers.silent:
            raise NoNodeAvailable(
                "an edge worker that may keep the response does not answer; retry"
            )
        return next(iter(found), None)

    async def _overview(self, _body: msgspec.Raw) -> object:
        return self.observer.overview()

    async def _status(self, _body: msgspec.Raw) -> WorkerStatus:
        return WorkerStatus(
            index=self.index,
            pid=os.getpid(),
            is_serving=self.cluster.is_serving,
            num_streams=self.cluster.num_streams,
            in_flight={
                node.url: (node.in_flight_requests, node.in_flight_tokens)
                for node in self.cluster.roster
            },
        )

    def middleware(self) -> Middleware:
        """Return the middleware that answers for all workers. It goes behind those that reject."""

        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            own, path = await handler(request), request.path
            if path == ABORT_ROUTE:
                return await self._abort_everywhere(own, request)
            is_listing = path == NODES_ROUTE and request.method == "GET"
            if not is_listing and path != METRICS_ROUTE and path not in INFO_ROUTES:
                return own
            answers = await self.link.ask_others("status")
            others = [msgspec.json.decode(each, type=WorkerStatus) for each in answers.given]
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
        asked = request[ABORTED]  # not its raw body, which may be of any size
        others = await self.link.ask_others("abort", _Abort(asked.rid, asked.abort_all))
        aborted = _read(own)["aborted"] or any(map(msgspec.json.decode, others.given))
        return json_response({"aborted": aborted, **_silence(others.silent)})

    def _metrics(self, workers: Sequence[WorkerStatus]) -> web.Response:
        pids = {f"edge-{one.index}": one.pid for one in workers}
        text = render_pool(
            self.metrics_directory,
            {one.index: one.num_streams for one in workers},
            {"parent": os.getppid(), **pids},
        )
        return web.Response(text=text, content_type="text/plain", charset="utf-8")


def with_others(own: Answer, others: Sequence[WorkerStatus], silent: Sequence[int]) -> Answer:
    """Return one worker's view of the nodes, with what all workers run there."""
    nodes = [dict(node) for node in own["nodes"]]
    for node in nodes:
        for other in others:
            num_requests, num_tokens = other.in_flight.get(node["url"], (0, 0))
            node["in_flight_requests"] += num_requests
            node["in_flight_tokens"] += num_tokens
    return {**own, "nodes": nodes, **_silence(silent)}


def _shown(worker: WorkerStatus) -> Answer:
    shown = msgspec.structs.asdict(worker)
    del shown["in_flight"]  # it is part of the nodes
    return shown


def _silence(silent: Sequence[int]) -> Answer:
    return {"silent_workers": silent} if silent else {}


def _read(own: web.StreamResponse) -> Answer:
    assert isinstance(own, web.Response)
    assert isinstance(own.body, bytes)
    return msgspec.json.decode(own.body, type=Answer)
