"""One answer for the whole router, whichever of its edge workers was asked.

```
 client ─▶ any worker ─▶ its own answer ─┬─▶ merged
                     the others', asked through the parent (`control.py`) ───┘
```

A worker that does not answer in time is named in `silent_workers`. prometheus_client adds up what all workers
counted, dead ones included.
"""

import os
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from tandem.frontend.edge import Edge
from tandem.frontend.middleware import json_response
from tandem.frontend.routes import ABORTED
from tandem.router.cluster import Cluster
from tandem.router.control import Answers, Asked, Link
from tandem.router.metrics import render_pool
from tandem.router.nodes_api import NODES_ROUTE, NodesApi
from tandem.router.observer import Observer

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
    """

    index: int
    pid: int
    is_serving: bool
    num_streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """What one of several workers replies to the others, and how it answers for all of them."""

    index: int
    link: Link
    edge: Edge
    cluster: Cluster
    nodes: NodesApi
    observer: Observer
    metrics_directory: str

    def replies(self) -> Asked:
        """Return what answers the questions of other workers."""
        return {
            "abort": self._abort,
            "info": self._info,
            "nodes": self._listing,
            "overview": self._overview,
            "status": self._status,
        }

    async def _abort(self, body: msgspec.Raw) -> object:
        wanted, edge = msgspec.json.decode(body, type=_Abort), self.edge
        return await edge.abort_all() if wanted.abort_all else await edge.abort(wanted.rid)

    async def _info(self, _body: msgspec.Raw) -> object:
        return self.edge.backend.server_info()

    async def _listing(self, _body: msgspec.Raw) -> object:
        return self.nodes.listing()

    async def _overview(self, _body: msgspec.Raw) -> object:
        return self.observer.overview()

    async def _status(self, _body: msgspec.Raw) -> WorkerStatus:
        return WorkerStatus(
            index=self.index,
            pid=os.getpid(),
            is_serving=self.cluster.is_serving,
            num_streams=self.cluster.num_streams,
        )

    async def statuses(self) -> list[WorkerStatus]:
        """Return the status of every worker that replies, by their indices."""
        others = await self.link.ask_others("status")
        found = [msgspec.json.decode(given, type=WorkerStatus) for given in others.given]
        return sorted([await self._status(msgspec.Raw()), *found], key=lambda one: one.index)

    def middleware(self) -> Middleware:
        """Return the middleware that answers for all workers. It goes behind those that reject."""

        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            own = await handler(request)
            if request.path == METRICS_ROUTE:
                workers = await self.statuses()
                pids = {f"edge-{one.index}": one.pid for one in workers}
                text = render_pool(
                    self.metrics_directory,
                    {one.index: one.num_streams for one in workers},
                    {"parent": os.getppid(), **pids},
                )
                return web.Response(text=text, content_type="text/plain", charset="utf-8")
            if request.path == ABORT_ROUTE:
                asked = request[ABORTED]  # not its raw body, which may be of any size
                others = await self.link.ask_others("abort", _Abort(asked.rid, asked.abort_all))
                return json_response(merge_abort(_read(own), others))
            if request.path == NODES_ROUTE and request.method == "GET":
                return json_response(merge_info(_read(own), await self.link.ask_others("nodes")))
            if request.path in INFO_ROUTES:
                merged = merge_info(_read(own), await self.link.ask_others("info"))
                return json_response(merged | {"workers": await self.statuses()})
            return own

        return answer


def merge_abort(own: Answer, others: Answers) -> Answer:
    """Return whether any worker ended something."""
    aborted = own["aborted"] or any(msgspec.json.decode(each) for each in others.given)
    return {"aborted": aborted, **_silence(others)}


def merge_info(own: Answer, others: Answers) -> Answer:
    """Return one worker's view of the nodes, with what all of them run there."""
    nodes = {node["url"]: dict(node) for node in own["nodes"]}
    for answer in others.given:
        for node in msgspec.json.decode(answer, type=Answer)["nodes"]:
            if node["url"] not in nodes:  # this worker has not taken the news yet
                continue
            for name in ("in_flight_requests", "in_flight_tokens"):
                nodes[node["url"]][name] += node[name]
    return {**own, "nodes": list(nodes.values()), **_silence(others)}


def _silence(others: Answers) -> Answer:
    return {"silent_workers": others.silent} if others.silent else {}


def _read(own: web.StreamResponse) -> Answer:
    assert isinstance(own, web.Response)
    assert isinstance(own.body, bytes)
    return msgspec.json.decode(own.body, type=Answer)
