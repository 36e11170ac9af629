"""A worker's end of its door: takes the connections that the parent hands it, and counts them.

Who is handed a connection is `doorman.py`'s to say.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from aiohttp import web
from typing_extensions import override

from tandem.frontend.edge import EDGE
from tandem.frontend.server import Listening, cut_off_who_does_not_read, listening
from tandem.router.pool import Pool, Row
from tandem.telemetry.log import get_logger

log = get_logger(__name__)

# Between two looks at other events: a burst of connections delays nothing by more than some ms.
TURN = 64
# Connections are counted as they come and go, streams so often.
REFRESH_S = 0.1


class Served(Protocol):
    """What stands behind a door, as the worker's row tells it."""

    @property
    def is_serving(self) -> bool:
        """Whether requests can be served now."""
        ...

    @property
    def num_streams(self) -> int:
        """How many generations run now."""
        ...


class Door:
    """A worker's end: takes connections, serves them, and keeps the worker's row true."""

    def __init__(self, sock: socket.socket, pool: Pool, index: int, served: Served) -> None:
        self._socket, self._pool, self._index = sock, pool, index
        self._served = served
        self._num_received = self._num_closed = 0
        self._adopting: set[asyncio.Task[None]] = set()
        self._is_open = False

    @asynccontextmanager
    async def serving(self, app: web.Application, drain_timeout_s: float) -> AsyncIterator[None]:
        """Serve `app` on the connections that come inside the block; on leaving, drain."""
        loop, options = asyncio.get_running_loop(), app[EDGE].options
        async with listening(app, drain_timeout_s) as http, asyncio.TaskGroup() as tasks:
            adopt = partial(self._adopt, http, options.stall_timeout_s)
            refreshing = tasks.create_task(self._refresh())
            loop.add_reader(self._socket.fileno(), self._receive, tasks, adopt)
            self._is_open = True
            self._write()
            try:
                yield
            finally:
                self._is_open = False
                self._write()
                loop.remove_reader(self._socket.fileno())
                refreshing.cancel()
                # Who has not finished TLS's handshake would hold up the end by its whole timeout.
                for adopting in self._adopting:
                    adopting.cancel()

    def _receive(
        self,
        tasks: asyncio.TaskGroup,
        adopt: Callable[[socket.socket], Coroutine[None, None, None]],
    ) -> None:
        for connection in itertools.islice(taken(self._socket), TURN):
            self._num_received += 1
            if connection is None:
                self._num_closed += 1
                log.error("edge_worker.connection_lost", reason="no file descriptor is free here")
                continue
            adopting = tasks.create_task(adopt(connection))
            self._adopting.add(adopting)
            adopting.add_done_callback(self._adopting.discard)
        self._write()

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
        self._write()

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self._write()

    def _write(self) -> None:
        row = Row(
            is_open=self._is_open,
            is_serving=self._served.is_serving,
            num_received=self._num_received,
            num_closed=self._num_closed,
            num_streams=self._served.num_streams,
            pid=os.getpid(),
        )
        self._pool.write(self._index, row)


class _Counted(asyncio.Protocol):
    """A connection's protocol, which tells once that it ended. aiohttp itself tells nobody."""

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


def taken(door: socket.socket) -> Iterator[socket.socket | None]:
    """Yield the connections that wait in a door; None for one that found no free descriptor."""
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(door, 1, 1)
        except BlockingIOError:
            return
        if not data:  # the other end is closed
            return
        yield socket.socket(fileno=descriptors[0]) if descriptors else None
