"""Ends an engine process whose loop hangs: in a forward that never ends, or anywhere else.

The interpreter's own watchdog (`faulthandler`) does it, which needs no lock of the interpreter: it writes where
every thread stands to standard error and ends the process with status 1.
"""

import faulthandler
import sys
import time
from collections.abc import Callable

from tandem.engine.step import StepCounts

# Forwards of each kind and size that compile or record something at their first use come early.
FIRST_FORWARDS = 16
# To wind the watchdog up takes a thread: too much for every pass of the loop.
_REARM_S = 1.0


class StepWatch:
    """A watchdog that the loop winds up again and again.

    Args:
        timeout_s: How long one pass of the loop may take, at least; the first forwards are not limited.
        steps: Tells how many forwards were collected.
    """

    def __init__(
        self,
        timeout_s: float,
        steps: StepCounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s, self._steps, self._clock = timeout_s, steps, clock
        self._armed_at = -_REARM_S

    def turned(self) -> None:
        """The loop begins another pass."""
        now = self._clock()
        if self._steps.num_collected >= FIRST_FORWARDS and now - self._armed_at >= _REARM_S:
            self._armed_at = now
            faulthandler.dump_traceback_later(
                self._timeout_s + _REARM_S, exit=True, file=sys.stderr
            )

    def stop(self) -> None:
        """The loop has ended."""
        faulthandler.cancel_dump_traceback_later()
