"""What has a process that imports torch and transformers start and end sooner."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def uncollected() -> Iterator[None]:
    """Import inside: the garbage collector does not look meanwhile.

    It would look at hundreds of thousands of new objects again and again, all of which stay: a quarter of the
    time that torch and transformers take to import.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def end_process(status: int) -> NoReturn:
    """End this process at once: whoever calls this has given back what outlives a process.

    The interpreter would take every module apart first, which with torch and transformers was measured to
    take two seconds of a core: time for which a node that was told to end is waited for.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
