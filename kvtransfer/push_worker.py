"""The thread that writes for one link, so that no control loop ever waits for a peer."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tandem.kvtransfer.control import start_thread, transport_errors
from tandem.kvtransfer.transports.base import Connection
from tandem.wire.errors import TandemError
from tandem.wire.ids import Room

Done = Callable[[TandemError | None], None]


@dataclass(frozen=True, slots=True)
class _Task:
    room: Room
    job: Callable[[Connection], None]
    done: Done


class PushWorker:
    """Connects, then does one job after another, in the order they came.

    Args:
        connect: Returns the connection; may block, may raise.
        connected: Called from the thread when that is done, with the error if it failed.

    Raises:
        TransferFailed: This process may have no more threads.
    """

    def __init__(self, connect: Callable[[], Connection], connected: Done) -> None:
        self._connect, self._connected = connect, connected
        self._connection: Connection | None = None
        self._tasks: deque[_Task] = deque()
        self._running: Room | None = None
        self._stops: list[tuple[Room, Callable[[], None]]] = []
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = start_thread("kv-push", self._run)

    def submit(self, room: Room, job: Callable[[Connection], None], done: Done) -> None:
        """Queue a job; `done` is called from the thread. After `close` it is forgotten."""
        with self._changed:
            if not self._is_closed:
                self._tasks.append(_Task(room, job, done))
                self._changed.notify()

    def stop(self, room: Room, stopped: Callable[[], None]) -> None:
        """Forget the queued jobs of `room`; `stopped` is called once none of it is running."""
        with self._changed:
            self._tasks = deque(task for task in self._tasks if task.room != room)
            if self._running == room:
                self._stops.append((room, stopped))
                return
        stopped()

    def close(self) -> None:
        """Hang up and end the thread after the job under way, which fails. Does not wait for it."""
        with self._changed:
            self._is_closed = True
            self._tasks.clear()
            self._changed.notify()
            # Where no job is under way, the thread hangs up by itself.
            connection = None if self._running is None else self._connection
        if connection is not None:
            # Not here: our caller answers heartbeats, and a library takes its time.
            hang_up = partial(_attempt, connection.close)
            try:
                threading.Thread(target=hang_up, name="kv-hang-up", daemon=True).start()
            except RuntimeError:  # here after all: this process may have no more threads
                hang_up()

    @property
    def is_running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread to end."""
        self._thread.join()

    def _run(self) -> None:
        error = _attempt(self._open)
        self._connected(error)
        if (connection := self._connection) is None:
            return
        while (task := self._next()) is not None:
            self._settle(task, _attempt(partial(task.job, connection)))
        _attempt(connection.close)

    def _open(self) -> None:
        connection = self._connect()
        with self._changed:
            self._connection = connection  # a `close` from before now is seen by `_next`

    def _next(self) -> _Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._is_closed)
            if self._is_closed:
                return None
            task = self._tasks.popleft()
            self._running = task.room
            return task

    def _settle(self, task: _Task, error: TandemError | None) -> None:
        # The outcome first: a stop that came before it would be answered as if nothing had gone wrong.
        task.done(error)
        with self._changed:
            self._running = None
            stops, self._stops = self._stops, []
        for _, stopped in stops:
            stopped()


def _attempt(job: Callable[[], None]) -> TandemError | None:
    try:
        with transport_errors():
            job()
    except TandemError as error:
        return error
    return None
