"""Calls that wait for the device, so that vLLM's thread does not."""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

Call = Callable[[], None]


class DeviceEvent(Protocol):
    """A point in the device's work, as `torch.cuda.Event`."""

    def record(self) -> None:
        """Mark the work that has been queued so far."""

    def synchronize(self) -> None:
        """Wait until the device has done it."""


def _cuda_event() -> DeviceEvent:
    # Blocking, because a spinning wait would take CPU time from the thread that queues the layers.
    event: DeviceEvent = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return event


class DeviceQueue:
    """Runs calls in order in its own thread, each once the device has done the work that was queued before it."""

    def __init__(self, make_event: Callable[[], DeviceEvent] = _cuda_event) -> None:
        self._make_event = make_event
        self._queued: queue.SimpleQueue[tuple[DeviceEvent, Call] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="kv-pushes", daemon=True).start()

    def add(self, call: Call) -> None:
        """Queue a call.

        Raises:
            Exception: What an earlier call or the device has raised. Nothing runs after it.
        """
        if self._error is not None:
            raise self._error
        event = self._make_event()
        event.record()
        self._queued.put((event, call))

    def close(self) -> None:
        """End the thread after the calls that are left. Does not wait: the device may hang."""
        self._queued.put(None)

    def _run(self) -> None:
        while (queued := self._queued.get()) is not None:
            event, call = queued
            try:
                event.synchronize()
                call()
            except Exception as error:  # noqa: BLE001 - `add` raises it in vLLM's thread
                self._error = error
                return
