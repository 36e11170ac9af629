"""How long a test waits for a condition, the waiting itself, and a clock that a test sets.

The limit is not how soon a condition must hold: a busy machine is no bug.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator

PATIENCE_S = 50.0
"""A healthy condition holds within a hundredth of it. Below the shortest default timeout of clients, 60 s, so that
a test of a shorter timeout never passes because of the default."""

_PAUSE_S = 0.005
# If a check runs engine steps, one step may take longer than PATIENCE_S.
_MIN_CHECKS = 1000


def patiently(within_s: float | None = None) -> Iterator[None]:
    """Yield before each check of a condition, until it has certainly failed.

    Args:
        within_s: Timeout that the test asserts; None: PATIENCE_S and at least `_MIN_CHECKS` checks.
    """
    deadline_s = time.monotonic() + (PATIENCE_S if within_s is None else within_s)
    min_checks = _MIN_CHECKS if within_s is None else 1
    num_checks = 0
    while num_checks < min_checks or time.monotonic() < deadline_s:
        yield
        num_checks += 1


def _pause() -> None:
    time.sleep(_PAUSE_S)


def eventually(
    condition: Callable[[], object],
    step: Callable[[], object] = _pause,
    within_s: float | None = None,
) -> bool:
    """Return whether a condition becomes true in time.

    Args:
        step: Runs between two checks; the default sleeps.
        within_s: See `patiently`.
    """
    for _ in patiently(within_s):
        if condition():
            return True
        step()
    return False


def until(
    condition: Callable[[], object], step: Callable[[], object] = _pause, what: str = ""
) -> None:
    """Wait until a condition is true; fail with `what` was expected."""
    assert eventually(condition, step), what or "the condition did not become true"


async def until_async(condition: Callable[[], object], within_s: float = PATIENCE_S) -> float:
    """Wait until a condition, which may be a coroutine function, is true. Return the seconds on the loop's clock.

    Raises:
        TimeoutError: The condition did not become true in time.
    """
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    async with asyncio.timeout(within_s):
        while True:
            is_true = condition()
            if inspect.isawaitable(is_true):
                is_true = await is_true
            if is_true:
                return loop.time() - begun_s
            await asyncio.sleep(_PAUSE_S)


class Clock:
    """A clock that a test sets.

    Args:
        per_read_s: Seconds by which each read advances it.
    """

    def __init__(self, now_s: float = 0.0, per_read_s: float = 0.0) -> None:
        self.now_s, self._per_read_s = now_s, per_read_s

    def __call__(self) -> float:
        self.now_s += self._per_read_s
        return self.now_s
