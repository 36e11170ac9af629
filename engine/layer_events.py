"""Tells when a layer's K and V are in the pool, where the host runs ahead of the device.

A forward on a GPU is only queued when attention returns. So an event is queued behind each layer,
and a thread of its own waits for one after another. A forward of which a layer could not be told is not told
of any further: what `wrote` did not hear of is pushed when the forward is collected.
"""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from tandem.engine.forward import Wrote
from tandem.telemetry.log import get_logger

log = get_logger(__name__)


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
        failed: Wrote | None = None
        while True:
            event, layer, wrote = self._queued.get()
            if wrote is failed:
                continue
            try:
                event.synchronize()
                wrote(layer)
            except Exception:
                # The top of the thread's loop: the next forward has layers to tell of, too. If the device
                # failed, the engine's own thread finds that out when it reads the forward.
                log.exception("layers.not_told", layer=layer, effect="the rest is pushed later")
                failed = wrote
