"""Building blocks of both agents: a control thread, and one worker per link.

```
 role ── post ─▶ control thread ── submit ─▶ worker: transports, host names, writes, checksums
                   messages, sessions  ◀── result ──┘
```

The control thread answers the heartbeats of all links, so it only moves messages and events. Everything
that may block runs as a job on the link's worker.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tandem.kvtransfer.threads import Poll, start_thread, transport_errors
from tandem.telemetry.log import get_logger
from tandem.wire.channel import Heartbeat, Waker
from tandem.wire.errors import PeerLost, TandemError, TransferFailed
from tandem.wire.generation import Room

log = get_logger("kvtransfer.control")

# Interval at which deadlines are checked; an idle agent costs 0.1 % of a core.
TURN_S = 0.05


T = TypeVar("T")


class ControlThread:
    """Calls `turn` repeatedly in one thread, which owns all state; other threads post calls to it.

    Args:
        turn: Waits for input or the waker, at most `TURN_S`, and handles what arrived.
    """

    def __init__(self, name: str, turn: Callable[[Waker], None]) -> None:
        self._turn = turn
        self._calls: deque[Callable[[], None]] = deque()
        self._waker = Waker()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Queue `call` to run in the control thread, in order of posting. Any thread may call this."""
        self._calls.append(call)
        self._waker.wake()

    def stop(self) -> None:
        """End the thread after its current turn and discard queued calls. Safe to call twice."""
        self._is_stopping = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        while not self._is_stopping:
            self._guarded(lambda: self._turn(self._waker))
            for _ in range(len(self._calls)):
                self._guarded(self._calls.popleft())

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            # Expected errors are handled closer to their cause, so this is a bug. Other links and rooms continue;
            # the affected one ends by its timeout.
            log.exception("kv_control.failed")


class HeartbeatSchedule:
    """Decides when pings are due and when a peer has been silent for too long.

    The heartbeats of ZMTP end the connection of a peer that is dead, stopped or unreachable. libzmq's thread answers
    them, so a peer whose GIL is held stays connected. Our pings detect one that hangs.
    """

    def __init__(self, heartbeat: Heartbeat, now_s: float) -> None:
        self._heartbeat, self._pinged_s = heartbeat, float("-inf")
        self._next_ping_s = now_s

    def is_ping_due(self, now_s: float) -> bool:
        """Return whether a ping is due; if so, schedule the next one an interval later."""
        is_due = now_s >= self._next_ping_s
        if is_due:
            self._pinged_s, self._next_ping_s = now_s, now_s + self._heartbeat.interval_s
        return is_due

    def hasten(self) -> None:
        """Make the next ping due now, but not within `TURN_S` of the last one."""
        self._next_ping_s = min(self._next_ping_s, self._pinged_s + TURN_S)

    def check(self, role: str, interval_s: float, last_received_s: float, now_s: float) -> None:
        """Check that a connected peer sent something within `busy_s`, or 3.5 intervals of the slower end if longer.

        Args:
            interval_s: Interval of the peer's pings; 0: the same as ours.

        Raises:
            PeerLost: It did not.
        """
        silence_s = max(
            self._heartbeat.busy_s, self._heartbeat.silence_s, Heartbeat(interval_s).silence_s
        )
        if now_s - last_received_s > silence_s:
            raise PeerLost(f"{role} was silent for {silence_s:g} s")


# Writes in flight per link: enough that the link never idles while a thread wakes, plans or sleeps. Four writes
# of 8 MiB take 0.7 ms at 400 Gb/s.
MAX_WRITES_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class _Job:
    """One job. A room's queued jobs are discarded when the room is stopped or the worker closed.

    Attributes:
        run: Returns the poll of a write that is still in flight, else None.
        is_write: Whether the job may start while writes are in flight.
    """

    room: Room | None
    run: Callable[[], Poll | None]
    is_write: bool = False


class LinkWorker:
    """Runs the jobs of one link in order, in a dedicated thread.

    Up to `MAX_WRITES_IN_FLIGHT` posted writes overlap. Any other job waits until all of them are complete.
    The outcome of each job is posted to the control thread. Only the control thread may call the methods.

    Raises:
        TransferFailed: The process has reached its limit of threads.
    """

    def __init__(self, name: str, control: ControlThread) -> None:
        self._control = control
        self._jobs: deque[_Job] = deque()
        self._in_flight: deque[tuple[Room | None, Poll]] = deque()  # posted writes, oldest first
        self._running: Room | None = None
        self._is_ended = False
        self._num_open = 0
        self._changed = threading.Condition()
        self._thread = start_thread(name, self._run)  # a daemon: a library call may hang forever

    def submit(
        self,
        job: Callable[[], T],
        then: Callable[[T], None],
        failed: Callable[[TandemError], None],
        room: Room | None = None,
    ) -> None:
        """Queue a job.

        Args:
            then: Called in the control thread with the result of the job.
            failed: Called in the control thread with the error that `job` or `then` raised.
            room: Room that the job belongs to; see `stop` and `close`.
        """
        self._add(_Job(room, partial(self._do, job, then, failed)), num_open=1)

    def write(
        self,
        begin: Callable[[], Poll | None],
        failed: Callable[[TandemError], None],
        room: Room,
    ) -> None:
        """Queue a write.

        Args:
            begin: Starts the write and returns its poll, or None if the write is already complete.
            failed: Called in the control thread with the error that `begin` or the poll raised.
            room: Room that the write belongs to; see `stop` and `close`.
        """
        self._add(_Job(room, partial(self._begin, begin, failed), is_write=True), num_open=1)

    def after(self, call: Callable[[], None]) -> None:
        """Call `call` once all jobs queued so far are done; immediately if there are none."""
        if self._num_open:
            self.submit(lambda: None, lambda _none: call(), lambda _error: None)
        else:
            call()

    def stop(self, room: Room, stopped: Callable[[], None]) -> None:
        """Discard the queued jobs of `room`; post `stopped` after the outcomes of its running jobs."""
        with self._changed:
            self._discard(lambda job: job.room == room)
            if self._running == room or any(each == room for each, _ in self._in_flight):
                self._jobs.appendleft(_Job(None, partial(self._control.post, stopped)))
                return
        self._control.post(stopped)

    def close(self, close_connection: Callable[[], None]) -> None:
        """Discard the queued jobs of rooms and end the thread without waiting for it.

        Args:
            close_connection: Makes running jobs fail. If there are any, it is called immediately, and again after
                they have ended.
        """
        close_connection = partial(_attempt, close_connection, _ignore)
        with self._changed:
            self._discard(lambda job: job.room is not None)
            is_running = self._running is not None or bool(self._in_flight)
        self._add(_Job(None, close_connection))
        self.end()
        if is_running:
            # In its own thread: the control thread answers heartbeats, and a library may block.
            try:
                start_thread("kv-close", close_connection)
            except TransferFailed:  # no thread is available: block the control thread instead
                close_connection()

    def end(self) -> None:
        """End the thread after the jobs queued so far."""
        with self._changed:
            self._is_ended = True
            self._changed.notify()

    @property
    def is_running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; return whether it did."""
        self._thread.join(timeout_s)
        return not self.is_running

    def _add(self, job: _Job, num_open: int = 0) -> None:
        with self._changed:
            self._num_open += num_open
            self._jobs.append(job)
            self._changed.notify()

    def _discard(self, is_discarded: Callable[[_Job], bool]) -> None:
        kept = deque(job for job in self._jobs if not is_discarded(job))
        self._num_open -= len(self._jobs) - len(kept)
        self._jobs = kept

    def _run(self) -> None:
        while (job := self._next()) is not None:
            poll = job.run()
            # Reset only now: the job has posted its outcome, so a `stop` that finds the room running posts its
            # `stopped` after that outcome.
            with self._changed:
                self._running = None
                if poll is not None:
                    self._in_flight.append((job.room, poll))

    def _next(self) -> _Job | None:
        """Return the next job, and poll the writes in flight until it may start."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._in_flight or self._is_ended)
                if self._may_begin():
                    job = self._jobs.popleft()
                    self._running = job.room
                    return job
                if not self._in_flight:
                    return None
                _, poll = self._in_flight[0]
            pause_s = poll()
            with self._changed:
                if pause_s is None:
                    self._in_flight.popleft()
                else:
                    self._changed.wait_for(self._may_begin, pause_s)

    def _may_begin(self) -> bool:
        if not self._jobs:
            return False
        num_in_flight = len(self._in_flight)
        return not num_in_flight or (
            self._jobs[0].is_write and num_in_flight < MAX_WRITES_IN_FLIGHT
        )

    def _begin(
        self,
        begin: Callable[[], Poll | None],
        failed: Callable[[TandemError], None],
    ) -> Poll | None:
        try:
            with transport_errors():
                poll = begin()
        except TandemError as error:
            self._control.post(partial(self._report, partial(failed, error)))
            return None
        if poll is not None:
            return partial(self._poll, poll, failed)
        self._decrement_open()
        return None

    def _poll(self, poll: Poll, failed: Callable[[TandemError], None]) -> float | None:
        """Poll a write; post its error, if any. Success is not posted, because a room's last job is never a write."""
        try:
            with transport_errors():
                pause_s = poll()
        except TandemError as error:
            self._control.post(partial(self._report, partial(failed, error)))
            return None
        if pause_s is None:
            self._decrement_open()
        return pause_s

    def _do(
        self,
        job: Callable[[], T],
        then: Callable[[T], None],
        failed: Callable[[TandemError], None],
    ) -> None:
        try:
            with transport_errors():
                outcome = partial(_attempt, partial(then, job()), failed)
        except TandemError as error:
            outcome = partial(failed, error)
        self._control.post(partial(self._report, outcome))

    def _report(self, outcome: Callable[[], None]) -> None:
        self._decrement_open()
        outcome()

    def _decrement_open(self) -> None:
        with self._changed:
            self._num_open -= 1


def _attempt(call: Callable[[], None], failed: Callable[[TandemError], None]) -> None:
    try:
        with transport_errors():
            call()
    except TandemError as error:
        failed(error)


def _ignore(_error: TandemError) -> None:
    """Do nothing: a connection that cannot be closed is already broken."""
