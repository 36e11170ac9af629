"""How long a test waits for what must come, and a clock for what must not depend on time.

The former is not how soon that must be: a busy machine is no bug.
"""

import time
from collections.abc import Iterator

PATIENCE_S = 50.0
"""What is well comes in a hundredth of it. Below the shortest of the limits that clients have by default,
60 s, so that a test with a shorter one never passes by that."""

_LEAST_LOOKS = (
    1000  # where a look takes steps of an engine, one of them may take longer than all patience
)


def patiently() -> Iterator[None]:
    """Yield for each look at what must come, until it is plain that it does not."""
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
