"""Where a request's time went, as its router sees it: its own phases, and those that nodes tell of. Pure.

```
 queue ─▶ pair ─▶ an attempt: what its nodes tell ─▶ first token ─▶ ...
            ▲          └── it failed: lost_attempt ──┐
            └────────────────────────────────────────┘
```
"""

import time
from collections.abc import Callable, Iterable

from tandem.wire.generation import Phase


class Trail:
    """The phases of one request since the router took it; see `tandem.frontend.timings`.

    Args:
        clock: Monotonic, in seconds.
    """

    __slots__ = ("_attempt", "_clock", "_phases", "_row_s", "_started")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._row_s = 0.0
        self._phases: list[Phase] = []
        # Of the attempt that runs: when it fails, one phase says all of it.
        self._attempt: list[Phase] = []

    def end(self, name: str, node: str = "") -> None:
        """A phase of the router's own ends now; the next begins."""
        now = self._clock() - self._started
        self._phases.append(Phase(name, self._row_s, now - self._row_s, node))
        self._row_s = now

    def heard(self, phases: Iterable[Phase], node: str) -> None:
        """A node of the attempt told where it spent time since it took the request.

        It took it when it was sent, as far as the router knows: clocks of two machines are never compared.
        """
        for phase in phases:
            at_s = self._row_s + phase.start_s
            self._attempt.append(Phase(phase.name, at_s, phase.duration_s, node))

    def lost(self) -> None:
        """The attempt failed."""
        self._attempt.clear()
        self.end("lost_attempt")

    def take(self) -> list[Phase]:
        """Return what has not been told yet."""
        told = self._phases + self._attempt
        self._phases, self._attempt = [], []
        return told
