"""The load of each node as SGLang's load balancers read it: `/get_load` of older ones, `/v1/loads` of newer ones.

A node is a rank: a router lists its prefills, then its decodes.
"""

from datetime import UTC, datetime

from aiohttp import web

from tandem.frontend.edge import EDGE
from tandem.frontend.middleware import json_response
from tandem.telemetry.version import package_version
from tandem.wire.errors import InvalidRequest
from tandem.wire.messages import NodeLoad


async def get_load(request: web.Request) -> web.Response:
    """List the load of each node, as SGLang's first balancers read it."""
    return json_response(
        [
            {
                "dp_rank": rank,
                "num_reqs": _num_running(load) + load.num_waiting,
                "num_waiting_reqs": load.num_waiting,
                "num_tokens": _used_tokens(load) + _queued_tokens(load),
            }
            for rank, load in enumerate(request.app[EDGE].backend.loads())
        ]
    )


async def v1_loads(request: web.Request) -> web.Response:
    """List the load of each node, as SGLang's gateway reads it."""
    if request.query.get("format", "json") != "json":
        raise InvalidRequest("format: only json is here; Prometheus reads /metrics")
    now = datetime.now(UTC)
    loads = [
        _core(rank, load) | {"timestamp": now.timestamp()}
        for rank, load in enumerate(request.app[EDGE].backend.loads())
        if request.query.get("dp_rank", str(rank)) == str(rank)
    ]
    return json_response(
        {"timestamp": now.isoformat(), "version": package_version(), "loads": loads}
    )


def _core(rank: int, load: NodeLoad) -> dict[str, int | float]:
    used, total = _used_tokens(load), load.num_pages * load.page_size
    return {
        "dp_rank": rank,
        "num_running_reqs": _num_running(load),
        "num_waiting_reqs": load.num_waiting,
        "num_waiting_uncached_tokens": _queued_tokens(load),
        "num_used_tokens": used,
        "num_total_tokens": used + _queued_tokens(load),
        "max_total_num_tokens": total,
        "max_running_requests": load.max_running,
        "token_usage": used / total if total else 0.0,
    }


def _num_running(load: NodeLoad) -> int:
    return load.num_running + load.num_transferring


def _used_tokens(load: NodeLoad) -> int:
    """Return the tokens whose pages nothing may evict."""
    return (load.num_pages - load.pages_free - load.pages_cached) * load.page_size


def _queued_tokens(load: NodeLoad) -> int:
    return max(0, load.queued_tokens)
