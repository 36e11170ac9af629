"""The load of each node for SGLang's load balancers: `/get_load` for older ones, `/v1/loads` for newer ones.

Each node is listed as a rank. A router lists prefill nodes first, then decode nodes.
"""

from datetime import UTC, datetime

from aiohttp import web

from tandem import __version__
from tandem.frontend.http.edge import EDGE
from tandem.frontend.http.middleware import json_response
from tandem.wire.errors import InvalidRequest
from tandem.wire.messages import NodeLoad


async def get_load(request: web.Request) -> web.Response:
    """List the load of each node, for older SGLang load balancers."""
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
    """List the load of each node, for SGLang's gateway."""
    if request.query.get("format", "json") != "json":
        raise InvalidRequest("format: must be json; use /metrics for Prometheus")
    now = datetime.now(UTC)
    loads = [
        _core(rank, load) | {"timestamp": now.timestamp()}
        for rank, load in enumerate(request.app[EDGE].backend.loads())
        if request.query.get("dp_rank", str(rank)) == str(rank)
    ]
    return json_response({"timestamp": now.isoformat(), "version": __version__, "loads": loads})


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
    """Return the number of tokens on pages that cannot be evicted."""
    return (load.num_pages - load.pages_free - load.pages_cached) * load.page_size


def _queued_tokens(load: NodeLoad) -> int:
    return max(0, load.queued_tokens)
