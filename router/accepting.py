"""Which of several edge workers accepts the next connection: the one that has the fewest open.

All workers accept from one socket, which they inherited: a connection that no worker has accepted is lost with none of
them. `SO_REUSEPORT` gives each worker a queue of its own, which dies with it, waits while it is stopped, and is filled by
a hash, which is not even for few connections. A parent that hands connections out cannot know that a worker is stopped.

Left alone, the worker that wakes first takes a whole burst. So workers share how many connections each has open, and one
that has more than another gives way to it. Only for a moment: a worker that is stopped or busy holds nobody up.
"""

import asyncio
import mmap
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from tandem.frontend.server import HANDSHAKE_TIMEOUT_S
from tandem.telemetry.log import get_logger

log = get_logger(__name__)

# A worker that runs accepts well within this time. A client would not notice it either.
GIVE_WAY_S = 0.02
LOOK_INTERVAL_S = 0.001
# No descriptor is left: the connections wait in the socket until one is closed.
PAUSE_S = 1.0
# Among many connections a few more or less are even, and a burst needs fewer looks.
SLACK_SHARE = 8
# More than any worker has open.
AWAY = 0x7FFFFFFF


class OpenConnections:
    """How many connections each worker has open, in a file that all of them map. `AWAY`: it does not accept.

    Args:
        directory: Made by the parent, for this pool alone.
    """

    def __init__(self, directory: str, num_workers: int) -> None:
        path = Path(directory, "open_connections")
        if not path.exists():  # the parent is first
            path.write_bytes(struct.pack("<i", AWAY) * num_workers)
        with path.open("r+b") as file:
            # A count is one aligned word: it is read and written whole.
            self._counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("i")

    def note(self, index: int, num_open: int) -> None:
        """Share the count of one worker."""
        self._counts[index] = num_open

    def others(self, index: int) -> list[int]:
        """Return the counts of all workers but one."""
        counts = self._counts.tolist()
        return counts[:index] + counts[index + 1 :]


class Acceptor:
    """Accepts connections in one edge worker, in turn with the others."""

    def __init__(self, shared: OpenConnections, index: int) -> None:
        self._shared, self._index = shared, index
        self._beginning = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def accepting(
        self, server: web.Server, sock: socket.socket, tls: ssl.SSLContext | None
    ) -> AsyncIterator[None]:
        """Accept connections of a listening socket for a server inside the block, then close the socket here.

        Once every worker has closed it, the kernel refuses clients at once, and they try elsewhere.
        """
        self._server, self._socket, self._tls = server, sock, tls
        accepting = asyncio.get_running_loop().create_task(self._accept())
        try:
            yield
        finally:
            for task in (accepting, *self._beginning):
                task.cancel()
            await asyncio.gather(accepting, *self._beginning, return_exceptions=True)
            self._shared.note(self._index, AWAY)
            sock.close()

    async def _accept(self) -> None:
        while True:
            self._note()
            await _readable(self._socket)
            is_alone = await self._give_way()
            try:
                while self._accept_one() and is_alone:
                    pass
            except OSError as error:
                log.warning("connection.not_accepted", reason=error.strerror)
                await asyncio.sleep(PAUSE_S)

    async def _give_way(self) -> bool:
        """Wait while a worker with fewer connections accepts; return whether there is one that does not."""
        loop = asyncio.get_running_loop()
        seen, until = list[int](), 0.0
        while True:
            others = self._shared.others(self._index)
            least = min(others)
            if self._note() <= least + least // SLACK_SHARE:
                return False
            if others != seen:
                seen, until = others, loop.time() + GIVE_WAY_S
            elif loop.time() >= until:
                return True
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _note(self) -> int:
        num_open = len(self._server.connections) + len(self._beginning)
        self._shared.note(self._index, num_open)
        return num_open

    def _accept_one(self) -> bool:
        """Accept a connection; False when none waits."""
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        connection.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._begin(connection))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)
        return True

    async def _begin(self, connection: socket.socket) -> None:
        """Hand a connection to the server, after the handshake of TLS."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._server,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if self._tls else None,
            )
        except (OSError, asyncio.CancelledError) as error:  # TimeoutError and SSLError are OSErrors
            connection.close()
            log.debug("connection.not_begun", reason=str(error))


async def _readable(sock: socket.socket) -> None:
    """Wait until a connection waits in a listening socket."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(sock)
