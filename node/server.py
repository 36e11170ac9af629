"""The HTTP process of a node: serves its engine, watches it, ends with it.

```
 listen ─▶ HTTP answers (health: 503) ─▶ engine loads ─▶ serving ─▶ signal: 503, drain ─▶ engine stops
                                              └─ engine fails to start, or dies ─▶ the node ends with 1
```
"""

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path

from frontend.app import create_app
from frontend.engine_client import EngineClient
from frontend.options import FrontendOptions
from frontend.server import listen, serving
from frontend.tokenizer import Tokenizer
from frontend.tokenizer_files import tokenizer_files, tokenizer_hash
from node.config import NodeConfig
from node.engine_process import EngineProcess
from node.local_backend import LocalBackend
from telemetry.log import get_logger
from telemetry.version import package_version
from wire.channel import ChannelKey, tcp_address
from wire.ids import Epoch

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
        log.warning("tokenizer.missing", effect="only input_ids can be served, and no text comes out")
    backend = LocalBackend(config, package_version())
    with listen(config.host, config.port) as sock:
        port = sock.getsockname()[1]
        engine = EngineProcess(engine_module, config)
        async with serving(create_app(backend, _options(config, files)), sock):
            try:
                return await _run_engine(config, engine, backend, key, files, port)
            finally:
                backend.detach("the node is stopping")
                await engine.stop()


def _options(config: NodeConfig, files: Mapping[str, str]) -> FrontendOptions:
    return FrontendOptions(
        api_keys=config.api_keys,
        max_body_bytes=config.max_body_bytes,
        incremental_streaming_output=config.is_incremental_output,
        tokenizer_files=lambda: files,
    )


async def _run_engine(
    config: NodeConfig,
    engine: EngineProcess,
    backend: LocalBackend,
    key: ChannelKey | None,
    files: Mapping[str, str],
    port: int,
) -> int:
    """Start the engine and attach it; return when a signal came (0) or it ended (1)."""
    async with asyncio.TaskGroup() as tasks:
        signalled = tasks.create_task(_signal())
        starting = tasks.create_task(engine.start())
        await asyncio.wait([signalled, starting], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return 0
        ready = await starting
        client = EngineClient(
            tcp_address(_reachable(config.host), ready.engine_port), key, Epoch(ready.epoch)
        )
        link = tasks.create_task(client.run())
        tokenizer = await asyncio.to_thread(Tokenizer.from_files, files) if files else None
        backend.attach(ready, client, tokenizer, tokenizer_hash(files))
        log.info("node.serving", url=f"http://{config.host}:{port}", role=config.role)
        ended = tasks.create_task(engine.wait())
        await asyncio.wait([signalled, ended], return_when=asyncio.FIRST_COMPLETED)
        status = 1 if ended.done() else 0
        if status:
            log.error("engine.died", status=ended.result(), effect="the node ends")
        client.stop()
        await link
        signalled.cancel()
        ended.cancel()
        return status


def _reachable(host: str) -> str:
    """Return where this machine reaches a socket of its own that is bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


async def _signal() -> None:
    """Return at the first SIGINT or SIGTERM."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    await told.wait()
