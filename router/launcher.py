"""The router's parent process: owns the listening socket and the membership, and keeps the edge workers alive.

```
 parent: bind ─▶ start N workers ─▶ restart what crashes ─▶ SIGTERM: Leave ──delay──▶ end their input ─▶ wait ─▶ 0
                     │ a socket pair (`control.py`)            │                        │
 worker: serve ◀─────┘      serve, /health is 503 ◀────────────┘                        │
         finish what is in, exit ◀──────────────────────────────────────────────────────┘

 DNS, Kubernetes, POST /nodes of any worker ─▶ Membership ─▶ NewMembers to every worker
```

Reads nothing of any client. An only worker accepts by itself; connections of several are handed out here
(`doorman.py`).
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import aclosing

import msgspec
import uvloop
from prometheus_client.multiprocess import mark_process_dead

from tandem.frontend.server import listen
from tandem.router.config import RouterConfig
from tandem.router.control import Answers, Ask, Leave, NewMembers, WorkerLink, WorkerStart
from tandem.router.discovery import sources_of
from tandem.router.doorman import Doorman
from tandem.router.membership import Announcement, Membership, Source, listed_members
from tandem.router.worker import CONFIG_STATUS
from tandem.telemetry.log import get_logger
from tandem.wire.channel import PER_LINK, allow_descriptors
from tandem.wire.errors import TandemError

log = get_logger(__name__)

# Beyond the time that streams are given: for cutting them and ending.
STOP_GRACE_S = 2.0
# A person at a keyboard waits for no stream of half a minute.
INTERRUPT_DRAIN_S = 3.0
# Of an edge worker: its link to the engine, and HTTP connections that ask the node what it is.
DESCRIPTORS_PER_NODE = PER_LINK + 2
# Long enough that a worker that cannot start does not fill the log.
RESTART_PAUSE_S = 0.5
# How often announcements that were not repeated are looked for.
LOOK_INTERVAL_S = 1.0
# Between two lives of a source that failed by a bug.
SOURCE_PAUSE_S = 5.0


def run(config: RouterConfig) -> int:
    """Serve until a signal comes; return the exit status.

    Raises:
        ConfigInvalid: The address cannot be listened on, or a source of nodes cannot be set up.
    """
    num_nodes, num_waiting = config.num_listed, config.admission.limits.max_requests
    # Edge workers inherit the limit.
    allow_descriptors(
        num_nodes * DESCRIPTORS_PER_NODE + num_waiting,
        used_for=f"{num_nodes} nodes and {num_waiting} waiting requests",
    )
    sources = sources_of(config)
    with (
        listen(config.host, config.port) as sock,
        _metrics_directory(config.num_workers) as metrics,
    ):
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        log.info(
            "router.listening",
            url=f"{config.http.scheme}://{shown}:{port}",
            num_workers=config.num_workers,
        )
        status: int = uvloop.run(Launcher(config, sock, sources, metrics).run())
        return status


@contextlib.contextmanager
def _metrics_directory(num_workers: int) -> Iterator[str]:
    """Make the directory in which several workers count; readable by this user alone."""
    if num_workers == 1:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="tandem-", ignore_cleanup_errors=True) as directory:
        yield directory


class Launcher:
    """Keeps the edge workers of one router running, and tells them of its nodes.

    Args:
        sock: Listening.
        metrics_directory: Where several workers count; empty for an only one.
    """

    def __init__(
        self,
        config: RouterConfig,
        sock: socket.socket,
        sources: list[Source],
        metrics_directory: str,
    ) -> None:
        self._config, self._socket, self._metrics = config, sock, metrics_directory
        self._sources = sources
        self._membership = Membership(listed_members(config), sources)
        self._members = self._membership.members()
        self._workers = [WorkerLink(index) for index in range(config.num_workers)]
        self._doorman = Doorman(sock, self._workers) if config.num_workers > 1 else None
        self._is_leaving = False
        self._stopping = asyncio.Event()
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._status, self._drain_s = 0, 0.0

    async def run(self) -> int:
        """Run until a signal comes or a new worker finds that the configuration cannot work."""
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
            beside = [tasks.create_task(self._reap()), tasks.create_task(self._look_often())]
            beside += [tasks.create_task(self._follow(source)) for source in self._sources]
            async with asyncio.TaskGroup() as workers:
                for worker in self._workers:
                    workers.create_task(self._keep(worker))
            for task in beside:
                task.cancel()
        return self._status

    # ── its end ──────────────────────────────────────────────────────────────────────────────────

    def _signalled(self, delay_s: float, drain_s: float) -> None:
        if self._is_leaving:  # a second signal forces
            self._kill()
            self._stop()
        else:
            log.info("router.stopping", delay_s=delay_s, drain_s=drain_s)
            self._is_leaving = True
            for worker in self._workers:
                worker.send(Leave())
            asyncio.get_running_loop().call_later(delay_s, self._stop, drain_s)

    def _stop(self, drain_s: float = 0.0) -> None:
        self._drain_s = drain_s
        self._stopping.set()
        if self._doorman is not None:
            self._doorman.close()
        for worker in self._workers:
            worker.stop()

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

    # ── its workers ──────────────────────────────────────────────────────────────────────────────

    async def _keep(self, worker: WorkerLink) -> None:
        is_first_life = True
        while not self._stopping.is_set():
            status = await self._run_worker(worker)
            if self._stopping.is_set():
                return
            # Later a file that worked is gone, such as one being renewed: the others serve on.
            if status == CONFIG_STATUS and is_first_life:
                self._status = status
                self._stop()
                return
            is_first_life = False
            log.error("edge_worker.crashed", index=worker.index, status=status, action="restarting")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESTART_PAUSE_S):
                    await self._stopping.wait()

    async def _run_worker(self, worker: WorkerLink) -> int:
        """Run one life of one worker; return its exit status."""
        doorman, index = self._doorman, worker.index
        sock_fd = doorman.worker_end(index) if doorman else self._socket.fileno()
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "tandem.router.worker"),
                stdin=theirs.fileno(),
                # prometheus_client reads it when it is imported.
                env=os.environ
                | ({"PROMETHEUS_MULTIPROC_DIR": self._metrics} if self._metrics else {}),
                pass_fds=[sock_fd],
                # A session of its own: Ctrl-C reaches the parent alone, which stops them in order.
                start_new_session=True,
            )
        self._processes[index] = process
        start = WorkerStart(
            config=self._config,
            index=index,
            socket_fd=sock_fd,
            members=self._members,
            metrics_directory=self._metrics,
        )
        async with asyncio.TaskGroup() as tasks:
            linked = tasks.create_task(worker.run(ours, start, self._answer, self._catch_up))
            status = await process.wait()
            linked.cancel()
        if doorman is not None:
            # What it counted for /metrics stays.
            mark_process_dead(process.pid, self._metrics)  # type: ignore[no-untyped-call]
            doorman.worker_gone(index)
        return status

    def _catch_up(self, worker: WorkerLink) -> None:
        """Send a worker what happened while it was being started."""
        worker.send(NewMembers(members=self._members))
        if self._is_leaving:
            worker.send(Leave())
        if self._stopping.is_set():
            worker.stop()

    # ── its nodes ────────────────────────────────────────────────────────────────────────────────

    async def _answer(self, worker: WorkerLink, asked: Ask) -> None:
        """Do what a worker asks for."""
        if asked.kind == "announce":
            error = self._announce(msgspec.json.decode(asked.body, type=Announcement))
            info = error.info() if error is not None else None
            worker.send(Answers(number=asked.number, error=info))
            return
        others = [each for each in self._workers if each is not worker and asked.kind != "workers"]
        replies = await asyncio.gather(*(each.ask(asked.kind, asked.body) for each in others))
        worker.send(
            Answers(
                number=asked.number,
                given=[reply for reply in replies if reply is not None],
                silent=[e.index for e, reply in zip(others, replies, strict=True) if reply is None],
                workers=[each.status for each in self._workers],
            )
        )

    def _announce(self, one: Announcement) -> TandemError | None:
        try:
            is_news = self._membership.announce(one)
        except TandemError as error:
            return error
        if is_news and one.is_removed:
            log.info("node.removed", url=one.url, role=one.role, hands_over=one.hands_over)
        elif is_news:
            log.info("node.announced", url=one.url, role=one.role, ttl_s=one.ttl_s)
        self._publish()
        return None

    def _publish(self) -> None:
        """Tell every worker of the members, if they have changed."""
        members = self._membership.members()
        if members != self._members:
            self._members = members
            for worker in self._workers:
                worker.send(NewMembers(members=members))

    async def _look_often(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            now = asyncio.get_running_loop().time()
            for one in self._membership.expire(now, self._is_up):
                if not one.is_removed:
                    log.info("node.silent", url=one.url, ttl_s=one.ttl_s, action="forgetting it")
            self._publish()

    def _is_up(self, url: str) -> bool:
        return any(url in worker.up for worker in self._workers)

    async def _follow(self, source: Source) -> None:
        while True:
            try:
                async with aclosing(source.watch()) as findings:
                    async for members in findings:
                        self._membership.found(source.name, members)
                        self._publish()
            except Exception:  # the top of a source: the workers serve on with the nodes they have
                log.exception("source.failed", source=source.name)
            await asyncio.sleep(SOURCE_PAUSE_S)
