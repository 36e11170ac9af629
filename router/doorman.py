"""Who takes a connection: the parent accepts it and hands it to the least loaded edge worker.

```
 parent:  Doorman   accept ─▶ least_loaded(rows + what waits) ─▶ descriptor through that worker's door
                                                                      │ a pair of unix sockets
 worker:  Door      ◀──────────────────────────────────────────────────┘ ─▶ aiohttp; its row is kept true
```

One chooser for all connections, so the balance is exact however many come at once; it reads no byte of
any client. A door outlives its worker: what waits in it when the worker dies goes to another. The
worker's end is `door.py`.
"""

import asyncio
import itertools
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.router.door import TURN, taken
from tandem.router.pool import Pool, Row
from tandem.telemetry.log import get_logger

log = get_logger(__name__)

# After which a connection for which no worker had room is tried again.
PAUSE_S = 0.005
# As asyncio's own servers wait when no descriptor is free.
ACCEPT_RETRY_S = 1.0
# A worker that took nothing from its door for so long is stopped or stuck: others are given more.
STUCK_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the choice sees it.

    Attributes:
        row: What it says of itself.
        num_handed: Connections that it was ever given, taken from its door or not.
        turn: When it was last chosen, in any rising numbers.
        is_stuck: It takes nothing from its door.
    """

    row: Row
    num_handed: int = 0
    turn: int = 0
    is_stuck: bool = False

    @property
    def load(self) -> int:
        """Connections, or streams where one connection asked for several.

        An idle connection counts as much as a busy one: its next request comes when it likes, and
        a worker that is slow to begin what it was given must not look free for it.
        """
        return max(self.num_handed - self.row.num_closed, self.row.num_streams)


def least_loaded(candidates: Sequence[Candidate]) -> int | None:
    """Return the index of the worker to take the next connection; None while none is open.

    One that is stuck, or has not met the nodes yet and would refuse, only where all are so. Between
    equals the one with fewer streams, then the one that waited longest for its turn.
    """

    def order(index: int) -> tuple[bool, bool, int, int, int]:
        one = candidates[index]
        return one.is_stuck, not one.row.is_serving, one.load, one.row.num_streams, one.turn

    is_open = (index for index, candidate in enumerate(candidates) if candidate.row.is_open)
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

    def candidate(self, row: Row, now: float) -> Candidate:
        is_empty = row.num_received == self._num_handed
        if is_empty or row.num_received != self._num_received:
            self._num_received, self._moved_at = row.num_received, now
        is_stuck = now - self._moved_at > STUCK_AFTER_S
        return Candidate(row, self._num_handed, self.turn, is_stuck)

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
        return [connection for connection in taken(self.workers) if connection is not None]

    def close(self) -> None:
        self.ours.close()
        self.workers.close()


class Doorman:
    """Accepts the router's connections and hands each to the least loaded worker.

    Args:
        sock: Listening, not blocking.
    """

    def __init__(
        self, sock: socket.socket, pool: Pool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._socket, self._pool, self._clock = sock, pool, clock
        self._doorways = [_Doorway() for _ in range(pool.num_workers)]
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

    def worker_gone(self, index: int, pid: int) -> None:
        """Forget a worker that is gone and give what waited for it to others."""
        self._pool.forget(index, pid)
        if self._is_closed:
            return
        self._held.extend(self._doorways[index].clear())
        if self._held and self._resuming is None:
            self._work()

    def close(self) -> None:
        """Accept no more, and close what nobody took. Safe to call twice."""
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
        now = self._clock()
        index = least_loaded(
            [door.candidate(self._pool.row(i), now) for i, door in enumerate(self._doorways)]
        )
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
