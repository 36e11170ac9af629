"""How the processes of an engine start, are watched, and end. They import torch, and hold memory that outlives them."""

import faulthandler
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, NoReturn

from tandem.engine.step import StepCounts
from tandem.wire.channel import PER_LINK, allow_descriptors

# How long a thread in the interpreter makes another wait. The pushing thread waits for the loop's after the
# last layer, when every tenth of a millisecond is in the time to the second token; Python's own is 5 ms.
SWITCH_S = 0.0005
# The number of peers is not known before. Each has a link, and up to four streams of its transport.
NUM_PEERS, DESCRIPTORS_PER_PEER = 64, PER_LINK + 4
# Forwards of each kind and size that compile or record something at their first use come early.
FIRST_FORWARDS = 16
# Restarting the watchdog takes a thread: too much for every pass of the loop.
_REARM_S = 1.0


@contextmanager
def uncollected() -> Iterator[None]:
    """Import inside this block without the garbage collector.

    It would look at all new objects again and again: a quarter of the time of importing torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def allow_peers() -> None:
    """Let this process have as many links as it may; warn when they will be few."""
    allow_descriptors(NUM_PEERS * DESCRIPTORS_PER_PEER, used_for=f"links to {NUM_PEERS} nodes")


def claim_stdout() -> BinaryIO:
    """Return standard output for the caller alone; what libraries print there goes to stderr.

    gloo prints a greeting, in the middle of what the parent reads.
    """
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return own


def end_process(status: int) -> NoReturn:
    """End this process at once; what outlives it must be released before.

    Taking torch's modules apart takes two seconds.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_process_after(timeout_s: float) -> None:
    """End this process with status 1 then, whatever its threads wait for, unless it ended before."""
    timer = threading.Timer(timeout_s, os._exit, (1,))
    timer.daemon = True
    timer.start()


class StepWatch:
    """Ends a process whose loop hangs, in a forward that never ends or anywhere else.

    The interpreter's own watchdog (`faulthandler`) does it, which needs no lock of the interpreter: it writes
    where every thread stands to standard error and ends the process with status 1.

    Args:
        timeout_s: How long one pass of the loop may take, at least; the first forwards are not limited.
        steps: Counts the forwards that were collected.
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
        """Start the time of another pass."""
        now = self._clock()
        if self._steps.num_collected >= FIRST_FORWARDS and now - self._armed_at >= _REARM_S:
            self._armed_at = now
            faulthandler.dump_traceback_later(
                self._timeout_s + _REARM_S, exit=True, file=sys.stderr
            )

    def stop(self) -> None:
        """Stop watching: the loop has ended."""
        faulthandler.cancel_dump_traceback_later()
