"""One forward of a model over a batch of rows, reading and writing the paged pool."""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from tandem.engine.attention.paged import AttentionBackend, PagedBatch, PagedModel
from tandem.engine.device import to_device
from tandem.engine.pages.pool import KVPool
from tandem.engine.scheduling.forward import ForwardInputs, OnLayerWritten
from tandem.telemetry.log import get_logger

log = get_logger(__name__)


class Runner(Protocol):
    """Computes logits for a batch."""

    @property
    def device(self) -> torch.device:
        """The device that holds the logits."""

    def forward(
        self,
        inputs: ForwardInputs,
        sampled: torch.Tensor | None = None,
        on_layer_written: OnLayerWritten | None = None,
    ) -> torch.Tensor:
        """Compute the KV of every row and the logits of `inputs.logit_rows`.

        On a GPU this queues the work and returns before it is done.

        Args:
            sampled: Ids that `inputs.sources` refers to, on the device. Shape (n,), int64.
            on_layer_written: Called with the number of each layer, in order, once its K and V are in the pool. Calls
                may come from a different thread and may skip layers.

        Returns:
            Logits of `inputs.logit_rows`, in order. Shape (num_logits, vocab_size).
        """


class ModelRunner:
    """Runs a transformers model whose KV is in one pool."""

    def __init__(self, model: PagedModel, pool: KVPool, backend: AttentionBackend) -> None:
        self._model = model
        self.backend = backend
        self.pool = pool
        self._events: LayerEvents | None = None

    @property
    def device(self) -> torch.device:
        """The pool's device."""
        return self.pool.device

    @torch.inference_mode()
    def forward(
        self,
        inputs: ForwardInputs,
        sampled: torch.Tensor | None = None,
        on_layer_written: OnLayerWritten | None = None,
    ) -> torch.Tensor:
        """Run a forward; see `Runner.forward`."""
        token_ids = to_device(inputs.token_ids, self.device)
        token_ids = with_sampled(token_ids, inputs, sampled)
        # Some models do not support an empty selection, so one row is computed and dropped.
        rows = inputs.logit_rows if len(inputs.logit_rows) else np.zeros(1, np.int64)
        positions = to_device(inputs.positions, self.device)
        batch = self._paged(inputs, on_layer_written)
        logits = self.compute(token_ids, positions, to_device(rows, self.device), batch)
        return logits[: len(inputs.logit_rows)]

    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """Run `PagedModel.logits` on tensors that are on the device. CUDA graphs record this call."""
        return self._model.logits(
            token_ids,
            positions,
            logit_rows,
            lambda layer: batch.backend.attend(layer, batch),
            on_layer_written=batch.on_layer_written,
        )

    def _paged(self, inputs: ForwardInputs, on_layer_written: OnLayerWritten | None) -> PagedBatch:
        page_size = self.pool.page_size
        if on_layer_written is not None and self.device.type != "cpu":
            self._events = self._events or LayerEvents()
            on_layer_written = self._events.after(on_layer_written)
        return PagedBatch(
            backend=self.backend,
            pool=self.pool,
            num_decodes=inputs.num_decodes,
            page_table=to_device(inputs.page_table, self.device),
            kv_lens=to_device(inputs.kv_lens, self.device),
            write_pages=to_device(inputs.write_pages(page_size), self.device),
            write_offsets=to_device(inputs.positions % page_size, self.device),
            host_page_table=inputs.page_table,
            host_kv_lens=inputs.kv_lens,
            host_query_starts=inputs.query_starts,
            on_layer_written=on_layer_written,
        )


def with_sampled(
    token_ids: torch.Tensor, inputs: ForwardInputs, sampled: torch.Tensor | None
) -> torch.Tensor:
    """Return `token_ids`, with ids of the previous forward where `sources` is not -1. They are read on the device."""
    if sampled is None or not (inputs.sources >= 0).any():
        return token_ids
    sources = to_device(inputs.sources, token_ids.device)
    return torch.where(sources >= 0, sampled[sources.clamp(min=0)], token_ids)


def _cuda_event() -> torch.cuda.Event:
    # Blocking, because a spinning wait would take CPU time from the thread that queues the layers.
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


class LayerEvents:
    """Reports on asynchronous devices when a layer's K and V are in the pool.

    On a GPU, attention only queues work. So an event is queued after each layer, and a separate thread
    waits for the events in order. If `on_layer_written` raises for a layer, the later layers of the forward are
    not reported either; they are pushed when the forward is collected.
    """

    def __init__(self, make_event: Callable[[], torch.cuda.Event] = _cuda_event) -> None:
        self._make_event = make_event
        self._queued: queue.SimpleQueue[tuple[torch.cuda.Event, int, OnLayerWritten]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="kv-layers", daemon=True).start()

    def after(self, on_layer_written: OnLayerWritten) -> OnLayerWritten:
        """Return a function to call when a layer is queued. `on_layer_written` is called once the layer is done."""

        def queued(layer: int) -> None:
            event = self._make_event()
            event.record()
            self._queued.put((event, layer, on_layer_written))

        return queued

    def _run(self) -> None:
        failed: OnLayerWritten | None = None
        while True:
            event, layer, on_layer_written = self._queued.get()
            if on_layer_written is failed:
                continue
            try:
                event.synchronize()
                on_layer_written(layer)
            except Exception:
                # Any exception is caught, because this thread must report later forwards too. If the device
                # failed, the engine's thread gets the error when it reads the forward's results.
                log.exception(
                    "layers.report_failed", layer=layer, effect="pushed after the forward"
                )
                failed = on_layer_written
