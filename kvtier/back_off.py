"""When a tier that failed is asked again. Pure.

```
 UP ──failed──▶ WAITING ──time is up──▶ PROBING ──worked──▶ UP
                   ▲────────failed─────────┘
```
"""

from collections.abc import Callable
from enum import Enum, auto
from random import random

FIRST_S = 0.5
# Requests go on without the tier, so all that a long wait costs is that its return is seen late.
MAX_S = 30.0


class Health(Enum):
    """Whether a tier can be asked."""

    UP = auto()
    WAITING = auto()
    PROBING = auto()


class BackOff:
    """Waits twice as long after each failure.

    Args:
        jitter: Returns numbers from 0 to 1, so that the nodes of a cluster do not come back all at once.

    Attributes:
        until_s: When the waiting ends; of use while it waits.
    """

    def __init__(self, jitter: Callable[[], float] = random) -> None:
        self._jitter = jitter
        self._num_failures = 0
        self.health = Health.UP
        self.until_s = 0.0

    def failed(self, now_s: float) -> None:
        """Note that a call failed. While it waits already, that is the same failure once more."""
        if self.health is Health.WAITING:
            return
        # One that fails again soon after it came back has not recovered.
        if self.health is Health.UP and now_s - self.until_s > MAX_S:
            self._num_failures = 0
        self._num_failures += 1
        delay_s = min(MAX_S, FIRST_S * 2 ** (min(self._num_failures, 16) - 1))
        self.until_s = now_s + delay_s * (0.5 + 0.5 * self._jitter())
        self.health = Health.WAITING

    def probe(self, now_s: float) -> bool:
        """Return whether to ask once, to see: when the waiting is over, and only the first time."""
        if self.health is not Health.WAITING or now_s < self.until_s:
            return False
        self.health = Health.PROBING
        return True

    def worked(self) -> None:
        """Note that the probe was answered. What others were asked before the failure proves nothing."""
        if self.health is Health.PROBING:
            self.health = Health.UP
