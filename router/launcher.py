"""The router's parent process: makes the listening socket, owns the membership, and keeps the edge workers alive.

```
 parent: bind ─▶ start N workers ─▶ restart what crashes ─▶ SIGTERM: leave ──delay──▶ end their input ─▶ wait ─▶ 0
                     │ a socket pair (`control.py`)            │                        │
 worker: serve ◀─────┘      serve, /health is 503 ◀────────────┘                        │
         finish what is in, exit ◀──────────────────────────────────────────────────────┘

 DNS, Kubernetes, POST /nodes of any worker ─▶ Membership ─▶ Members to every worker
```

It reads nothing of any client: workers inherit the socket and accept from it themselves (`accepting.py`). A connection
that no worker has accepted waits in the socket, whichever worker dies.
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

from tandem.frontend.server import listen
from tandem.router.accepting import AWAY, OpenConnections
from tandem.router.config import RouterConfig
from tandem.router.control import Answers, Kind, Link, Question, WorkerStart
from tandem.router.discovery import sources_of
from tandem.router.membership import Announcement, Membership, Source, SourceFailed, listed_members
from tandem.router.worker import CONFIG_STATUS
from tandem.telemetry.log import get_logger
from tandem.wire.channel import PER_LINK, allow_descriptors
from tandem.wire.errors import TandemError

log = get_logger(__name__)

_URLS = msgspec.json.Decoder(frozenset[str])

# Beyond the time that streams are given: for cutting them and ending.
STOP_GRACE_S = 2.0
# A person at a keyboard waits for no stream of half a minute.
INTERRUPT_DRAIN_S = 3.0
# Of an edge worker: its link to the engine, and HTTP connections that ask the node what it is.
DESCRIPTORS_PER_NODE = PER_LINK + 2
RESTART_PAUSE_S = 0.5
# In a row, of every worker: then the router ends, for whatever supervises it.
MAX_FAILED_STARTS = 3
# How often announcements that were not repeated are looked for.
LOOK_INTERVAL_S = 1.0
# Kubernetes lets its own answers be kept for 5 s; a node that is up must serve within as many.
SOURCE_INTERVAL_S = 2.0


def run(config: RouterConfig) -> int:
    """Serve until a signal comes; return the exit status. Raises `ConfigInvalid`."""
    num_nodes = len(config.prefills) + len(config.decodes)
    num_waiting = config.admission.limits.max_requests
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


class Worker:
    """One edge worker, over all of its lives.

    Attributes:
        link: To its process; None while there is none.
        is_ready: It accepts connections.
        num_failed: Lives in a row that ended before it did.
        up: The URLs of nodes that it can use.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: asyncio.subprocess.Process | None = None
        self.num_failed = 0
        self.reset()

    def reset(self) -> None:
        """Forget its last life."""
        self.link: Link | None = None
        self.is_ready, self.up = False, frozenset[str]()

    def note_ready(self, _body: msgspec.Raw) -> None:
        """It accepts connections."""
        self.is_ready, self.num_failed = True, 0

    def note_up(self, body: msgspec.Raw) -> None:
        """These are the nodes that it can use now."""
        self.up = _URLS.decode(body)

    def tell(self, kind: Kind, body: object = None) -> None:
        """Send a message; a worker that is not there misses it."""
        if self.link is not None:
            self.link.tell(kind, body)

    def stop(self) -> None:
        """End the input of the worker: it is to stop. Safe to call twice."""
        if self.link is not None:
            self.link.end()

    def kill(self) -> None:
        """Kill its process, if it has one."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    async def ask(self, question: Question) -> bytes | None:
        """Return the worker's reply as JSON; None when there is none in time."""
        if self.link is None:
            return None
        try:
            return await self.link.ask(question.kind, question.body)
        except (TimeoutError, TandemError):
            return None


class Launcher:
    """Keeps the edge workers of one router running, and sends them its nodes.

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
        self._workers = [Worker(index) for index in range(config.num_workers)]
        self._connections = (
            OpenConnections(metrics_directory, config.num_workers) if metrics_directory else None
        )
        self._is_leaving = self._is_forced = False
        self._stopping = asyncio.Event()
        self._status, self._drain_s = 0, 0.0

    async def run(self) -> int:
        """Run until a signal comes or the workers cannot start; return the exit status."""
        loop = asyncio.get_running_loop()
        config = self._config
        for number, delay_s, drain_s in (
            (signal.SIGTERM, config.shutdown_delay_s, config.drain_timeout_s),
            (signal.SIGINT, 0.0, min(INTERRUPT_DRAIN_S, config.drain_timeout_s)),
        ):
            loop.add_signal_handler(number, self._signalled, delay_s, drain_s)
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
            self._tell_all("leave")
            asyncio.get_running_loop().call_later(delay_s, self._stop, drain_s)

    def _stop(self, drain_s: float = 0.0) -> None:
        self._drain_s = drain_s
        self._stopping.set()
        self._socket.close()
        for worker in self._workers:
            worker.stop()

    def _kill(self) -> None:
        self._is_forced = True  # a worker that is being started is killed once it has a process
        for worker in self._workers:
            worker.kill()

    async def _reap(self) -> None:
        """Force what is still there when the deadline of a stop has passed."""
        await self._stopping.wait()
        await asyncio.sleep(self._drain_s + STOP_GRACE_S)
        log.warning("router.stop_forced", effect="streams that ran on are cut")
        self._kill()

    # ── its workers ──────────────────────────────────────────────────────────────────────────────

    def _tell_all(self, kind: Kind, body: object = None) -> None:
        for worker in self._workers:
            worker.tell(kind, body)

    async def _keep(self, worker: Worker) -> None:
        is_first_life = True
        while not self._stopping.is_set():
            try:
                status, has_served = await self._run_worker(worker)
            except (
                OSError
            ) as error:  # no process, memory or descriptor is left: other workers serve on
                log.error("edge_worker.not_started", index=worker.index, reason=str(error))  # noqa: TRY400
                status, has_served = 1, False
            if self._stopping.is_set():
                return
            worker.num_failed += not has_served
            # Later a file that worked may be gone for a moment, such as one being renewed.
            is_wrong = status == CONFIG_STATUS and is_first_life
            if is_wrong or all(each.num_failed >= MAX_FAILED_STARTS for each in self._workers):
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

    async def _run_worker(self, worker: Worker) -> tuple[int, bool]:
        """Run one life of one worker; return its exit status, and whether it accepted connections."""
        ours, theirs = socket.socketpair()
        socket_fd = self._socket.fileno()
        with theirs:
            try:
                process = await self._spawned(theirs.fileno(), socket_fd)
            except OSError:
                ours.close()
                raise
        worker.process = process
        if self._is_forced:
            worker.kill()
        link = await self.linked(worker, ours, socket_fd)
        async with asyncio.TaskGroup() as tasks:
            linked = tasks.create_task(link.run())
            status = await process.wait()
            linked.cancel()
        has_served = worker.is_ready
        worker.reset()
        if self._connections is not None:
            self._connections.note(worker.index, AWAY)
        if self._metrics:
            # What it counted for /metrics stays.
            mark_process_dead(process.pid, self._metrics)  # type: ignore[no-untyped-call]
        return status, has_served

    async def _spawned(self, stdin_fd: int, socket_fd: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tandem.router.worker"),
            stdin=stdin_fd,
            # prometheus_client reads it when it is imported.
            env=os.environ | ({"PROMETHEUS_MULTIPROC_DIR": self._metrics} if self._metrics else {}),
            pass_fds=[socket_fd],
            # A session of its own: Ctrl-C reaches the parent alone, which stops them in order.
            start_new_session=True,
        )

    async def linked(self, worker: Worker, sock: socket.socket, socket_fd: int) -> Link:
        """Link a new life of a worker and send its start; the caller runs the link."""
        link = worker.link = await Link.over(sock)
        link.on_told = {
            "ready": worker.note_ready,
            "up": worker.note_up,
        }
        link.on_asked = {
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
            )
        )
        if self._is_leaving:
            worker.tell("leave")
        if self._stopping.is_set():
            worker.stop()
        return link

    async def _ask_others(self, asking: Worker, body: msgspec.Raw) -> Answers:
        question = msgspec.json.decode(body, type=Question)
        others = [each for each in self._workers if each is not asking]
        replies = await asyncio.gather(*(each.ask(question) for each in others))
        return Answers(
            given=[msgspec.Raw(reply) for reply in replies if reply is not None],
            silent=[e.index for e, reply in zip(others, replies, strict=True) if reply is None],
        )

    # ── its nodes ────────────────────────────────────────────────────────────────────────────────

    async def _announce(self, body: msgspec.Raw) -> None:
        """Take an announcement and publish it, before the worker that asked is answered."""
        one = msgspec.json.decode(body, type=Announcement)
        is_news = self._membership.announce(one)
        if is_news and one.is_removed:
            log.info("node.removed", url=one.url, role=one.role, hands_over=one.hands_over)
        elif is_news:
            log.info("node.announced", url=one.url, role=one.role, ttl_s=one.ttl_s)
        self._publish()

    def _publish(self) -> None:
        """Send every worker the members, if they have changed."""
        members = self._membership.members()
        if members != self._members:
            self._members = members
            self._tell_all("members", members)

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
        """Ask a source for its nodes again and again; while it fails, its nodes stay."""
        while True:
            problem = ""
            try:
                self._membership.found(source.name, await source.find())
            except SourceFailed as failed:
                problem = str(failed)
            except Exception as error:  # the top of a source: the workers serve on
                log.exception("source.broken", source=source.name)
                problem = str(error) or type(error).__name__
            if self._membership.note_problem(source.name, problem):
                if problem:
                    see = "tandem docs membership"
                    log.warning("source.failed", source=source.name, reason=problem, see=see)
                else:
                    log.info("source.follows", source=source.name)
            self._publish()
            await asyncio.sleep(SOURCE_INTERVAL_S)
