"""The routes by which nodes and people change the members of the cluster.

```
 GET    /nodes        which nodes are known, and why one is not used
 POST   /nodes        this one belongs to it; repeated, it renews its lease
 DELETE /nodes/{id}   this one takes nothing new, and is forgotten when its last request has ended
```

The parent process keeps what was announced (`membership.py`): it holds for all edge workers before the answer is sent.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import msgspec
from aiohttp import web
from pydantic import Field

from tandem.frontend.body import Body, read_json, validate
from tandem.frontend.keys import operators_only
from tandem.frontend.middleware import json_response
from tandem.router.cluster import Cluster
from tandem.router.config import node_id, node_url
from tandem.router.control import PARENT_TIMEOUT_S, Link
from tandem.router.membership import Announcement
from tandem.router.node import Node
from tandem.wire.errors import ConfigInvalid, InvalidRequest, TandemError

NODES_ROUTE = "/nodes"


class NodeUnknown(TandemError, code="node_unknown", status=404):
    """No node has this id."""


class NodeBody(Body):
    """`POST /nodes`."""

    url: Annotated[str, Field(max_length=1024)]
    role: Literal["prefill", "decode"] | None = None
    bootstrap_port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    zone: Annotated[str, Field(max_length=256)] = ""
    ttl_s: Annotated[float, Field(gt=0, le=86400)] | None = None


class NodesApi:
    """Answers for one edge worker."""

    def __init__(self, cluster: Cluster, link: Link) -> None:
        self._cluster, self._link = cluster, link

    def routes(self) -> list[web.RouteDef]:
        """Return those that clients reach."""
        return [
            web.get(NODES_ROUTE, self.show),
            web.post(NODES_ROUTE, operators_only(self.add)),
            web.delete(NODES_ROUTE + "/{id:.+}", operators_only(self.remove)),
        ]

    async def show(self, request: web.Request) -> web.Response:
        """List all nodes with their state, and the sources they come from."""
        sources = [msgspec.structs.asdict(source) for source in self._cluster.members.sources]
        nodes = [_shown(node) for node in self._cluster.roster]
        return json_response({"nodes": nodes, "sources": sources})

    async def add(self, request: web.Request) -> web.Response:
        """Add a node, or renew what a node announced of itself. Raises `InvalidRequest`."""
        body = validate(NodeBody, read_json(await request.read()))
        try:
            url = node_url(body.url)
        except ConfigInvalid as error:
            raise InvalidRequest(f"url: {error.message}") from error
        await self._announce(
            Announcement(
                url=url,
                role=body.role or "",
                bootstrap_port=body.bootstrap_port,
                zone=body.zone,
                ttl_s=body.ttl_s,
            )
        )
        return json_response(_shown(self._cluster.node(url)))

    async def remove(self, request: web.Request) -> web.Response:
        """Have a node take nothing new and forget it when it is idle, or with `?now=1` at once.

        Raises:
            NodeUnknown: There is none of this id.
        """
        node = self._find(request.match_info["id"])
        hands_over = request.query.get("now", "0") not in {"0", "false", ""}
        await self._announce(
            Announcement(url=node.url, role=node.role, is_removed=True, hands_over=hands_over)
        )
        return json_response(_shown(node))

    async def _announce(self, announcement: Announcement) -> None:
        """Have the parent take an announcement; it is sent to all workers before this returns."""
        try:
            await self._link.ask("announce", announcement, PARENT_TIMEOUT_S)
        except TimeoutError as error:
            raise TandemError("the router's parent process does not answer") from error

    def _find(self, named: str) -> Node:
        """Return a node by its id or its URL, percent-encoded once more or not."""
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
        "state": node.state,
        "reason": node.shown_reason,
        "source": node.source,
        "zone": node.zone,
        "in_flight_requests": node.in_flight_requests,
        "in_flight_tokens": node.in_flight_tokens,
        "tiers": _tiers(node),
    }


def _tiers(node: Node) -> Sequence[Mapping[str, Any]]:
    """Return what is behind a node's prefix cache, with how many blocks this router knows of it."""
    known = node.prefixes.num_blocks if node.prefixes is not None else {}
    return [
        msgspec.structs.asdict(tier) | {"num_blocks": known.get((tier.name, tier.store), 0)}
        for tier in node.load.tiers
    ]
