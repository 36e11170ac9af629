"""What stands in for threads: callbacks of the process that made them, at times of their own."""

from collections import deque
from functools import partial

import tandem.kvtransfer.agents.control
from tandem.kvtransfer.agents.control import LinkWorker
from tandem.kvtransfer.threads import poll_until_done
from tandem.telemetry.log import get_logger
from tests.simulation.processes import CURRENT, Repeated
from tests.simulation.sockets import SimulatedWaker

log = get_logger("kvtransfer.control")

# Deadlines are looked at this often. The real thread does it five times as often, and finds nothing.
TURN_S = 0.25
# While a connection is being made; that it stands rings, too.
CONNECTING_TURN_S = 0.05


class SimulatedControlThread:
    """See `tandem.kvtransfer.agents.control.ControlThread`."""

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
        is_idle = self._waker.timeout_s >= tandem.kvtransfer.agents.control.TURN_S
        return TURN_S if is_idle else CONNECTING_TURN_S

    def _guarded(self, call) -> None:
        try:
            call()
        except Exception:
            log.exception("kv_control.failed")


class SimulatedWorker(LinkWorker):
    """See `tandem.kvtransfer.agents.control.LinkWorker`. Its jobs take a while.

    A job of a room is a write, whose bytes move at the end of it. That is the worst moment: whoever reuses a
    page under a write finds it overwritten, and whoever reuses the page that is read has the wrong bytes sent.
    The last job of a link at decode is its fence, which takes longer than others.

    Attributes:
        connection: What it writes through, once it has connected.
    """

    def __init__(self, name, control) -> None:
        del name
        self._control, self._process = control, CURRENT.get()
        self._world = self._process.world
        self.connection = None
        self._jobs, self._num_open = deque(), 0
        self._running, self._number, self._stops = None, 0, []
        self._is_ended = self._is_closed = False

    @property
    def is_running(self) -> bool:
        return not self._is_closed

    def join(self) -> None:
        """There is no thread."""

    def submit(self, job, then, failed, room=None) -> None:
        if self._is_closed:
            return
        self._num_open += 1
        self._jobs.append((room, partial(self._do, job, then, failed)))
        self._next()

    def write(self, begin, failed, room) -> None:
        """One after the other: what several under way have in common is tested with the thread."""

        def do() -> None:
            if (poll := begin()) is not None:
                poll_until_done(poll)

        self.submit(do, lambda _none: None, failed, room)

    def _decrement_open(self) -> None:
        self._num_open -= 1  # there is no thread to lock out

    def stop(self, room, stopped) -> None:
        self._jobs = deque(job for job in self._jobs if job[0] != room)
        if self._running is not None and self._running[0] == room:
            self._stops.append(stopped)
        else:
            self._control.post(stopped)

    def end(self) -> None:
        self._is_ended = True

    def close(self, close_connection) -> None:
        self._is_closed = True
        self._jobs = deque(job for job in self._jobs if job[0] is None)
        close_connection()
        if self._running is not None and self._running[0] is not None:  # it fails
            self._process.later(self._world.latency(), partial(self._finish, self._number))

    def finish_of_the_dead(self) -> None:
        """The process died in the middle of a write, and the bytes were on their way."""
        self._running[1]()

    def _next(self) -> None:
        if self._running is not None or not self._jobs:
            return
        self._running = self._jobs.popleft()
        self._number += 1
        if self._running[0] is None:
            self._process.later(self._world.latency(), partial(self._begin, self._number))
        else:
            self._note("write begins")
            self._process.jobs.append(self)
            self._process.later(self._world.write_s(), partial(self._finish, self._number))

    def _begin(self, number) -> None:
        is_fence = self._is_ended and not self._jobs
        delay_s = self._world.fence_s() if is_fence else 0.0
        self._process.later(delay_s, partial(self._finish, number))

    def _finish(self, number, num_tries: int = 0) -> None:
        if number != self._number or self._running is None:
            return
        room, job = self._running
        if room is not None:
            is_cut = self._world.network.is_cut(self._process.host, self.connection.far.host)
            if is_cut and not self._is_closed:
                if num_tries < 10:
                    self._process.later(0.3, partial(self._finish, number, num_tries + 1))
                    return
                self.connection.close()
            self._process.jobs.remove(self)
        self._process.worker = self
        job()
        if room is not None:
            self._note("write ends")
        elif self._is_closed and self.connection is not None:
            self.connection.close()
        self._running = None
        stops, self._stops = self._stops, []
        for stopped in stops:
            self._control.post(stopped)
        self._next()

    def _note(self, what) -> None:
        self._world.note(what, f"{self._process.host} room {self._running[0] % 1000}", "w")
