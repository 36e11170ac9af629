"""What both agents are made of: a control thread, workers, and an outbox of events for the role's loop.

```
 role ── post ─▶ control thread ── submit ─▶ worker: transports, names, checksums
                   messages, sessions  ◀── result ──┘
```

The control thread answers the heartbeats of all links, so it only moves messages and events: whatever may
take longer is a job of a worker, of which each link has one.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, Protocol, TypeVar

from tandem.telemetry.log import get_logger
from tandem.wire.channel import Waker
from tandem.wire.errors import TandemError, TransferFailed
from tandem.wire.ids import Room

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


class RoomEvent(Protocol):
    """What an agent tells its role."""

    @property
    def room(self) -> Room:
        """The room it is about."""
        ...


E = TypeVar("E", bound=RoomEvent)
T = TypeVar("T")


class Outbox(Generic[E]):
    """Events on their way to the role's loop.

    It settles the race between a role that gives a room up and news that is already queued: of a
    cancelled room the role hears one last thing, `cancelled(room)`, whatever the last thing was.
    `open`, `cancel` and `take` belong to the role's thread, `put` to the agent's.

    Args:
        waker: Rung whenever something is put.
        last: The kinds of event after which a room is over.
        cancelled: Makes the last event of a cancelled room.
    """

    def __init__(
        self, waker: Waker | None, last: tuple[type[E], ...], cancelled: Callable[[Room], E]
    ) -> None:
        self._waker, self._last, self._cancelled_event = waker, last, cancelled
        self._queue: deque[E] = deque()
        self._live: set[Room] = set()
        self._cancelled: set[Room] = set()

    def open(self, room: Room) -> None:
        """Begin to speak of `room`."""
        self._live.add(room)

    def cancel(self, room: Room) -> bool:
        """Note that the role gave `room` up. False when it is over or was cancelled already."""
        is_live = room in self._live and room not in self._cancelled
        if is_live:
            self._cancelled.add(room)
        return is_live

    def put(self, event: E) -> None:
        """Queue an event and ring."""
        self._queue.append(event)
        if self._waker is not None:
            self._waker.wake()

    def take(self) -> Iterator[E]:
        """Yield what is queued, oldest first. What is not taken stays: an error loses no other event."""
        for _ in range(len(self._queue)):
            if (told := self._tell(self._queue.popleft())) is not None:
                yield told

    def _tell(self, event: E) -> E | None:
        is_last = isinstance(event, self._last)
        is_cancelled = event.room in self._cancelled
        if is_last:
            self._live.discard(event.room)
            self._cancelled.discard(event.room)
        if not is_cancelled:
            return event
        return self._cancelled_event(event.room) if is_last else None


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


class Worker:
    """Does one job after another in a thread of its own. The control thread is told what came of each.

    All but the jobs belongs to the control thread.

    Raises:
        TransferFailed: This process may have no more threads.
    """

    def __init__(self, name: str, control: ControlThread) -> None:
        self._control = control
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_open = 0
        start_thread(name, self._run)  # not waited for: a library may hang for good

    def submit(
        self,
        job: Callable[[], T],
        then: Callable[[T], None],
        failed: Callable[[TandemError], None],
    ) -> None:
        """Queue a job; `then` is called with its result, or `failed` with what either of the two raised."""
        self._num_open += 1
        self._jobs.put(lambda: self._do(job, then, failed))

    def after(self, call: Callable[[], None]) -> None:
        """Make a call when the jobs so far are done: at once, if there are none."""
        if self._num_open:
            self.submit(lambda: None, lambda _none: call(), lambda _error: None)
        else:
            call()

    def end(self) -> None:
        """End the thread after the jobs so far."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

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
        self._control.post(partial(self._tell, outcome))

    def _tell(self, outcome: Callable[[], None]) -> None:
        self._num_open -= 1
        outcome()


def _attempt(call: Callable[[], None], failed: Callable[[TandemError], None]) -> None:
    try:
        with transport_errors():
            call()
    except TandemError as error:
        failed(error)
