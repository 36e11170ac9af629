"""The parent's handle of the engine process: start, link, drain, stop.

Parent and engine exchange lines of JSON:

```
 parent ── stdin:  NodeConfig, then DrainOrder, Resume ... ──▶ engine       end of file: stop
 parent ◀── stdout: Ready, Joined or StartFailed, then Drained ... ─── engine
```
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable

import msgspec

from tandem.node.config import NodeConfig
from tandem.telemetry.log import get_logger
from tandem.wire.engine_client import EngineClient
from tandem.wire.errors import EngineFailed, ErrorInfo, TandemError, error_from_info
from tandem.wire.messages import ModelInfo

log = get_logger(__name__)

# By default glibc returns the memory of each step's tensors to the kernel, and the next step faults it in again.
# Keeping the memory saves a tenth of a decode step (measured). Values set by the user take precedence.
MALLOC_SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}

# By default OpenMP's threads spin between operators, which takes the cores from the other nodes of this machine: three
# processes with two threads each then did a fifth of the work on two cores. 1,000 spins are enough to wait for the next
# operator. Measured on two cores with the embedded model at one stream, in tokens/s (no spins, 1,000, 20,000):
# a process alone 61, 105, 121; two at once 146, 88, 12 together.
OPENMP_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}

# All ranks of a node run on one host. By default gloo would listen on an address that other hosts can reach.
GLOO_SETTINGS = {"GLOO_SOCKET_IFNAME": "lo"}

# Time for the engine to exit after the end of file on its standard input. It then ends itself, or is killed.
STOP_TIMEOUT_S = 5.0
# Time to read what the engine reported before it exited.
LAST_REPORT_S = 1.0

# transformers shards a model over all visible GPUs, even when not requested.
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine is ready to serve."""

    epoch: int
    engine_port: int
    bootstrap_port: int | None
    max_prompt_tokens: int
    model: ModelInfo


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine runs ranks of a node that serves on a different host."""


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine could not start."""

    error: ErrorInfo


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No request is left. `number` identifies the drain that this report answers."""

    number: int


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reject new requests, and hand over the remaining ones after `timeout_s`. `Drained` repeats `number`."""

    number: int
    timeout_s: float


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Accept requests again."""


Order = DrainOrder | Resume
EngineReport = Ready | Joined | StartFailed | Drained


class EngineProcess:
    """One engine process, run as `python -P -m module`.

    `on_drained` is called when no request is left after the last `drain`.
    """

    def __init__(self, module: str, config: NodeConfig, on_drained: Callable[[], None]) -> None:
        self._module = module
        self._config = config
        self._on_drained = on_drained
        self._process: asyncio.subprocess.Process | None = None
        self._num_drains = 0

    async def start(self) -> Ready | Joined | TandemError:
        """Start the process; return its first report, or the error if it could not start."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self.environment(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._write(self._config)
        line = await self._next_report()
        if not line:
            status = await self._process.wait()
            return EngineFailed(f"the engine process exited with status {status} during start-up")
        report = msgspec.json.decode(line, type=Ready | Joined | StartFailed)
        if isinstance(report, StartFailed):
            await self._process.wait()
            return error_from_info(report.error)
        return report

    def environment(self) -> dict[str, str]:
        """Return the variables of the process: our defaults, which the user's own variables override."""
        environment = MALLOC_SETTINGS | OPENMP_SETTINGS | GLOO_SETTINGS | os.environ
        return environment | (WITHOUT_GPUS if self._config.engine.device == "cpu" else {})

    def drain(self, timeout_s: float) -> None:
        """Order the engine to reject new requests and hand over the rest after `timeout_s`. Call after `start`."""
        self._num_drains += 1
        self._order(DrainOrder(number=self._num_drains, timeout_s=timeout_s))

    def resume(self) -> None:
        """Order the engine to accept requests again."""
        self._num_drains += 1  # invalidates a `Drained` that is in flight
        self._order(Resume())

    def _order(self, order: Order) -> None:
        self._write(order)

    def _write(self, message: NodeConfig | Order) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # uvloop raises RuntimeError if the process has exited, which `start` and `wait` report.
        with contextlib.suppress(RuntimeError):
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def wait(self) -> int:
        """Process the engine's reports until it exits; return its exit status."""
        assert self._process is not None
        while line := await self._next_report():
            if msgspec.json.decode(line, type=Drained).number == self._num_drains:
                self._on_drained()
        return await self._process.wait()

    async def _next_report(self) -> bytes:
        """Return the next line of the process, or nothing once it has exited: its children may keep the pipe open."""
        assert self._process is not None
        assert self._process.stdout is not None
        reading = asyncio.ensure_future(self._process.stdout.readline())
        exited = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait([reading, exited], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([reading], timeout=LAST_REPORT_S)
            return reading.result() if reading.done() else b""
        finally:
            reading.cancel()
            exited.cancel()

    def kill(self) -> None:
        """Kill the process, so that `stop` returns soon."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the process by closing its standard input; kill it after `timeout_s`."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        # Even if it has exited: a child of it ends too. Until then the event loop could not close the pipes.
        self._process.stdin.close()
        if self._process.returncode is not None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            log.warning("engine.killed", reason=f"it did not stop within {timeout_s:g} s")
            self._process.kill()
            await self._process.wait()


async def keep_linked(
    make: Callable[[], EngineClient], use: Callable[[EngineClient], None]
) -> None:
    """Keep the node linked to its engine until cancelled; replace every lost link.

    If the node's process was frozen, its links are lost although the engine is alive.
    """
    while True:
        client = make()
        use(client)
        await client.run()
        log.warning("engine.link_lost", address=client.address, action="reconnecting")
