"""The adapter: one process that makes nodes of all stock engines of a router, or of the engine next to it.

```
 router ── GET /vllm+http/d1:8000/server_info, .../tokenizer, .../health ──▶ adapter ── HTTP, SSE ──▶ http://d1:8000
        ══ engine link of each node's life ════════════════════════════════▶
 another adapter ── GET, DELETE /rooms/{room} ──▶
```

The router's parent runs it as `python -m tandem.stock.adapter`, with an `AdapterStart` as its argument. The end of its
input stops it.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from tandem.router.stock_options import StockOptions
from tandem.router.workers.adapter import HOST, AdapterStart, EngineTarget
from tandem.stock.dialect import Dialect
from tandem.stock.http_engine import CONNECT_S, HttpEngine
from tandem.stock.model_files import ModelFiles
from tandem.stock.node import StockNode, Surroundings
from tandem.stock.rooms import Meeting, RemoteRooms, Rooms
from tandem.stock.sglang_dialect import SglangDialect
from tandem.stock.vllm_dialect import VllmDialect
from tandem.telemetry.log import configure
from tandem.vllm.node.outputs import HandOffParams
from tandem.wire.channel import heartbeat_of
from tandem.wire.errors import PeerLost, TandemError
from tandem.wire.generation import Room
from tandem.wire.keys import ChannelKey, cluster_key, is_loopback

DIALECTS: Mapping[str, Callable[[HttpEngine, EngineTarget, StockOptions], Dialect]] = {
    "vllm": VllmDialect,
    "sglang": SglangDialect,
}

# An engine that is polled and sends nothing for this many heartbeat intervals, or half as many more if it has sent
# something after the poll, counts as lost: after 5 to 7.5 s by default. One and a half of the maximum and the time for decode to ask for a prompt's blocks are shorter than their lease, 30 s by default: after its
# end, decode's engine could read blocks of other requests.
POLL_INTERVALS, MAX_POLL_S = 10, 10.0

_STDIN = 0


class Adapter:
    """The nodes of one adapter, and their HTTP.

    Args:
        host, port: Address of the HTTP.
        key: Key of the engine links; None: not encrypted.
    """

    def __init__(
        self,
        start: AdapterStart,
        session: aiohttp.ClientSession,
        host: str,
        port: int,
        key: ChannelKey | None,
    ) -> None:
        self._session, self._host, self._port, self._rooms = session, host, port, Rooms()
        around = Surroundings(
            host=host,
            port=port,
            key=key,
            heartbeat=heartbeat_of(start.heartbeat_interval_ms),
            # All nodes of a model share its files. An error is not cached.
            files=cache(lambda model: ModelFiles(model, start.tokenizer_dir)),
            rooms=self._rooms,
            meeting=self._meeting,
            options=start.options,
        )
        poll_s = min(POLL_INTERVALS * around.heartbeat.interval_s, MAX_POLL_S) or MAX_POLL_S
        self.nodes = {
            each.path: StockNode(
                DIALECTS[each.engine](
                    HttpEngine(each.http_url, session, poll_s), each, start.options
                ),
                each.role,
                around,
            )
            for each in start.targets
        }

    def _meeting(self, hand_off: HandOffParams) -> Meeting:
        host, port = hand_off.bootstrap_host, hand_off.bootstrap_port
        if port == self._port and (host == self._host or is_loopback(host)):
            return self._rooms
        bracketed = f"[{host}]" if ":" in host else host
        return RemoteRooms(self._session, f"http://{bracketed}:{port}")

    def app(self) -> web.Application:
        """Return the HTTP application. The last part of a path names a node's route, the parts before it the node."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/rooms/{room:\\d+}", _answering(self._take)),
                web.delete("/rooms/{room:\\d+}", _answering(self._confirm)),
                web.get("/{path:.*?}{slash:/?}server_info", _answering(self._server_info)),
                web.get("/{path:.*?}{slash:/?}tokenizer", _answering(self._tokenizer)),
                web.get("/{path:.*?}{slash:/?}health", _answering(self._health)),
            ]
        )
        return app

    def _node(self, request: web.Request) -> StockNode:
        path, nodes = request.match_info["path"], self.nodes
        node = nodes.get(path)
        if node is None and not path and len(nodes) == 1:  # `tandem adopt`
            node = next(iter(nodes.values()))
        if node is None:
            raise PeerLost("this adapter has no such node")
        return node

    async def _server_info(self, request: web.Request) -> object:
        return self._node(request).info()

    async def _health(self, request: web.Request) -> object:
        self._node(request).info()
        return {"status": "ok"}

    async def _tokenizer(self, request: web.Request) -> object:
        return {"files": self._node(request).tokenizer}

    async def _take(self, request: web.Request) -> object:
        return await self._rooms.take(Room(int(request.match_info["room"])))

    async def _confirm(self, request: web.Request) -> object:
        await self._rooms.confirm(Room(int(request.match_info["room"])))
        return {}

    async def run(self, sock: socket.socket, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set."""
        runner = web.AppRunner(self.app(), access_log=None)
        await runner.setup()
        try:
            await web.SockSite(runner, sock).start()
            async with asyncio.TaskGroup() as tasks:
                watching = [tasks.create_task(node.watch()) for node in self.nodes.values()]
                await stopping.wait()
                for task in watching:
                    task.cancel()
        finally:
            await runner.cleanup()


def _answering(
    handler: Callable[[web.Request], Awaitable[object]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        try:
            body, status = await handler(request), 200
        except TandemError as error:
            body, status = {"error": {"message": error.message}}, error.status
        return web.Response(
            body=msgspec.json.encode(body), status=status, content_type="application/json"
        )

    return answer


async def serve(
    start: AdapterStart, sock: socket.socket, key: ChannelKey | None, stopping: asyncio.Event
) -> None:
    """Serve the nodes of `start` on a listening socket until `stopping` is set."""
    host, port = sock.getsockname()[:2]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await Adapter(start, session, host, port, key).run(sock, stopping)


async def _serve_until_end_of_input(start: AdapterStart, key: ChannelKey | None) -> None:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    loop.add_reader(_STDIN, stopping.set)
    with socket.socket(fileno=start.socket_fd) as sock:
        await serve(start, sock, key, stopping)


def main(argv: Sequence[str] = sys.argv) -> int:
    """Run the adapter of a router; return the exit status."""
    start = msgspec.json.decode(argv[1], type=AdapterStart)
    configure(start.log_level, start.log_format, role="adapter")
    key = cluster_key(HOST, is_insecure=False)
    uvloop.run(_serve_until_end_of_input(start, key))
    return 0


if __name__ == "__main__":
    sys.exit(main())
