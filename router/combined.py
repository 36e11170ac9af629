"""One answer for the whole router, whichever of its edge workers was asked.

```
 client ─▶ any worker ─▶ its own answer ─┬─▶ merged
                     the others', asked through the parent (`control.py`) ───┘
```

A worker that does not answer in time is named in `silent_workers`. For `/metrics` no other worker is asked:
prometheus_client adds up what all workers counted, dead ones included.
"""

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from tandem.frontend.edge import EDGE
from tandem.frontend.middleware import json_response
from tandem.frontend.routes import ABORTED
from tandem.router.control import Answers, Kind, ParentLink, Status
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


def replies_of(
    app: web.Application, nodes: NodesApi, observer: Observer
) -> Mapping[Kind, Callable[[str], Awaitable[bytes]]]:
    """Return what one worker replies to the questions of others."""
    edge, encode = app[EDGE], msgspec.json.encode

    async def abort(body: str) -> bytes:
        wanted = msgspec.json.decode(body, type=_Abort)
        aborted = await edge.abort_all() if wanted.abort_all else await edge.abort(wanted.rid)
        return encode({"aborted": aborted})

    async def info(_body: str) -> bytes:
        return encode(edge.backend.server_info())

    async def listing(_body: str) -> bytes:
        return encode(nodes.listing())

    async def overview(_body: str) -> bytes:
        return encode(observer.overview())

    return {"abort": abort, "info": info, "nodes": listing, "overview": overview}


def answering(link: ParentLink, metrics_directory: str) -> Middleware:
    """Return the middleware that answers for all workers. It goes behind those that refuse."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        own = await handler(request)
        if request.path == METRICS_ROUTE:
            workers = (await link.ask("workers")).workers
            loads = [(worker.num_connections, worker.num_streams) for worker in workers]
            text = render_pool(metrics_directory, loads, lambda: _pids(workers))
            return web.Response(text=text, content_type="text/plain", charset="utf-8")
        if request.path == ABORT_ROUTE:
            asked = request[ABORTED]  # not its raw body, which may be of any size
            wanted = _Abort(asked.rid, asked.abort_all)
            others = await link.ask("abort", msgspec.json.encode(wanted).decode())
            return json_response(merge_abort(_read(own), others))
        if request.path == NODES_ROUTE and request.method == "GET":
            return json_response(merge_info(_read(own), await link.ask("nodes")))
        if request.path in INFO_ROUTES:
            others = await link.ask("info")
            shown = {"workers": [_as_json(worker) for worker in others.workers]}
            return json_response(merge_info(_read(own), others) | shown)
        return own

    return answer


def merge_abort(own: Answer, others: Answers) -> Answer:
    """Return whether any worker ended something."""
    aborted = own["aborted"] or any(answer["aborted"] for answer in _given(others))
    return {"aborted": aborted, **_silence(others)}


def merge_info(own: Answer, others: Answers) -> Answer:
    """Return one worker's view of the nodes, with what all of them run there."""
    nodes = {node["url"]: dict(node) for node in own["nodes"]}
    for answer in _given(others):
        for node in answer["nodes"]:
            if node["url"] not in nodes:  # this worker has not taken the news yet
                continue
            for name in ("in_flight_requests", "in_flight_tokens"):
                nodes[node["url"]][name] += node[name]
    return {**own, "nodes": list(nodes.values()), **_silence(others)}


def _given(others: Answers) -> list[Answer]:
    return [msgspec.json.decode(answer, type=Answer) for answer in others.given]


def _silence(others: Answers) -> Answer:
    return {"silent_workers": others.silent} if others.silent else {}


def _read(own: web.StreamResponse) -> Answer:
    assert isinstance(own, web.Response)
    assert isinstance(own.body, bytes)
    return msgspec.json.decode(own.body, type=Answer)


def _as_json(worker: Status) -> Answer:
    return {
        "is_serving": worker.is_open and worker.is_serving,
        "num_connections": worker.num_connections,
        "num_streams": worker.num_streams,
    }


def _pids(workers: list[Status]) -> dict[str, int]:
    edges = {f"edge-{i}": worker.pid for i, worker in enumerate(workers) if worker.pid}
    return {"parent": os.getppid(), **edges}
