"""The router's parent process: opens the listening socket, owns the membership, and restarts crashed edge workers.

```
 parent: bind ─▶ start N workers ─▶ restart what crashes ─▶ SIGTERM: leave ──delay──▶ end their input ─▶ wait ─▶ 0
                     │ a socket pair (`control.py`)            │                        │
 worker: serve ◀─────┘      serve, /health is 503 ◀────────────┘                        │
         finish requests, exit ◀────────────────────────────────────────────────────────┘

 DNS, POST /nodes of any worker ─▶ Membership ─▶ Members to every worker
```

It reads no client data: workers inherit the socket and accept connections themselves (`accepting.py`). A connection
that no worker has accepted stays in the socket when a worker crashes.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator

import msgspec
import uvloop
from prometheus_client.multiprocess import mark_process_dead

from tandem.frontend.http.server import listen
from tandem.router.config import RouterConfig
from tandem.router.control import Question, QuestionKind, WorkerLink, WorkerReplies, WorkerStart
from tandem.router.key_limits import release_requests
from tandem.router.membership.membership import (
    Announcement,
    Membership,
    NodeSource,
    SourceFailed,
    listed_members,
)
from tandem.router.membership.sources import sources_of
from tandem.router.workers.accepting import AWAY, OpenConnections
from tandem.router.workers.adapter import AdapterProcess, adapted
from tandem.router.workers.worker import CONFIG_STATUS
from tandem.telemetry.log import get_logger
from tandem.wire.channel import DESCRIPTORS_PER_LINK, raise_descriptor_limit
from tandem.wire.errors import TandemError

log = get_logger(__name__)

_URLS = msgspec.json.Decoder(frozenset[str])

# Time to cancel streams and exit, after the drain timeout.
STOP_GRACE_S = 2.0
# After Ctrl-C a user does not want to wait for long streams.
INTERRUPT_DRAIN_S = 3.0
# File descriptors of one worker for one node: its ZMQ link and two HTTP connections.
DESCRIPTORS_PER_NODE = DESCRIPTORS_PER_LINK + 2
RESTART_PAUSE_S = 0.5
# Shortest wait for the first pair, if any: a worker connects within milliseconds to nodes that are up.
FIRST_PAIR_TIMEOUT_S = 2.0
# When every worker fails to start this many times in a row, the router exits and leaves the rest to its supervisor.
MAX_FAILED_STARTS = 3
# Interval of checks for expired announcements.
EXPIRY_INTERVAL_S = 1.0
# Kubernetes' DNS records have a TTL of 5 s; a new node must serve within about that time.
SOURCE_INTERVAL_S = 2.0


def run(config: RouterConfig) -> int:
    """Serve until a signal arrives; return the exit status. Raises `ConfigInvalid`."""
    num_nodes = len(config.prefills) + len(config.decodes)
    num_waiting = config.admission.limits.max_requests
    # Edge workers inherit the limit.
    raise_descriptor_limit(
        num_nodes * DESCRIPTORS_PER_NODE + num_waiting,
        used_for=f"{num_nodes} nodes and {num_waiting} waiting requests",
    )
    sources = sources_of(config)
    with (
        listen(config.host, config.port) as sock,
        _metrics_directory(config.num_workers) as metrics,
        adapted(config) as (with_nodes, adapter),
    ):
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        log.info(
            "router.listening",
            url=f"{config.http.scheme}://{shown}:{port}",
            num_workers=config.num_workers,
        )
        status: int = uvloop.run(EdgeLauncher(with_nodes, sock, sources, metrics, adapter).run())
        return status


@contextlib.contextmanager
def _metrics_directory(num_workers: int) -> Iterator[str]:
    """Create the directory of shared counters, readable only by this user; empty for a single worker."""
    if num_workers == 1:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="tandem-", ignore_cleanup_errors=True) as directory:
        yield directory


class EdgeWorker:
    """One edge worker, across restarts of its process.

    Attributes:
        link: Link to its process; None while no process runs.
        is_ready: Whether it accepts connections.
        num_failed: Consecutive processes that ended before they were ready.
        up: URLs of nodes that it can use.
        has_had_nodes: Whether it, or a process before it, could use a node.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: asyncio.subprocess.Process | None = None
        self.num_failed = 0
        self.has_had_nodes = False
        self.reset()

    def reset(self) -> None:
        """Discard the state of its last process."""
        self.link: WorkerLink | None = None
        self.is_ready, self.up = False, frozenset[str]()

    def note_ready(self, _body: msgspec.Raw) -> None:
        """Record that the worker accepts connections."""
        self.is_ready, self.num_failed = True, 0

    def note_up(self, body: msgspec.Raw) -> None:
        """Record the nodes that the worker can use now."""
        self.up = _URLS.decode(body)
        self.has_had_nodes |= bool(self.up)

    def send(self, kind: QuestionKind, body: object = None) -> None:
        """Send a message; it is dropped if no process runs."""
        if self.link is not None:
            self.link.send(kind, body)

    def stop(self) -> None:
        """Stop the worker by ending its input. Safe to call twice."""
        if self.link is not None:
            self.link.end()

    def kill(self) -> None:
        """Kill the process, if one runs."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    async def ask(self, question: Question) -> bytes | None:
        """Return the worker's reply as JSON; None if it does not reply in time."""
        if self.link is None:
            return None
        try:
            return await self.link.ask(question.kind, question.body)
        except (TimeoutError, TandemError):
            return None


class EdgeLauncher:
    """Keeps the edge workers of one router running, and sends them the members.

    Args:
        sock: Listening socket.
        metrics_directory: Directory of shared counters; empty for a single worker.
        adapter: Process that serves some of the nodes; None: there is none.
    """

    def __init__(
        self,
        config: RouterConfig,
        sock: socket.socket,
        sources: list[NodeSource],
        metrics_directory: str,
        adapter: AdapterProcess | None = None,
    ) -> None:
        self._adapter = adapter
        self._config, self._socket, self._metrics = config, sock, metrics_directory
        self._sources = sources
        self._membership = Membership(listed_members(config), sources)
        self._members = self._membership.members()
        self._workers = [EdgeWorker(index) for index in range(config.num_workers)]
        self._connections = (
            OpenConnections(metrics_directory, config.num_workers) if metrics_directory else None
        )
        self._is_leaving = self._is_forced = False
        self._stopping = asyncio.Event()
        self._status, self._drain_s = 0, 0.0

    async def run(self) -> int:
        """Run until a signal arrives or the workers cannot start; return the exit status."""
        loop = asyncio.get_running_loop()
        config = self._config
        for number, delay_s, drain_s in (
            (signal.SIGTERM, config.shutdown_delay_s, config.drain_timeout_s),
            (signal.SIGINT, 0.0, min(INTERRUPT_DRAIN_S, config.drain_timeout_s)),
        ):
            loop.add_signal_handler(number, self._on_signal, delay_s, drain_s)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._force_stop()),
                tasks.create_task(self._expire_announcements()),
                *(tasks.create_task(self._follow(source)) for source in self._sources),
            ]
            if self._adapter is not None:
                background.append(tasks.create_task(self._adapter.supervise()))
            async with asyncio.TaskGroup() as workers:
                for worker in self._workers:
                    workers.create_task(self._supervise(worker))
            for task in background:
                task.cancel()
        return self._status

    # ── shutdown ─────────────────────────────────────────────────────────────────────────────────

    def _on_signal(self, delay_s: float, drain_s: float) -> None:
        if self._is_leaving:  # a second signal forces the stop
            self._kill()
            self._stop()
        else:
            log.info("router.stopping", delay_s=delay_s, drain_s=drain_s)
            self._is_leaving = True
            self._send_all("leave")
            asyncio.get_running_loop().call_later(delay_s, self._stop, drain_s)

    def _stop(self, drain_s: float = 0.0) -> None:
        self._drain_s = drain_s
        self._stopping.set()
        self._socket.close()
        for worker in self._workers:
            worker.stop()

    def _kill(self) -> None:
        self._is_forced = True  # a worker that is starting is killed once its process exists
        for worker in self._workers:
            worker.kill()

    async def _force_stop(self) -> None:
        """Kill workers that still run when the deadline of a stop has passed."""
        await self._stopping.wait()
        await asyncio.sleep(self._drain_s + STOP_GRACE_S)
        log.warning("router.stop_forced", effect="running streams are cut")
        self._kill()

    # ── workers ──────────────────────────────────────────────────────────────────────────────────

    def _send_all(self, kind: QuestionKind, body: object = None) -> None:
        for worker in self._workers:
            worker.send(kind, body)

    async def _supervise(self, worker: EdgeWorker) -> None:
        is_first_life = True
        while not self._stopping.is_set():
            try:
                status, has_served = await self._run_worker(worker)
            except OSError as error:
                # The machine has run out of processes, memory or file descriptors. Other workers continue.
                log.error("edge_worker.not_started", index=worker.index, reason=str(error))  # noqa: TRY400
                status, has_served = 1, False
            if self._stopping.is_set():
                return
            worker.num_failed += not has_served
            # An invalid configuration is fatal only at the first start: later, a file may be missing for a moment, such
            # as a certificate that is being renewed.
            is_invalid = status == CONFIG_STATUS and is_first_life
            if is_invalid or all(each.num_failed >= MAX_FAILED_STARTS for each in self._workers):
                log.critical(
                    "router.cannot_start", status=status, num_failed_starts=worker.num_failed
                )
                self._status = status if status > 0 else 1
                self._stop()
                return
            is_first_life = False
            log.error("edge_worker.crashed", index=worker.index, status=status, action="restarting")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESTART_PAUSE_S):
                    await self._stopping.wait()

    async def _run_worker(self, worker: EdgeWorker) -> tuple[int, bool]:
        """Run one process of a worker; return its exit status, and whether it accepted connections."""
        ours, theirs = socket.socketpair()
        socket_fd = self._socket.fileno()
        with theirs:
            try:
                process = await self._spawn(theirs.fileno(), socket_fd)
            except OSError:
                ours.close()
                raise
        worker.process = process
        if self._is_forced:
            worker.kill()
        link = await self.open_link(worker, ours, socket_fd)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(link.run())
            status = await process.wait()
            running.cancel()
        has_served = worker.is_ready
        worker.reset()
        if self._connections is not None:
            self._connections.publish(worker.index, AWAY)
            release_requests(self._metrics, worker.index)
        if self._metrics:
            # Its counters stay in /metrics; only its gauges are dropped.
            mark_process_dead(process.pid, self._metrics)  # type: ignore[no-untyped-call]
        return status, has_served

    async def _spawn(self, stdin_fd: int, socket_fd: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tandem.router.workers.worker"),
            stdin=stdin_fd,
            # prometheus_client reads this variable when it is imported.
            env=os.environ | ({"PROMETHEUS_MULTIPROC_DIR": self._metrics} if self._metrics else {}),
            pass_fds=[socket_fd],
            # In a separate session, Ctrl-C reaches only the parent, which stops the workers in order.
            start_new_session=True,
        )

    async def open_link(
        self, worker: EdgeWorker, sock: socket.socket, socket_fd: int
    ) -> WorkerLink:
        """Open the link to a worker's new process and send its start; the caller runs the link."""
        link = worker.link = await WorkerLink.over(sock)
        link.message_handlers = {
            "ready": worker.note_ready,
            "up": worker.note_up,
            "refuse": lambda prompt: self._send_all("refuse", prompt),
        }
        link.question_handlers = {
            "announce": self._announce,
            "others": lambda body: self._ask_others(worker, body),
        }
        link.send_start(
            WorkerStart(
                config=self._config,
                index=worker.index,
                socket_fd=socket_fd,
                members=self._members,
                metrics_directory=self._metrics,
                pair_wait_s=self._pair_wait_s(worker),
            )
        )
        if self._is_leaving:
            worker.send("leave")
        if self._stopping.is_set():
            worker.stop()
        return link

    def _pair_wait_s(self, worker: EdgeWorker) -> float:
        """Return how long a worker's process may wait for a pair: before, it would reject requests that can be served."""
        if worker.has_had_nodes:
            return max(FIRST_PAIR_TIMEOUT_S, self._config.node_wait_s)
        return FIRST_PAIR_TIMEOUT_S if len(self._workers) > 1 else 0.0

    async def _ask_others(self, asking: EdgeWorker, body: msgspec.Raw) -> WorkerReplies:
        question = msgspec.json.decode(body, type=Question)
        others = [each for each in self._workers if each is not asking]
        replies = await asyncio.gather(*(each.ask(question) for each in others))
        return WorkerReplies(
            bodies=[msgspec.Raw(reply) for reply in replies if reply is not None],
            silent=[e.index for e, reply in zip(others, replies, strict=True) if reply is None],
        )

    # ── members ──────────────────────────────────────────────────────────────────────────────────

    async def _announce(self, body: msgspec.Raw) -> None:
        """Apply an announcement and publish the members, before the asking worker gets its reply."""
        announcement = msgspec.json.decode(body, type=Announcement)
        url, role = announcement.url, announcement.role
        is_new = self._membership.announce(announcement)
        if is_new and announcement.is_removed:
            log.info("node.removed", url=url, role=role, hands_over=announcement.hands_over)
        elif is_new:
            log.info("node.announced", url=url, role=role, ttl_s=announcement.ttl_s)
        self._publish()

    def _publish(self) -> None:
        """Send the members to every worker, if they have changed."""
        members = self._membership.members()
        if members != self._members:
            self._members = members
            self._send_all("members", members)

    async def _expire_announcements(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            now = asyncio.get_running_loop().time()
            for expired in self._membership.expire(now, self._is_up):
                if not expired.is_removed:
                    log.info(
                        "node.silent", url=expired.url, ttl_s=expired.ttl_s, action="removing it"
                    )
            self._publish()

    def _is_up(self, url: str) -> bool:
        return any(url in worker.up for worker in self._workers)

    async def _follow(self, source: NodeSource) -> None:
        """Poll a source for its nodes. While it fails, its last nodes stay."""
        while True:
            problem = ""
            try:
                self._membership.update_source(source.name, await source.find())
            except SourceFailed as failed:
                problem = str(failed)
            except Exception as error:  # a broken source must not stop the workers
                log.exception("source.broken", source=source.name)
                problem = str(error) or type(error).__name__
            if self._membership.note_problem(source.name, problem):
                if problem:
                    see = "docs/membership.md"
                    log.warning("source.failed", source=source.name, reason=problem, see=see)
                else:
                    log.info("source.follows", source=source.name)
            self._publish()
            await asyncio.sleep(SOURCE_INTERVAL_S)
