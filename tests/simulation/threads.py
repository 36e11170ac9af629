"""What stands in for threads: callbacks of the process that made them, at times of their own."""

from collections import deque
from functools import partial

import tandem.kvtransfer.control
from tandem.kvtransfer.control import Worker
from tandem.kvtransfer.push_worker import _attempt as attempt
from tandem.telemetry.log import get_logger
from tandem.wire.errors import PeerLost
from tests.simulation.processes import CURRENT, Repeated
from tests.simulation.sockets import SimulatedWaker

log = get_logger("kvtransfer.control")

# Deadlines are looked at this often. The real thread does it five times as often, and finds nothing.
TURN_S = 0.25
# While a connection is being made; that it stands rings, too.
CONNECTING_TURN_S = 0.05


class SimulatedControlThread:
    """See `tandem.kvtransfer.control.ControlThread`."""

    def __init__(self, name, turn) -> None:
        del name
        self._turn = turn
        self._calls = deque()
        self._passes = Repeated(CURRENT.get(), self._run)
        self._waker = SimulatedWaker(self._passes.wake)

    def start(self) -> None:
        self._passes.wake()

    def post(self, call) -> None:
        self._calls.append(call)
        self._passes.wake()

    def stop(self) -> None:
        self._passes.end()

    def _run(self) -> float:
        self._guarded(lambda: self._turn(self._waker))
        if self._calls:  # another turn follows at once
            self._passes.wake()
        for _ in range(len(self._calls)):
            self._guarded(self._calls.popleft())
        is_idle = self._waker.timeout_s >= tandem.kvtransfer.control.TURN_S
        return TURN_S if is_idle else CONNECTING_TURN_S

    def _guarded(self, call) -> None:
        try:
            call()
        except Exception:
            log.exception("kv_control.failed")


class SimulatedPushWorker:
    """See `tandem.kvtransfer.push_worker.PushWorker`. A write takes a while, and its bytes move at the end of it.

    That is the worst moment: whoever reuses a page under a write finds it overwritten, and whoever
    reuses the page that is read has the wrong bytes sent.
    """

    def __init__(self, connect, connected) -> None:
        self._connect, self._connected = connect, connected
        self._process = CURRENT.get()
        self._world = self._process.world
        self._connection = None
        self._tasks = deque()
        self._running = None
        self._number = 0
        self._stops = []
        self._is_closed = False
        self._process.later(self._world.latency(), self._open)

    @property
    def is_running(self) -> bool:
        return not self._is_closed

    def join(self) -> None:
        """There is no thread."""

    def submit(self, room, job, done) -> None:
        if not self._is_closed:
            self._tasks.append((room, job, done))
            self._next()

    def stop(self, room, stopped) -> None:
        self._tasks = deque(task for task in self._tasks if task[0] != room)
        if self._running is not None and self._running[0] == room:
            self._stops.append(stopped)
        else:
            stopped()

    def close(self) -> None:
        self._is_closed = True
        self._tasks.clear()
        if self._connection is not None:
            self._connection.close()
            if self._running is not None:  # it fails
                self._process.later(self._world.latency(), partial(self._end, self._number))

    def _open(self) -> None:
        def connect():
            self._connection = self._connect()

        self._connected(attempt(connect))
        if self._is_closed and self._connection is not None:
            self._connection.close()
        self._next()

    def _next(self) -> None:
        if self._running is None and self._connection is not None and self._tasks:
            self._running = self._tasks.popleft()
            self._world.note(
                "write begins", f"{self._process.host} room {self._running[0] % 1000}", "w"
            )
            self._process.jobs.append(self)
            self._number += 1
            self._process.later(self._world.write_s(), partial(self._end, self._number))

    def finish_of_the_dead(self) -> None:
        """The process died in the middle of a write, and the bytes were on their way."""
        _, job, _ = self._running
        attempt(lambda: job(self._connection))

    def _end(self, number: int, num_tries: int = 0) -> None:
        if number != self._number or self._running is None:
            return
        far, here = self._connection.far, self._process.host
        if self._world.network.is_cut(here, far.host) and not self._is_closed:
            if num_tries < 10:
                self._process.later(0.3, partial(self._end, number, num_tries + 1))
                return
            self._connection.close()
        room, job, done = self._running
        self._process.jobs.remove(self)
        error = (
            PeerLost("its process is gone")
            if far.is_dead
            else attempt(lambda: job(self._connection))
        )
        self._world.note("write ends", f"{here} room {room % 1000} {error or ''}", "w")
        self._running = None
        stops, self._stops = self._stops, []
        done(error)
        for stopped in stops:
            stopped()
        self._next()


class SimulatedWorker(Worker):
    """Its jobs take a while. The last job of a link is its fence, which takes longer."""

    def __init__(self, name, control) -> None:
        del name
        self._control, self._process = control, CURRENT.get()
        self._jobs, self._num_open, self._is_busy, self._is_ended = deque(), 0, False, False

    def submit(self, job, then, failed) -> None:
        self._num_open += 1
        self._jobs.append(partial(self._do, job, then, failed))
        self._next()

    def end(self) -> None:
        self._is_ended = True

    def _next(self) -> None:
        if self._jobs and not self._is_busy:
            self._is_busy = True
            self._process.later(self._process.world.latency(), self._begin)

    def _begin(self) -> None:
        is_fence = self._is_ended and len(self._jobs) == 1
        self._process.later(self._process.world.fence_s() if is_fence else 0.0, self._finish)

    def _finish(self) -> None:
        job = self._jobs.popleft()
        self._is_busy = False
        job()
        self._next()
