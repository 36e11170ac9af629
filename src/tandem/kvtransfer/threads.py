"""Helpers of transports and agents: threads, polling of writes, errors of a transport's library."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.telemetry.log import get_logger
from tandem.wire.errors import TandemError, TransferFailed

log = get_logger("kvtransfer.threads")

# Time that a closing owner waits for its thread to return from a library call. A hanging call ends with the process.
CLOSE_S = 1.0


@contextmanager
def transport_errors() -> Iterator[None]:
    """Convert every exception of a transport's library in the block to `TransferFailed`.

    Raises:
        TandemError: Raised in the block, or `TransferFailed` for any other exception.
    """
    try:
        yield
    except TandemError:
        raise
    except BaseException as error:  # a panic of a Rust library is not an Exception
        log.exception("kv_transport.failed")
        raise TransferFailed(f"the transport failed: {error!r}") from error


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread that runs `run`, and return it.

    Raises:
        TransferFailed: The process has reached its limit of threads.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise TransferFailed(
            f"{error}: raise the node's limit of threads (ulimit -u, or TasksMax= in a systemd unit)"
        ) from error
    return thread


Poll = Callable[[], float | None]
"""Polls a write: returns the seconds to the next poll, or None when the write is complete."""


def poll_until_done(poll: Poll) -> None:
    """Wait until a write is complete."""
    while (pause_s := poll()) is not None:
        time.sleep(pause_s)
