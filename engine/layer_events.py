"""Tells when a layer's K and V are in the pool, where the host runs ahead of the device.

A forward on a GPU is only queued when attention returns. So an event is queued behind each layer,
and a thread of its own waits for one after another.
"""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from engine.forward import Wrote


class DeviceEvent(Protocol):
    """A mark in a stream, as `torch.cuda.Event` is."""

    def record(self) -> None:
        """Put it behind what is queued now."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has come to it."""
        ...


def _cuda_event() -> DeviceEvent:
    # Blocking: a thread that spins would take the core from the one that queues the layers.
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


class LayerEvents:
    """Turns "queued" into "written", in order."""

    def __init__(self, make_event: Callable[[], DeviceEvent] = _cuda_event) -> None:
        self._make_event = make_event
        self._queued: queue.SimpleQueue[tuple[DeviceEvent, int, Wrote]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="kv-layers", daemon=True).start()

    def after(self, wrote: Wrote) -> Wrote:
        """Return what to call when a layer is queued; `wrote` is called when it is done."""

        def queued(layer: int) -> None:
            event = self._make_event()
            event.record()
            self._queued.put((event, layer, wrote))

        return queued

    def _run(self) -> None:
        while True:
            event, layer, wrote = self._queued.get()
            event.synchronize()
            wrote(layer)
