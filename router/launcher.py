"""The router's parent process: owns the listening socket and keeps the edge workers alive.

```
 parent: bind ─▶ start N workers ─▶ restart what crashes ─▶ SIGTERM: a line ──delay──▶ close their stdin ─▶ wait ─▶ 0
                     │ stdin: one line of JSON                      │                        │
 worker: serve ◀─────┘      serve, /health is 503 ◀─────────────────┘                        │
         finish what is in, exit ◀───────────────────────────────────────────────────────────┘
```

Reads nothing of any client, so that it has nothing to crash on. A single worker accepts by itself;
connections of several are handed out here (`doorman.py`).
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys

import msgspec
import uvloop

from tandem.frontend.server import listen
from tandem.router.config import RouterConfig
from tandem.router.doorman import Doorman
from tandem.router.membership_files import MemberFiles, new_member_files
from tandem.router.pool import Pool, new_pool
from tandem.router.worker import CONFIG_STATUS, WorkerStart
from tandem.telemetry.log import get_logger
from tandem.wire.descriptors import PER_LINK, allow_descriptors

log = get_logger(__name__)

# Beyond the time that streams are given: for cutting them and ending.
STOP_GRACE_S = 2.0
# A person at a keyboard waits for no stream of half a minute.
INTERRUPT_DRAIN_S = 3.0
# Of an edge worker: its link to the engine, and HTTP connections that ask the node what it is.
DESCRIPTORS_PER_NODE = PER_LINK + 2
# Long enough that a worker that cannot start does not fill the log.
RESTART_PAUSE_S = 0.5


def run(config: RouterConfig) -> int:
    """Serve until a signal comes; return the exit status.

    Raises:
        ConfigInvalid: The address cannot be listened on.
    """
    num_nodes, num_waiting = config.num_listed, config.admission.limits.max_requests
    # Edge workers inherit the limit.
    allow_descriptors(
        num_nodes * DESCRIPTORS_PER_NODE + num_waiting,
        used_for=f"{num_nodes} nodes and {num_waiting} waiting requests",
    )
    with (
        listen(config.host, config.port) as sock,
        _pool_of(config) as pool,
        new_member_files() as files,
    ):
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        log.info(
            "router.listening",
            url=f"{config.http.scheme}://{shown}:{port}",
            num_workers=config.num_workers,
        )
        status: int = uvloop.run(Launcher(config, sock, pool, files).run())
        return status


def _pool_of(config: RouterConfig) -> contextlib.AbstractContextManager[Pool | None]:
    return new_pool(config.num_workers) if config.num_workers > 1 else contextlib.nullcontext()


class Launcher:
    """Keeps the edge workers of one router running.

    Args:
        sock: Listening.
        pool: Of the workers, when there are several.
        files: Of nodes that were announced: they outlive the worker that was told.
    """

    def __init__(
        self, config: RouterConfig, sock: socket.socket, pool: Pool | None, files: MemberFiles
    ) -> None:
        self._config, self._socket, self._pool, self._files = config, sock, pool, files
        self._doorman = Doorman(sock, pool) if pool is not None else None
        self._is_leaving = False
        self._stopping = asyncio.Event()
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._status, self._drain_s = 0, 0.0

    async def run(self) -> int:
        """Run until a signal comes or a new worker says that the configuration cannot work."""
        loop = asyncio.get_running_loop()
        config = self._config
        for number, delay_s, drain_s in (
            (signal.SIGTERM, config.shutdown_delay_s, config.drain_timeout_s),
            (signal.SIGINT, 0.0, min(INTERRUPT_DRAIN_S, config.drain_timeout_s)),
        ):
            loop.add_signal_handler(number, self._signalled, delay_s, drain_s)
        if self._doorman is not None:
            self._doorman.open()
        async with asyncio.TaskGroup() as tasks:
            reaper = tasks.create_task(self._reap())
            async with asyncio.TaskGroup() as workers:
                for index in range(self._config.num_workers):
                    workers.create_task(self._keep(index))
            reaper.cancel()
        return self._status

    def _signalled(self, delay_s: float, drain_s: float) -> None:
        if self._is_leaving:  # a second signal forces
            self._kill()
            self._stop()
        else:
            log.info("router.stopping", delay_s=delay_s, drain_s=drain_s)
            self._leave()
            asyncio.get_running_loop().call_later(delay_s, self._stop, drain_s)

    def _leave(self) -> None:
        self._is_leaving = True
        for process in self._processes.values():
            _tell_to_leave(process)

    def _stop(self, drain_s: float = 0.0) -> None:
        self._drain_s = drain_s
        self._stopping.set()
        if self._doorman is not None:
            self._doorman.close()
        for process in self._processes.values():
            _close_stdin(process)

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()

    async def _reap(self) -> None:
        """Force what is still there when the deadline of a stop has passed."""
        await self._stopping.wait()
        await asyncio.sleep(self._drain_s + STOP_GRACE_S)
        log.warning("router.stop_forced", effect="streams that ran on are cut")
        self._kill()

    async def _keep(self, index: int) -> None:
        is_first_life = True
        while not self._stopping.is_set():
            status = await self._run_worker(index)
            if self._stopping.is_set():
                return
            # Later a file that worked is gone, such as one being renewed: the others serve on.
            if status == CONFIG_STATUS and is_first_life:
                self._status = status
                self._stop()
                return
            is_first_life = False
            log.error("edge_worker.crashed", index=index, status=status, action="restarting")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESTART_PAUSE_S):
                    await self._stopping.wait()

    async def _run_worker(self, index: int) -> int:
        """Run one life of one worker; return its exit status."""
        sock_fd = self._doorman.worker_end(index) if self._doorman else self._socket.fileno()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tandem.router.worker"),
            stdin=asyncio.subprocess.PIPE,
            env=os.environ | (self._pool.environment if self._pool else {}),
            pass_fds=[sock_fd],
            # A session of its own: Ctrl-C reaches the parent alone, which stops them in order.
            start_new_session=True,
        )
        self._processes[index] = process
        assert process.stdin is not None
        start = WorkerStart(
            config=self._config,
            index=index,
            socket_fd=sock_fd,
            pool_directory=str(self._pool.directory) if self._pool else "",
            nodes_directory=str(self._files.directory),
        )
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        if self._is_leaving:
            _tell_to_leave(process)
        if self._stopping.is_set():  # the signal came while it started
            _close_stdin(process)
        status = await process.wait()
        if self._doorman is not None:
            self._doorman.worker_gone(index, process.pid)
        return status


def _tell_to_leave(process: asyncio.subprocess.Process) -> None:
    # Closed: it crashed and its successor is yet to start. uvloop raises where asyncio says nothing.
    if process.stdin is not None and not process.stdin.is_closing():
        process.stdin.write(b"\n")


def _close_stdin(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
