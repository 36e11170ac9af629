"""What waits at a server: asked of our routers and nodes, and read from the metrics of SGLang and vLLM."""

import re
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

LOOK_TIMEOUT_S = 5.0
# Prompts in a prefill's own line that keep it busy and delay nobody: routers leave it at least four, and
# what it computes in half a second.
PREFILL_LINE = 8

# Of a look: it says nothing of what the server tells at other times.
BUSY = frozenset({429, 500, 502, 503, 504})

# Of ours as well: an edge in front may pass nothing else on.
METRICS = re.compile(
    rb"^(?:tandem_router_queued_requests|tandem_requests_waiting|sglang:num_queue_reqs|"
    rb"vllm:num_requests_waiting)(?:\{[^\n]*\})? +([0-9.e+]+)",
    re.MULTILINE,
)


class _Load(msgspec.Struct):
    num_waiting: int


class _Node(msgspec.Struct):
    role: str
    load: _Load


class _Overview(msgspec.Struct):
    num_queued: int
    nodes: list[_Node]


def of_overview(body: bytes) -> int:
    """Return what waits at a router and its nodes, by its `/overview`.

    Raises:
        msgspec.MsgspecError: It is none.
    """
    told = msgspec.json.decode(body, type=_Overview)
    return told.num_queued + sum(map(_beyond_use, told.nodes))


def of_node(body: bytes) -> int:
    """Return what waits at a node, by its `/server_info`.

    Raises:
        msgspec.MsgspecError: It is none of ours.
    """
    return _beyond_use(msgspec.json.decode(body, type=_Node))


def _beyond_use(node: _Node) -> int:
    if node.role == "prefill":
        return max(0, node.load.num_waiting - PREFILL_LINE)
    return node.load.num_waiting


def of_metrics(body: bytes) -> int:
    """Return what waits, by metrics as Prometheus reads them.

    Raises:
        ValueError: They do not say.
    """
    if not (found := METRICS.findall(body)):
        raise ValueError("no metric of a queue")
    return int(sum(map(float, found)))


Reading = Callable[[bytes], int]
# In this order; `after` leaves out the past requests that an overview shows.
SOURCES: Sequence[tuple[str, Reading]] = (
    ("/overview?after={now}", of_overview),
    ("/server_info", of_node),
    ("/metrics", of_metrics),
)


class Watcher:
    """Asks one server what waits there, in the first way that it answers."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self._sources = list(SOURCES)

    async def look(self) -> int | None:
        """Return how many requests wait; None: it does not tell, or not now."""
        try:
            while self._sources:
                queued = await self._ask(*self._sources[0])
                if queued is not None:
                    return queued
                self._sources.pop(0)  # it answered, and something else
        except (aiohttp.ClientError, TimeoutError):
            pass
        return None

    def begin_again(self) -> None:
        """Ask in every way again: another server may be up there."""
        self._sources = list(SOURCES)

    async def _ask(self, path: str, read: Reading) -> int | None:
        timeout = aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)
        url = self._url + path.format(now=int(time.time()) + 60)
        async with self._session.get(url, timeout=timeout) as response:
            body = await response.read()
        if response.status in BUSY:
            raise TimeoutError
        try:
            return read(body) if response.status == 200 else None
        except (ValueError, msgspec.MsgspecError):
            return None
