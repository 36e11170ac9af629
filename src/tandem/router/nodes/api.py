"""HTTP routes that list and change the members of the cluster.

```
 GET    /nodes        list the nodes, with the reason why a node is not used
 POST   /nodes        add a node, or renew its announcement
 DELETE /nodes/{id}   remove a node: no new requests, forgotten after its last request has ended
```

The parent process keeps the announcements (`membership.py`). A change applies to all edge workers before the response is
sent.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import msgspec
from aiohttp import web
from msgspec import Meta

from tandem.frontend.chat.body import Body, read_json, validate
from tandem.frontend.http.keys import operators_only
from tandem.frontend.http.middleware import json_response
from tandem.router.config import node_id, node_url
from tandem.router.control import PARENT_TIMEOUT_S, WorkerLink
from tandem.router.membership.membership import Announcement
from tandem.router.nodes.cluster import Cluster
from tandem.router.nodes.node import Node
from tandem.wire.errors import ConfigInvalid, InvalidRequest, TandemError

NODES_ROUTE = "/nodes"


class NodeUnknown(TandemError, code="node_unknown", status=404):
    """There is no node with this id."""


class NodeBody(Body):
    """Body of `POST /nodes`."""

    url: Annotated[str, Meta(max_length=1024)]
    role: Literal["prefill", "decode"] | None = None
    bootstrap_port: Annotated[int, Meta(gt=0, lt=65536)] | None = None
    zone: Annotated[str, Meta(max_length=256)] = ""
    ttl_s: Annotated[float, Meta(gt=0, le=86400)] | None = None


class NodesApi:
    """The routes of one edge worker."""

    def __init__(self, cluster: Cluster, link: WorkerLink) -> None:
        self._cluster, self._link = cluster, link

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get(NODES_ROUTE, self.show),
            web.post(NODES_ROUTE, operators_only(self.add)),
            web.delete(NODES_ROUTE + "/{id:.+}", operators_only(self.remove)),
        ]

    async def show(self, request: web.Request) -> web.Response:
        """List all nodes with their state, and all sources."""
        sources = [msgspec.structs.asdict(source) for source in self._cluster.members.sources]
        nodes = [_shown(node) for node in self._cluster.roster]
        return json_response({"nodes": nodes, "sources": sources})

    async def add(self, request: web.Request) -> web.Response:
        """Add a node, or renew its announcement. Raises `InvalidRequest`."""
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
        """Remove a node once its requests have ended; with `?now=1`, hand them over to other nodes.

        Raises:
            NodeUnknown: There is no node with this id.
        """
        node = self._find(request.match_info["id"])
        hands_over = request.query.get("now", "0") not in {"0", "false", ""}
        await self._announce(
            Announcement(url=node.url, role=node.role, is_removed=True, hands_over=hands_over)
        )
        return json_response(_shown(node))

    async def _announce(self, announcement: Announcement) -> None:
        """Send an announcement to the parent, which sends it to all workers before this returns."""
        try:
            await self._link.ask("announce", announcement, PARENT_TIMEOUT_S)
        except TimeoutError as error:
            raise TandemError("the router's parent process does not answer") from error

    def _find(self, name: str) -> Node:
        """Return a node by its id or its URL, which may be percent-encoded twice."""
        names = {name, unquote(name)}
        for node in self._cluster.roster:
            if not names.isdisjoint({node.url, node_id(node.url)}):
                return node
        raise NodeUnknown(f"there is no node {name!r}: GET {NODES_ROUTE} lists all ids")


def _shown(node: Node) -> Mapping[str, Any]:
    return {
        "id": node_id(node.url),
        "url": node.url,
        "role": node.role,
        "model": node.info.model.name if node.info is not None else "",
        "state": node.state,
        "reason": node.shown_reason,
        "source": node.source,
        "zone": node.zone,
        "in_flight_requests": node.entry.in_flight_requests,
        "in_flight_tokens": node.entry.in_flight_tokens,
        "tiers": _tiers(node),
    }


def _tiers(node: Node) -> Sequence[Mapping[str, Any]]:
    """Return the tiers behind a node's prefix cache, with the number of blocks that this router knows of each."""
    known = node.prefixes.num_blocks if node.prefixes is not None else {}
    return [
        msgspec.structs.asdict(tier) | {"num_blocks": known.get((tier.name, tier.store), 0)}
        for tier in node.load.tiers
    ]
