"""The routes by which nodes and people say who belongs to the cluster.

```
 GET    /nodes        who is known, and why one is not used
 POST   /nodes        this one belongs to it; said again, it renews its lease
 DELETE /nodes/{id}   this one takes nothing new, and is forgotten when its last request has ended
```

What one edge worker is told it keeps in a file and tells its siblings (`siblings.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import msgspec
from aiohttp import web
from pydantic import Field

from tandem.frontend.body import Body, read_json, validate
from tandem.frontend.middleware import json_response
from tandem.frontend.operators import operators_only
from tandem.router.cluster import Cluster
from tandem.router.config import node_id, node_url
from tandem.router.membership import Said
from tandem.router.node import Node
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid, InvalidRequest, TandemError
from tandem.wire.messages import NodeLoad

log = get_logger(__name__)

NODES_ROUTE = "/nodes"
# Set on a request after which siblings are to look again.
IS_NEWS = web.RequestKey("is_news", bool)
# Many times what one router was measured with.
MAX_SAID = 4096


class NodeUnknown(TandemError):
    """There is no node of this id."""

    code = "node_unknown"
    status = 404


class NodeBody(Body):
    """`POST /nodes`."""

    url: Annotated[str, Field(max_length=1024)]
    role: Literal["prefill", "decode"] | None = None
    bootstrap_port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    zone: Annotated[str, Field(max_length=256)] = ""
    ttl_s: Annotated[float, Field(gt=0, le=86400)] | None = None


class NodesApi:
    """Answers for one edge worker."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def routes(self) -> list[web.RouteDef]:
        """Return those that clients reach."""
        return [
            web.get(NODES_ROUTE, self.show),
            web.post(NODES_ROUTE, operators_only(self.add)),
            web.delete(NODES_ROUTE + "/{id:.+}", operators_only(self.remove)),
        ]

    async def show(self, request: web.Request) -> web.Response:
        """List all nodes with their state, and the sources they come from."""
        nodes = [_shown(node) for node in self._cluster.roster]
        sources = [{"name": s.name, "problem": s.problem} for s in self._cluster.sources]
        return json_response({"nodes": nodes, "sources": sources})

    async def add(self, request: web.Request) -> web.Response:
        """Add a node, or renew what a node said of itself.

        Raises:
            InvalidRequest: The body is wrong; names the field.
            MembersUnwritable: It cannot be kept.
        """
        body = validate(NodeBody, read_json(await request.read()))
        try:
            url = node_url(body.url)
        except ConfigInvalid as error:
            raise InvalidRequest(f"url: {error.message}") from error
        if self._cluster.num_said >= MAX_SAID and self._cluster.roster.find(url) is None:
            raise InvalidRequest(f"{MAX_SAID} nodes were announced already, which is the limit")
        said = Said(
            url=url,
            role=body.role or "",
            bootstrap_port=body.bootstrap_port,
            zone=body.zone,
            ttl_s=body.ttl_s,
        )
        if self._cluster.say(said):
            request[IS_NEWS] = True
            log.info("node.announced", url=url, role=said.role, ttl_s=said.ttl_s)
        return json_response(_shown(self._cluster.node(url)))

    async def remove(self, request: web.Request) -> web.Response:
        """Have a node take nothing new and forget it when it is idle, or with `?now=1` at once.

        Raises:
            NodeUnknown: There is none of this id.
        """
        node = self._find(request.match_info["id"])
        hands_over = request.query.get("now", "0") not in {"0", "false", ""}
        self._cluster.say(
            Said(url=node.url, role=node.role, is_removed=True, hands_over=hands_over)
        )
        request[IS_NEWS] = True
        log.info("node.removed", url=node.url, role=node.role, hands_over=hands_over)
        return json_response(_shown(node))

    async def refresh(self, request: web.Request) -> web.Response:
        """Look again at what is said of the nodes: a sibling was told something."""
        self._cluster.refresh()
        return json_response({"refreshed": True})

    def _find(self, named: str) -> Node:
        """Return a node by its id or its URL, percent-encoded once more or not."""
        self._cluster.refresh()  # a sibling may have been told of it just now
        names = {named, unquote(named)}
        for node in self._cluster.roster:
            if not names.isdisjoint({node.url, node_id(node.url)}):
                return node
        raise NodeUnknown(f"there is no node {named!r}: GET {NODES_ROUTE} lists them by their id")


def _shown(node: Node) -> Mapping[str, Any]:
    return {
        "id": node_id(node.url),
        "url": node.url,
        "role": node.role,
        "state": state_of(node),
        "reason": node.shown_reason,
        "source": node.source,
        "zone": node.zone,
        "in_flight_requests": node.in_flight_requests,
        "in_flight_tokens": node.in_flight_tokens,
        "tiers": _tiers(node),
    }


def _tiers(node: Node) -> Sequence[Mapping[str, Any]]:
    """Return what is behind a node's prefix cache, with how many blocks this router knows of it."""
    load = node.client.load if node.client is not None else NodeLoad()
    known = node.prefixes.behind if node.prefixes is not None else {}
    return [
        {
            **msgspec.structs.asdict(tier),
            "num_blocks": known[tier.name].num_blocks if tier.name in known else 0,
        }
        for tier in load.tiers
    ]


def state_of(node: Node) -> str:
    """Return how a node is: leaving, draining, up or down."""
    if node.leaving.is_set():
        return "leaving"
    if node.is_draining:
        return "draining"
    return "up" if node.is_up else "down"
