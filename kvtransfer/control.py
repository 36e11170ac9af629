"""What both agents are made of: a control thread, and a worker for each link.

```
 role ── post ─▶ control thread ── submit ─▶ worker: transports, host names, writes, checksums
                   messages, sessions  ◀── result ──┘
```

The control thread answers the heartbeats of all links, so it only moves messages and events. Whatever
may take longer is a job of the link's worker.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tandem.telemetry.log import get_logger
from tandem.wire.channel import Heartbeat, Waker
from tandem.wire.errors import PeerLost, TandemError, TransferFailed
from tandem.wire.generation import Room

log = get_logger("kvtransfer.control")

# Deadlines are looked at this often; an idle agent costs 0.1 % of a core.
TURN_S = 0.05


@contextmanager
def transport_errors() -> Iterator[None]:
    """Raise `TransferFailed` for whatever a transport's library raises in the block. It may be anything.

    Raises:
        TandemError: What was raised in the block, if it was one, or `TransferFailed`.
    """
    try:
        yield
    except TandemError:
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        log.exception("kv_transport.failed")
        raise TransferFailed(f"the transport failed: {error!r}") from error


T = TypeVar("T")


class ControlThread:
    """Runs `turn` over and over in one thread, which owns all state; others post calls to it.

    Args:
        turn: Waits at most `TURN_S` for something to come, or for the waker, and handles it.
    """

    def __init__(self, name: str, turn: Callable[[Waker], None]) -> None:
        self._turn = turn
        self._calls: deque[Callable[[], None]] = deque()
        self._waker = Waker()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` run in the thread, after those posted before. Any thread may call this."""
        self._calls.append(call)
        self._waker.wake()

    def stop(self) -> None:
        """End the thread after its turn; calls not yet made are forgotten. Safe to call twice."""
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
            # The top of the loop: what is refused on purpose was answered below it, so this is a bug. It is
            # logged, and every other link and room lives on; the one it hit ends by its time limit.
            log.exception("kv_control.failed")


class Rhythm:
    """When to ping all links, and which has been silent for too long.

    ZMTP's own heartbeats do not replace our pings: libzmq's thread answers them for a process that does
    nothing else any more, and a ROUTER hears of no disconnection.
    """

    def __init__(self, heartbeat: Heartbeat, now_s: float) -> None:
        self._heartbeat, self._next_ping_s = heartbeat, now_s

    def is_ping_due(self, now_s: float) -> bool:
        """Tell whether it is time to ping; the next time is an interval later."""
        is_due = now_s >= self._next_ping_s
        if is_due:
            self._next_ping_s = now_s + self._heartbeat.interval_s
        return is_due

    def check(self, who: str, last_heard_s: float, now_s: float) -> None:
        """Look whether a peer is silent.

        Raises:
            PeerLost: It has been, for too long.
        """
        if now_s - last_heard_s > self._heartbeat.silence_s:
            raise PeerLost(f"{who} was silent for {self._heartbeat.silence_s:g} s")


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """Return a thread that runs `run`. The process may end before it does.

    Raises:
        TransferFailed: This process may have no more threads.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise TransferFailed(
            f"{error}: allow this node more (ulimit -u, or TasksMax= in a systemd unit)"
        ) from error
    return thread


# Of the writes of a link, so that it is never idle while a thread wakes, plans or sleeps. Four of 8 MiB take
# 0.7 ms at 400 Gb/s.
MAX_UNDER_WAY = 4


Look = Callable[[], float | None]
"""Looks for the end of a write: returns the seconds until it is to be called again, or None at the end."""


def finish(look: Look) -> None:
    """Wait for the end of a write that was begun."""
    while (pause_s := look()) is not None:
        time.sleep(pause_s)


@dataclass(frozen=True, slots=True)
class _Job:
    """A piece of work. A job of a room is forgotten when the room is stopped or the worker closed.

    Attributes:
        do: Returns what looks for the end of a write that was begun, and None otherwise.
        is_write: Whether it may be begun while other writes are under way.
    """

    room: Room | None
    do: Callable[[], Look | None]
    is_write: bool = False


class Worker:
    """Does the jobs of one link, one after another, in a thread of its own.

    Of writes that go on by themselves a few are under way at a time. Any other job waits for the end of all of them.
    The control thread receives the outcome of each job. Every method belongs to the control thread.

    Raises:
        TransferFailed: This process may have no more threads.
    """

    def __init__(self, name: str, control: ControlThread) -> None:
        self._control = control
        self._jobs: deque[_Job] = deque()
        self._under_way: deque[tuple[Room | None, Look]] = deque()  # writes that were begun
        self._running: Room | None = None
        self._is_ended = False
        self._num_open = 0
        self._changed = threading.Condition()
        self._thread = start_thread(name, self._run)  # not waited for: a library may hang for good

    def submit(
        self,
        job: Callable[[], T],
        then: Callable[[T], None],
        failed: Callable[[TandemError], None],
        room: Room | None = None,
    ) -> None:
        """Queue a job.

        Args:
            then: Called with the result of the job, in the control thread.
            failed: Called with the error that `job` or `then` raised, in the control thread.
            room: What the job is for; see `stop` and `close`.
        """
        self._add(_Job(room, partial(self._do, job, then, failed)), num_open=1)

    def write(
        self,
        begin: Callable[[], Look | None],
        failed: Callable[[TandemError], None],
        room: Room,
    ) -> None:
        """Queue a write.

        Args:
            begin: Returns what looks for the end of the write, or None if it has ended.
            failed: Called with the error that either raised, in the control thread.
            room: What the write is for; see `stop` and `close`.
        """
        self._add(_Job(room, partial(self._begin, begin, failed), is_write=True), num_open=1)

    def after(self, call: Callable[[], None]) -> None:
        """Make a call when the jobs so far are done: at once, if there are none."""
        if self._num_open:
            self.submit(lambda: None, lambda _none: call(), lambda _error: None)
        else:
            call()

    def stop(self, room: Room, stopped: Callable[[], None]) -> None:
        """Forget the queued jobs of `room`; post `stopped` behind the outcomes of those that run."""
        with self._changed:
            self._forget(lambda job: job.room == room)
            if self._running == room or any(each == room for each, _ in self._under_way):
                self._jobs.appendleft(_Job(None, partial(self._control.post, stopped)))
                return
        self._control.post(stopped)

    def close(self, hang_up: Callable[[], None]) -> None:
        """Forget the queued jobs of rooms and end the thread. Does not wait for it.

        Args:
            hang_up: Makes the jobs under way fail. Called twice where there are any.
        """
        with self._changed:
            self._forget(lambda job: job.room is not None)
            is_running = self._running is not None or bool(self._under_way)
        self._add(_Job(None, partial(_attempt, hang_up, _ignore)))
        self.end()
        if is_running:
            # Not here: the control thread answers heartbeats, and a library takes its time.
            try:
                start_thread("kv-hang-up", partial(_attempt, hang_up, _ignore))
            except TransferFailed:  # here after all: this process may have no more threads
                _attempt(hang_up, _ignore)

    def end(self) -> None:
        """End the thread after the jobs so far."""
        with self._changed:
            self._is_ended = True
            self._changed.notify()

    @property
    def is_running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread to end."""
        self._thread.join()

    def _add(self, job: _Job, num_open: int = 0) -> None:
        with self._changed:
            self._num_open += num_open
            self._jobs.append(job)
            self._changed.notify()

    def _forget(self, is_unwanted: Callable[[_Job], bool]) -> None:
        kept = deque(job for job in self._jobs if not is_unwanted(job))
        self._num_open -= len(self._jobs) - len(kept)
        self._jobs = kept

    def _run(self) -> None:
        while (job := self._next()) is not None:
            look = job.do()
            # Behind the outcome: a stop that comes between the two is answered behind it as well.
            with self._changed:
                self._running = None
                if look is not None:
                    self._under_way.append((job.room, look))

    def _next(self) -> _Job | None:
        """Return the next job; look after writes under way until one may begin."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._under_way or self._is_ended)
                if self._may_begin():
                    job = self._jobs.popleft()
                    self._running = job.room
                    return job
                if not self._under_way:
                    return None
                _, look = self._under_way[0]
            pause_s = look()
            with self._changed:
                if pause_s is None:
                    self._under_way.popleft()
                else:
                    self._changed.wait_for(self._may_begin, pause_s)

    def _may_begin(self) -> bool:
        if not self._jobs:
            return False
        num_under_way = len(self._under_way)
        return not num_under_way or (self._jobs[0].is_write and num_under_way < MAX_UNDER_WAY)

    def _begin(
        self,
        begin: Callable[[], Look | None],
        failed: Callable[[TandemError], None],
    ) -> Look | None:
        try:
            with transport_errors():
                look = begin()
        except TandemError as error:
            self._control.post(partial(self._report, partial(failed, error)))
            return None
        if look is not None:
            return partial(self._look, look, failed)
        self._count_off()
        return None

    def _look(self, look: Look, failed: Callable[[TandemError], None]) -> float | None:
        """Look for the end of a write. The control thread hears of errors only: a room's last job is no write."""
        try:
            with transport_errors():
                pause_s = look()
        except TandemError as error:
            self._control.post(partial(self._report, partial(failed, error)))
            return None
        if pause_s is None:
            self._count_off()
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
        self._count_off()
        outcome()

    def _count_off(self) -> None:
        with self._changed:
            self._num_open -= 1


def _attempt(call: Callable[[], None], failed: Callable[[TandemError], None]) -> None:
    try:
        with transport_errors():
            call()
    except TandemError as error:
        failed(error)


def _ignore(_error: TandemError) -> None:
    """A link that cannot be hung up on is gone."""
