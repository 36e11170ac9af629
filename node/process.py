"""Start, watchdog and end of engine processes, which import torch and may own memory that outlives them."""

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

# The GIL's switch interval; Python's default is 5 ms. After the last layer the pushing thread waits for the loop's
# thread to release the GIL, which directly delays the second token.
SWITCH_S = 0.0005
# The number of peers is unknown at the start. Each peer has a link and up to four transport streams.
NUM_PEERS, DESCRIPTORS_PER_PEER = 64, PER_LINK + 4
# Forwards without a time limit: the first ones of each kind and size may compile or record something.
FIRST_FORWARDS = 16
# Minimum interval of restarting the watchdog. A restart starts a thread, too expensive for every pass of the loop.
_REARM_S = 1.0


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection during the imports in this block.

    The collector would scan all new objects repeatedly: a quarter of the time of importing torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def allow_peers() -> None:
    """Raise this process's limit of file descriptors for links to `NUM_PEERS` nodes; warn if it stays too low."""
    allow_descriptors(NUM_PEERS * DESCRIPTORS_PER_PEER, used_for=f"links to {NUM_PEERS} nodes")


def claim_stdout() -> BinaryIO:
    """Return standard output for the caller's exclusive use; other output to it goes to stderr.

    Otherwise gloo would print a greeting into the stream that the parent reads.
    """
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return own


def end_process(status: int) -> NoReturn:
    """End this process at once. The caller must have released resources that outlive a process.

    A regular exit spends two seconds on tearing down torch's modules.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_process_after(timeout_s: float) -> None:
    """End this process with status 1 after `timeout_s`, even if threads hang, unless it ends earlier."""
    timer = threading.Timer(timeout_s, os._exit, (1,))
    timer.daemon = True
    timer.start()


class StepWatch:
    """Ends a process whose loop hangs in a forward or anywhere else.

    It uses Python's watchdog (`faulthandler`), which does not need the GIL. On a timeout the watchdog writes the
    stack of every thread to standard error and ends the process with status 1.

    Args:
        timeout_s: Time that one pass of the loop may take; no limit until `FIRST_FORWARDS` were collected.
        steps: Counts the collected forwards.
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
        """Restart the watchdog for a new pass of the loop."""
        now = self._clock()
        if self._steps.num_collected >= FIRST_FORWARDS and now - self._armed_at >= _REARM_S:
            self._armed_at = now
            faulthandler.dump_traceback_later(
                self._timeout_s + _REARM_S, exit=True, file=sys.stderr
            )

    def stop(self) -> None:
        """Stop watching: the loop has ended."""
        faulthandler.cancel_dump_traceback_later()
