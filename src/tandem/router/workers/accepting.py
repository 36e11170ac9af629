"""Balances connections between edge workers: the worker with the fewest open connections accepts the next.

All workers accept from one inherited socket, so a worker's crash loses no connection that it has not accepted.
`SO_REUSEPORT` would give each worker a separate queue, which is lost when the worker crashes, stalls while the worker is
suspended, and is filled by a hash, which is uneven for few connections. A parent process that distributes connections
would not know that a worker is suspended.

Without balancing, the worker that wakes first accepts a whole burst. The workers therefore share the number of their open
connections, and a worker with more connections waits for the others. It waits only briefly, so a suspended or busy worker
does not delay connections.
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

from tandem.frontend.http.server import HANDSHAKE_TIMEOUT_S
from tandem.telemetry.log import get_logger

log = get_logger(__name__)

# A running worker accepts well within this time, and no client notices the delay.
YIELD_S = 0.02
POLL_INTERVAL_S = 0.001
# Pause when no file descriptor is left: new connections wait in the socket until an open one is closed.
PAUSE_S = 1.0
# Counts that differ by less than an eighth are treated as equal, so that a burst needs fewer polls.
SLACK_SHARE = 8
# Count of a worker that does not accept: higher than any real count.
AWAY = 0x7FFFFFFF


class OpenConnections:
    """The number of open connections of each worker, in a file that all workers map. `AWAY`: it does not accept.

    Args:
        directory: Directory that the parent created for this pool only.
    """

    def __init__(self, directory: str, num_workers: int) -> None:
        path = Path(directory, "open_connections")
        if not path.exists():  # only in the parent, which runs before the workers
            path.write_bytes(struct.pack("<i", AWAY) * num_workers)
        with path.open("r+b") as file:
            # Each count is one aligned word, so that reads and writes are atomic.
            self._counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("i")

    def publish(self, index: int, num_open: int) -> None:
        """Set the count of one worker."""
        self._counts[index] = num_open

    def others(self, index: int) -> list[int]:
        """Return the counts of all workers except `index`."""
        counts = self._counts.tolist()
        return counts[:index] + counts[index + 1 :]


class Acceptor:
    """Accepts connections in one edge worker."""

    def __init__(self, shared: OpenConnections, index: int) -> None:
        self._shared, self._index = shared, index
        self._beginning = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def accepting(
        self, server: web.Server, sock: socket.socket, tls: ssl.SSLContext | None
    ) -> AsyncIterator[None]:
        """Accept connections for a server inside the block, then close the listening socket in this process.

        Once every worker has closed the socket, the kernel refuses connections and clients try another address.
        """
        self._server, self._socket, self._tls = server, sock, tls
        accepting = asyncio.get_running_loop().create_task(self._accept())
        try:
            yield
        finally:
            for task in (accepting, *self._beginning):
                task.cancel()
            await asyncio.gather(accepting, *self._beginning, return_exceptions=True)
            self._shared.publish(self._index, AWAY)
            sock.close()

    async def _accept(self) -> None:
        while True:
            self._publish()
            await _readable(self._socket)
            takes_all = await self._yield_to_others()
            try:
                while self._accept_one() and takes_all:
                    pass
            except OSError as error:
                log.warning("connection.not_accepted", reason=error.strerror)
                await asyncio.sleep(PAUSE_S)

    async def _yield_to_others(self) -> bool:
        """Wait up to 20 ms for a less loaded worker to accept. Return True if it did not."""
        loop = asyncio.get_running_loop()
        previous, until = list[int](), 0.0
        while True:
            others = self._shared.others(self._index)
            least = min(others)
            if self._publish() <= least + least // SLACK_SHARE:
                return False
            if others != previous:
                previous, until = others, loop.time() + YIELD_S
            elif loop.time() >= until:
                return True
            await asyncio.sleep(POLL_INTERVAL_S)

    def _publish(self) -> int:
        """Share this worker's number of open connections, and return it."""
        num_open = len(self._server.connections) + len(self._beginning)
        self._shared.publish(self._index, num_open)
        return num_open

    def _accept_one(self) -> bool:
        """Accept one connection. Return False if none waits."""
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
        """Complete the TLS handshake, if any, and pass the connection to the server."""
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
    """Wait until a listening socket has a connection to accept."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(sock)
