"""Which edge worker takes a connection: the parent accepts it and hands it to the least loaded one.

```
 parent:  Doorman   accept ─▶ least_loaded(statuses + what waits) ─▶ descriptor through that worker's door
                                                                      │ a pair of unix sockets
 worker:  Door      ◀──────────────────────────────────────────────────┘ ─▶ aiohttp; its status is kept true
```

One chooser for all connections, so the balance is exact however many come at once; it reads no byte of any client. A
door outlives its worker: connections that wait in it when the worker dies go to another.
"""

import asyncio
import itertools
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from aiohttp import web
from typing_extensions import override

from tandem.frontend.edge import EDGE
from tandem.frontend.server import Listening, cut_off_who_does_not_read, listening
from tandem.router.cluster import Cluster
from tandem.router.control import Status, WorkerLink
from tandem.telemetry.log import get_logger

log = get_logger(__name__)

# Between two looks at other events: a burst of connections delays nothing by more than some ms.
TURN = 64
# After which a connection for which no worker had room is tried again.
PAUSE_S = 0.005
# As asyncio's own servers wait when no descriptor is free.
ACCEPT_RETRY_S = 1.0
# A worker that took nothing from its door for so long is stopped or stuck: others are given more.
STUCK_AFTER_S = 1.0
# Connections are reported as they come and go, streams so often.
REFRESH_S = 0.1


# ── the parent's side ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the choice sees it.

    Attributes:
        num_handed: Connections that it was ever given, taken from its door or not.
        turn: When it was last chosen, in any rising numbers.
        is_stuck: It takes nothing from its door.
    """

    status: Status
    num_handed: int = 0
    turn: int = 0
    is_stuck: bool = False

    @property
    def load(self) -> int:
        """Connections, or streams where one connection asked for several.

        An idle connection counts as much as a busy one: its next request may come at any time, and a worker
        that is slow to begin what it was given must not look free.
        """
        return max(self.num_handed - self.status.num_closed, self.status.num_streams)


def least_loaded(candidates: Sequence[Candidate]) -> int | None:
    """Return the index of the worker to take the next connection; None while none is open.

    One that is stuck, or has not met the nodes yet and would refuse, only where all are so. Between equals the
    one with fewer streams, then the one that waited longest for its turn.
    """

    def order(index: int) -> tuple[bool, bool, int, int, int]:
        one = candidates[index]
        return one.is_stuck, not one.status.is_serving, one.load, one.status.num_streams, one.turn

    is_open = (index for index, candidate in enumerate(candidates) if candidate.status.is_open)
    return min(is_open, key=order, default=None)


class _Doorway:
    """The parent's side of one door: what went through, and whether it was taken."""

    def __init__(self) -> None:
        self.ours, self.workers = socket.socketpair()
        self.ours.setblocking(False)
        self.workers.setblocking(False)
        self.turn = 0
        self._num_handed = self._num_received = 0
        self._moved_at = 0.0

    def candidate(self, status: Status, now: float) -> Candidate:
        is_empty = status.num_received == self._num_handed
        if is_empty or status.num_received != self._num_received:
            self._num_received, self._moved_at = status.num_received, now
        is_stuck = now - self._moved_at > STUCK_AFTER_S
        return Candidate(status, self._num_handed, self.turn, is_stuck)

    def hand(self, connection: socket.socket, turn: int) -> bool:
        """Pass a connection through; False when the door is full."""
        try:
            socket.send_fds(self.ours, [b"c"], [connection.fileno()])
        except OSError:  # full, or as many descriptors are under way as this user may have
            return False
        self._num_handed, self.turn = self._num_handed + 1, turn
        return True

    def clear(self) -> list[socket.socket]:
        """Return what waits in the door of a worker that is gone."""
        self._num_handed = self._num_received = 0
        return [connection for connection in _taken(self.workers) if connection is not None]

    def close(self) -> None:
        self.ours.close()
        self.workers.close()


class Doorman:
    """Accepts the router's connections and hands each to the least loaded worker.

    Args:
        sock: Listening, not blocking.
    """

    def __init__(
        self,
        sock: socket.socket,
        workers: Sequence[WorkerLink],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket, self._workers, self._clock = sock, workers, clock
        self._doorways = [_Doorway() for _ in workers]
        self._held: deque[socket.socket] = deque()
        self._turns = itertools.count(1)
        self._resuming: asyncio.TimerHandle | None = None
        self._is_closed = False

    def worker_end(self, index: int) -> int:
        """Return the descriptor that a worker is started with."""
        return self._doorways[index].workers.fileno()

    def open(self) -> None:
        """Begin to accept."""
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._work)

    def worker_gone(self, index: int) -> None:
        """Give the connections that waited for a worker that is gone to others."""
        if self._is_closed:
            return
        self._held.extend(self._doorways[index].clear())
        if self._held and self._resuming is None:
            self._work()

    def close(self) -> None:
        """Accept no more, and close what no worker took. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._resuming is not None:
            self._resuming.cancel()
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        for doorway in self._doorways:
            doorway.close()
        for connection in self._held:
            connection.close()
        self._held.clear()

    def _work(self) -> None:
        for _ in range(TURN):
            if not self._held and not self._accept():
                return
            if not self._hand(self._held[0]):
                self._pause(PAUSE_S)
                return
            self._held.popleft().close()
        if self._held:  # of a worker that died; nothing else may come to wake us
            self._pause(0)

    def _accept(self) -> bool:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            log.warning("router.accept_failed", reason=error.strerror, retry_s=ACCEPT_RETRY_S)
            self._pause(ACCEPT_RETRY_S)
            return False
        self._held.append(connection)
        return True

    def _hand(self, connection: socket.socket) -> bool:
        now, pairs = self._clock(), zip(self._doorways, self._workers, strict=True)
        index = least_loaded([door.candidate(worker.status, now) for door, worker in pairs])
        return index is not None and self._doorways[index].hand(connection, next(self._turns))

    def _pause(self, pause_s: float) -> None:
        """Leave what comes to the kernel's queue for a while."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        self._resuming = loop.call_later(pause_s, self._resume)

    def _resume(self) -> None:
        self._resuming = None
        self.open()
        self._work()


# ── a worker's side ──────────────────────────────────────────────────────────────────────────────


class Door:
    """A worker's end: takes connections, serves them, and reports its status.

    Args:
        report: Sends the status to the parent.
    """

    def __init__(
        self, sock: socket.socket, cluster: Cluster, report: Callable[[Status], None]
    ) -> None:
        self._socket, self._cluster, self._send = sock, cluster, report
        self._num_received = self._num_closed = 0
        self._adopting: set[asyncio.Task[None]] = set()
        self._is_open = self._is_reporting = False
        self._sent: Status | None = None

    @asynccontextmanager
    async def serving(self, app: web.Application, drain_timeout_s: float) -> AsyncIterator[None]:
        """Serve `app` on the connections that come inside the block; on leaving, drain."""
        loop, options = asyncio.get_running_loop(), app[EDGE].options
        async with listening(app, drain_timeout_s) as http, asyncio.TaskGroup() as tasks:
            adopt = partial(self._adopt, http, options.stall_timeout_s)
            refreshing = tasks.create_task(self._refresh())
            loop.add_reader(self._socket.fileno(), self._receive, tasks, adopt)
            self._is_open = True
            self._report()
            try:
                yield
            finally:
                self._is_open = False
                self._report()
                loop.remove_reader(self._socket.fileno())
                refreshing.cancel()
                # One that has not finished TLS's handshake would hold up the end by its whole timeout.
                for adopting in self._adopting:
                    adopting.cancel()

    def _receive(
        self,
        tasks: asyncio.TaskGroup,
        adopt: Callable[[socket.socket], Coroutine[None, None, None]],
    ) -> None:
        for connection in itertools.islice(_taken(self._socket), TURN):
            self._num_received += 1
            if connection is None:
                self._num_closed += 1
                log.error("edge_worker.connection_lost", reason="no file descriptor is free here")
                continue
            adopting = tasks.create_task(adopt(connection))
            self._adopting.add(adopting)
            adopting.add_done_callback(self._adopting.discard)
        self._report_soon()

    async def _adopt(
        self, http: Listening, stall_timeout_s: float, connection: socket.socket
    ) -> None:
        counted: _Counted | None = None
        try:
            counted = protocol = _Counted(http.protocol(), self._closed)
            connection.setblocking(False)
            cut_off_who_does_not_read(connection, stall_timeout_s)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=http.tls,
                ssl_handshake_timeout=http.handshake_timeout_s,
            )
        except Exception as error:  # the top of a connection: it fails, the worker goes on
            if isinstance(error, OSError):  # the client left on the way, or speaks no TLS
                log.debug("client.gone", reason=error.strerror)
            else:
                log.exception("edge_worker.connection_failed")
            connection.close()
            (self._closed if counted is None else counted.end)()

    def _closed(self) -> None:
        self._num_closed += 1
        self._report_soon()

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self._report()

    def _report_soon(self) -> None:
        """Report once for all that changes in this turn of the loop."""
        if not self._is_reporting:
            self._is_reporting = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        self._is_reporting = False
        status = Status(
            is_open=self._is_open,
            is_serving=self._cluster.is_serving,
            num_received=self._num_received,
            num_closed=self._num_closed,
            num_streams=self._cluster.num_streams,
            pid=os.getpid(),
        )
        if status != self._sent:
            self._sent = status
            self._send(status)


class _Counted(asyncio.Protocol):
    """A connection's protocol, which reports once that it ended: aiohttp itself does not."""

    def __init__(self, protocol: asyncio.Protocol, ended: Callable[[], None]) -> None:
        self._protocol, self._ended = protocol, ended
        self._is_ended = False

    def end(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._ended()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._protocol.connection_made(transport)

    @override
    def data_received(self, data: bytes) -> None:
        self._protocol.data_received(data)

    @override
    def eof_received(self) -> bool | None:
        # What is left of it is a last answer, if any: it weighs nothing.
        self.end()
        return self._protocol.eof_received()

    @override
    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    @override
    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)
        self.end()


def _taken(door: socket.socket) -> Iterator[socket.socket | None]:
    """Yield the connections that wait in a door; None for one that found no free descriptor."""
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(door, 1, 1)
        except BlockingIOError:
            return
        if not data:  # the other end is closed
            return
        yield socket.socket(fileno=descriptors[0]) if descriptors else None
