"""Start, watchdog and exit of engine processes, which import torch and may own memory that outlives them."""

import faulthandler
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, NoReturn

from tandem.engine.scheduling.step import StepCounts
from tandem.wire.channel import DESCRIPTORS_PER_LINK, raise_descriptor_limit

# The GIL's switch interval; Python's default is 5 ms. After the last layer the pushing thread waits for the loop's
# thread to release the GIL; that wait directly delays the second token.
SWITCH_S = 0.0005
# Assumed number of peers, which is not known at start-up. Each has a link and up to four transport streams.
NUM_PEERS, DESCRIPTORS_PER_PEER = 64, DESCRIPTORS_PER_LINK + 4
# Number of initial forwards without a time limit: the first of each kind and size may compile or record a graph.
FIRST_FORWARDS = 16
# Minimum interval between restarts of the watchdog. A restart creates a thread, too expensive for every pass.
_REARM_S = 1.0


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection during the imports in this block.

    Otherwise the collector scans all new objects repeatedly, which takes a quarter of torch's import time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def allow_peers() -> None:
    """Raise the limit of file descriptors for links to `NUM_PEERS` nodes; warn if it stays too low."""
    raise_descriptor_limit(NUM_PEERS * DESCRIPTORS_PER_PEER, used_for=f"links to {NUM_PEERS} nodes")


def claim_stdout() -> BinaryIO:
    """Return standard output for exclusive use; redirect all other output to stderr.

    Otherwise gloo would print a message into the stream that the parent reads.
    """
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return own


def end_process(status: int) -> NoReturn:
    """Exit immediately. The caller must have released resources that outlive the process.

    A regular exit takes two seconds to tear down torch's modules.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_process_after(timeout_s: float) -> None:
    """Exit with status 1 after `timeout_s`, even if threads hang, unless the process ends earlier."""
    timer = threading.Timer(timeout_s, os._exit, (1,))
    timer.daemon = True
    timer.start()


class StepWatch:
    """Ends the process if its loop hangs, in a forward or anywhere else.

    It uses Python's watchdog (`faulthandler`), which does not need the GIL. On a timeout the watchdog writes the
    stack of every thread to standard error and ends the process with status 1.

    Args:
        timeout_s: Time limit of one pass of the loop; none until `FIRST_FORWARDS` have been collected.
        steps: Counter of collected forwards.
    """

    def __init__(
        self,
        timeout_s: float,
        steps: StepCounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s, self._steps, self._clock = timeout_s, steps, clock
        self._armed_at = -_REARM_S

    def on_pass(self) -> None:
        """Restart the watchdog for a new pass of the loop."""
        now = self._clock()
        if self._steps.num_collected >= FIRST_FORWARDS and now - self._armed_at >= _REARM_S:
            self._armed_at = now
            faulthandler.dump_traceback_later(
                self._timeout_s + _REARM_S, exit=True, file=sys.stderr
            )

    def stop(self) -> None:
        """Stop the watchdog, because the loop has ended."""
        faulthandler.cancel_dump_traceback_later()
