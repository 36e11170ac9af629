"""Supervises the adapter, the process that makes nodes of engines that do not implement the node protocol.

```
 --decode vllm+http://d1:8000 ──▶ http://127.0.0.1:PORT/vllm+http/d1:8000, which the adapter serves as any other node
```

The parent holds the adapter's listening socket, so that a restart of the adapter keeps the URLs of its nodes.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import msgspec

from tandem.router.config import PrefillTarget, RouterConfig, engine_of
from tandem.router.stock_options import StockOptions
from tandem.telemetry.log import LogFormat, get_logger

log = get_logger(__name__)

# The module is above this package, which must not import it.
MODULE = "tandem.stock.adapter"
HOST = "127.0.0.1"
RESTART_PAUSE_S, STOP_S = 0.5, 2.0


class EngineTarget(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of which the adapter makes a node.

    Attributes:
        bootstrap_port: Bootstrap port of a prefill engine that has one; None: the one that it reports, or its default.
    """

    engine: str
    http_url: str
    role: Literal["prefill", "decode"]
    bootstrap_port: int | None = None

    @property
    def path(self) -> str:
        """Path of the node's URL."""
        return f"{self.engine}+{self.http_url.replace('://', '/')}"


class AdapterStart(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of the adapter's process.

    Attributes:
        socket_fd: File descriptor of the inherited listening socket.
    """

    targets: list[EngineTarget]
    socket_fd: int
    heartbeat_interval_ms: float
    tokenizer_dir: str
    options: StockOptions
    log_level: str
    log_format: LogFormat


class AdapterProcess:
    """The process of the adapter, across restarts."""

    def __init__(self, start: AdapterStart) -> None:
        self._start = start

    async def supervise(self) -> None:
        """Run the process, and restart it when it ends, until cancelled."""
        while True:
            status = await self._run()
            log.error("adapter.crashed", status=status, action="restarting")
            await asyncio.sleep(RESTART_PAUSE_S)

    async def _run(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", MODULE, msgspec.json.encode(self._start).decode()),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=[self._start.socket_fd],
            # In a separate session, Ctrl-C reaches only the parent, which stops the workers first.
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            return await process.wait()
        finally:
            process.stdin.close()  # stops it
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


@contextlib.contextmanager
def adapted(config: RouterConfig) -> Iterator[tuple[RouterConfig, AdapterProcess | None]]:
    """Yield the configuration with URLs of nodes in place of those of engines, and the adapter if there are any."""
    if not any(engine_of(url) for url in _urls(config)):
        yield config, None
        return
    with socket.create_server((HOST, 0)) as sock:
        base, targets = f"http://{HOST}:{sock.getsockname()[1]}", []

        def node(url: str, role: Literal["prefill", "decode"], port: int | None = None) -> str:
            if not (engine := engine_of(url)):
                return url
            http_url = url.removeprefix(f"{engine}+")
            targets.append(
                EngineTarget(engine=engine, http_url=http_url, role=role, bootstrap_port=port)
            )
            return f"{base}/{targets[-1].path}"

        prefills = tuple(
            PrefillTarget(
                node(each.url, "prefill", each.bootstrap_port),
                None if engine_of(each.url) else each.bootstrap_port,
            )
            for each in config.prefills
        )
        decodes = tuple(node(url, "decode") for url in config.decodes)
        start = AdapterStart(
            targets=targets,
            socket_fd=sock.fileno(),
            heartbeat_interval_ms=config.heartbeat_interval_ms,
            tokenizer_dir=config.tokenizer_dir,
            options=config.engines,
            log_level=config.log_level,
            log_format=config.log_format,
        )
        yield replace(config, prefills=prefills, decodes=decodes), AdapterProcess(start)


def _urls(config: RouterConfig) -> list[str]:
    return [*(each.url for each in config.prefills), *config.decodes]
