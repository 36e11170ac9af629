"""Processes that can die, be stopped and go on, and what runs in them: callbacks, never at once.

A process has its own context, so that whatever is made while its code runs (a socket, a thread) knows
whose it is.
"""

import contextvars

CURRENT: contextvars.ContextVar["Process"] = contextvars.ContextVar("process")


class Process:
    """One life of one node or router.

    Attributes:
        host: Where it runs; a restart is another process on the same host.
        is_dead: It does nothing any more, and nothing it says leaves.
        is_stopped: As by SIGSTOP: what would run in it waits.
    """

    def __init__(self, world, host: str) -> None:
        self.world, self.host = world, host
        self.is_dead = self.is_stopped = False
        self.connections = []
        self.jobs = []  # workers with a write under way
        self.worker = None  # the one whose job runs
        self._waiting = []
        self.context = contextvars.copy_context()
        self.context.run(CURRENT.set, self)

    def __repr__(self) -> str:
        state = "dead" if self.is_dead else "stopped" if self.is_stopped else "running"
        return f"<Process {self.host} {state}>"

    def later(self, delay_s: float, call) -> None:
        """Have `call` run in it, unless it dies before."""
        self.world.loop.call_later(delay_s, self._run, call, context=self.context)

    def go_on(self) -> None:
        """End a stop: what waited runs, in its order."""
        self.is_stopped = False
        waiting, self._waiting = self._waiting, []
        for i, call in enumerate(waiting):
            self.later(1e-6 * (i + 1), call)

    def _run(self, call) -> None:
        if self.is_dead:
            return
        if self.is_stopped:
            self._waiting.append(call)
        else:
            call()


class Repeated:
    """A loop of a process: makes a pass when it is woken, or after as long as the last pass said.

    Args:
        turn: One pass; returns the seconds until the next if nothing wakes it.
    """

    def __init__(self, process: Process, turn) -> None:
        self._process, self._turn = process, turn
        self._due_s = None
        self._number = 0
        self._is_ended = False

    def wake(self) -> None:
        """Make the next pass soon."""
        self._schedule(self._process.world.latency())

    def end(self) -> None:
        """Make no more passes."""
        self._is_ended = True

    def _schedule(self, delay_s: float) -> None:
        due_s = self._process.world.loop.time() + delay_s
        if self._is_ended or (self._due_s is not None and self._due_s <= due_s):
            return
        self._due_s = due_s
        self._number += 1
        number = self._number
        self._process.later(delay_s, lambda: self._pass(number))

    def _pass(self, number: int) -> None:
        if number == self._number and not self._is_ended:
            self._due_s = None
            self._schedule(self._turn())
