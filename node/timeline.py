"""Where a request's time went at this node: measured by roles, told with its first and last token."""

import time
from collections.abc import Callable

from tandem.wire.generation import Phase

# A prompt of more chunks than this tells the rest of them as one.
MAX_CHUNKS = 64


class Timeline:
    """The phases of one request since the node took it.

    Phases of a row follow each other without a gap: each begins where the one before ended. Those
    beside the row have times of their own.

    Args:
        clock: Monotonic, in seconds.
    """

    __slots__ = ("_chunks", "_clock", "_is_begun", "_phases", "_row_s", "_started")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._row_s = 0.0
        self._is_begun = False
        self._phases: list[Phase] = []
        self._chunks: list[Phase] = []

    def now(self) -> float:
        """Return the seconds since the node took the request."""
        return self._clock() - self._started

    def end(self, name: str) -> None:
        """The next phase of the row ends now."""
        now = self.now()
        self._phases.append(Phase(name, self._row_s, now - self._row_s))
        self._row_s = now

    def computed(self, began: float) -> None:
        """A chunk of the prompt was computed since `began`, by the clock; the first ends the wait for it."""
        start_s, now = max(began - self._started, self._row_s), self.now()
        # Once: what is computed again after a retraction is no wait for the first token.
        if not self._is_begun:
            self._is_begun = True
            self._phases.append(Phase("prefill_queue", self._row_s, start_s - self._row_s))
            self._row_s = start_s
        if len(self._chunks) == MAX_CHUNKS:
            start_s = self._chunks.pop().start_s
        self._chunks.append(Phase("prefill_chunk", start_s, now - start_s))

    def beside(self, name: str, start_s: float) -> None:
        """Something beside the row that began at `start_s` ends now."""
        self._phases.append(Phase(name, start_s, self.now() - start_s))

    def take(self) -> list[Phase]:
        """Return what has not been told yet."""
        told, self._phases = self._phases + self._chunks, []
        self._chunks = []
        return told
