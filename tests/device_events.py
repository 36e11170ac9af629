"""Stand-ins for the events of a device's stream."""

import threading

from tests.patience import PATIENCE_S


class FakeEvent:
    """An event that completes when the test sets it."""

    def __init__(self) -> None:
        self.is_recorded, self.passed = False, threading.Event()

    def record(self) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded
        assert self.passed.wait(PATIENCE_S)


class PassedEvent(FakeEvent):
    """An event that has already completed."""

    def synchronize(self) -> None:
        assert self.is_recorded


class BrokenEvent(PassedEvent):
    """An event that cannot be waited for."""

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
