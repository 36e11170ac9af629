"""How long a test waits for what must come, and a clock for what must not depend on time.

The former is not how soon that must be: a busy machine is no bug.
"""

import time
from collections.abc import Iterator

PATIENCE_S = 50.0
"""What is well comes in a hundredth of it. Below the shortest of the limits that clients have by default,
60 s, so that a test with a shorter one never passes by that."""

_LEAST_LOOKS = 1000  # if a check runs engine steps, one step may take longer than PATIENCE_S


def patiently() -> Iterator[None]:
    """Yield before each check of a condition, until it has certainly failed."""
    deadline_s = time.monotonic() + PATIENCE_S
    num_looks = 0
    while num_looks < _LEAST_LOOKS or time.monotonic() < deadline_s:
        yield
        num_looks += 1


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
