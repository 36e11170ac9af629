"""The HTTP process of a node: serves its engine, watches it, ends with it.

```
 listen ─▶ HTTP answers (health: 503) ─▶ engine loads ─▶ serving ─▶ signal: 503, drain ─▶ engine stops
                                              └─ engine fails to start, or dies ─▶ the node ends with 1
```
"""

import asyncio
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from frontend.app import create_app
from frontend.engine_client import EngineClient
from frontend.options import FrontendOptions
from frontend.reply_parser import reply_formats
from frontend.server import listen, serving
from frontend.tokenizer import Tokenizer
from frontend.tokenizer_files import tokenizer_files, tokenizer_hash
from node.config import NodeConfig
from node.engine_link import keep_linked
from node.engine_process import EngineProcess
from node.engine_report import Ready
from node.local_backend import LocalBackend
from telemetry.log import get_logger
from telemetry.version import package_version
from wire.channel import tcp_address
from wire.errors import TandemError
from wire.ids import Epoch
from wire.keys import ChannelKey

log = get_logger(__name__)


async def serve(config: NodeConfig, engine_module: str, key: ChannelKey | None) -> int:
    """Run a node until a signal or until its engine ends.

    Returns:
        0 after a signal, 1 when the engine ended by itself.

    Raises:
        TandemError: The port is in use, or the engine could not start.
    """
    files = tokenizer_files(Path(config.engine.model_dir))
    if not files:
        log.warning(
            "tokenizer.missing", effect="only input_ids can be served, and no text comes out"
        )
    with listen(config.host, config.port) as sock:
        node = _Node(config, EngineProcess(engine_module, config), files)
        async with serving(create_app(node.backend, _options(config, files)), sock):
            try:
                ready = await node.start()
                if isinstance(ready, Ready):
                    url = f"{config.http.scheme}://{config.host}:{sock.getsockname()[1]}"
                    return await node.watch(ready, key, url)
            finally:
                await node.stop()
    if ready is not None:
        raise ready
    return 0


def _options(config: NodeConfig, files: Mapping[str, str]) -> FrontendOptions:
    return FrontendOptions(
        http=config.http,
        incremental_streaming_output=config.is_incremental_output,
        tokenizer_files=lambda: files,
        reply_formats=reply_formats(config.tool_call_parser, config.reasoning_parser),
    )


class _Node:
    """A node's engine and its backend, from the first signal handler to the last process."""

    def __init__(self, config: NodeConfig, engine: EngineProcess, files: Mapping[str, str]) -> None:
        self.backend = LocalBackend(config, package_version())
        self._config = config
        self._engine = engine
        self._files = files
        self._told_to_stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._told_to_stop.set)

    async def start(self) -> Ready | TandemError | None:
        """Start the engine; None when a signal came first."""
        async with asyncio.TaskGroup() as tasks:
            starting = tasks.create_task(self._engine.start())
            told = tasks.create_task(self._told_to_stop.wait())
            await asyncio.wait([starting, told], return_when=asyncio.FIRST_COMPLETED)
            told.cancel()
            starting.cancel()
        return None if starting.cancelled() else starting.result()

    async def watch(self, ready: Ready, key: ChannelKey | None, url: str) -> int:
        """Serve until a signal (0) or until the engine ends by itself (1)."""
        address = tcp_address(_reachable(self._config.host), ready.engine_port)
        make_client = partial(
            EngineClient, address, key, Epoch(ready.epoch), self._config.heartbeat
        )
        client = make_client()
        tokenizer = (
            await asyncio.to_thread(Tokenizer.from_files, self._files) if self._files else None
        )
        async with asyncio.TaskGroup() as tasks:
            linked = tasks.create_task(keep_linked(client, make_client, self.backend.relink))
            self.backend.attach(ready, client, tokenizer, tokenizer_hash(self._files))
            log.info("node.serving", url=url)
            ended = tasks.create_task(self._engine.wait())
            told = tasks.create_task(self._told_to_stop.wait())
            await asyncio.wait([ended, told], return_when=asyncio.FIRST_COMPLETED)
            has_died = ended.done()
            if has_died:
                log.error("engine.died", status=ended.result(), effect="the node ends")
            self.backend.detach("the node is stopping")
            linked.cancel()
            ended.cancel()
            told.cancel()
        return int(has_died)

    async def stop(self) -> None:
        """Refuse what still comes and end the engine."""
        self.backend.detach("the node is stopping")
        await self._engine.stop()


def _reachable(host: str) -> str:
    """Return where this machine reaches a socket of its own that is bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
