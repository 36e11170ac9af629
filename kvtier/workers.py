"""Threads that make the calls of one tier, or the copies from and to the pool, so that no loop waits."""

import threading
import time
from collections import deque
from collections.abc import Callable

from tandem.kvtier.calls import Call


class Workers:
    """What a request waits for comes before what it does not.

    Args:
        name: Of the threads.
        do: Makes a call; raises nothing.
        num_urgent: Threads that do only what a request waits for; one more does both.
    """

    def __init__(self, name: str, do: Callable[[Call], None], num_urgent: int) -> None:
        self._do = do
        self._urgent: deque[Call] = deque()
        self._others: deque[Call] = deque()
        self._is_stopped = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(takes_all,), name=name, daemon=True)
            for takes_all in [*[False] * num_urgent, True]
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Call, *, is_urgent: bool) -> None:
        """Queue a call; after `stop` it is forgotten."""
        with self._changed:
            if not self._is_stopped:
                (self._urgent if is_urgent else self._others).append(call)
                self._changed.notify_all()

    def stop(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._is_stopped = True
            self._urgent.clear()
            self._others.clear()
            self._changed.notify_all()

    def join(self, until_s: float | None = None) -> bool:
        """Wait for the calls under way, until `time.monotonic()` is that; return whether they ended."""
        for thread in self._threads:
            thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, takes_all: bool) -> None:
        while (call := self._next(takes_all=takes_all)) is not None:
            self._do(call)

    def _next(self, *, takes_all: bool) -> Call | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopped or self._urgent or (takes_all and self._others)
            )
            if self._is_stopped:
                return None
            return self._urgent.popleft() if self._urgent else self._others.popleft()


class Alarm:
    """A thread that calls back when a time has come. Any thread may set it."""

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float]) -> None:
        self._ring, self._clock = ring, clock
        self._due_s: float | None = None
        self._is_stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kv-tiers-alarm", daemon=True)
        self._thread.start()

    def set(self, due_s: float | None) -> None:
        """Ring then, or not at all; the last call counts."""
        with self._changed:
            # A later time is seen when the earlier one has come: it need not wake the thread.
            is_earlier = due_s is not None and (self._due_s is None or due_s < self._due_s)
            self._due_s = due_s
            if is_earlier:
                self._changed.notify()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._wait():
            self._ring()

    def _wait(self) -> bool:
        with self._changed:
            while not self._is_stopped:
                left_s = None if self._due_s is None else self._due_s - self._clock()
                if left_s is not None and left_s <= 0:
                    self._due_s = None  # whoever is rung sets the next
                    return True
                self._changed.wait(left_s)
            return False
