"""One forward of a model over a batch of rows, reading and writing the paged pool."""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from tandem.engine.attention import AttentionBackend, PagedBatch, PagedModel, to_device
from tandem.engine.forward import ForwardInputs, Wrote
from tandem.engine.kv_pool import KVPool
from tandem.telemetry.log import get_logger

log = get_logger(__name__)


class Runner(Protocol):
    """Computes logits for a batch. The engine is given one; tests and simulations give others."""

    @property
    def device(self) -> torch.device:
        """Where logits are."""

    def forward(
        self,
        inputs: ForwardInputs,
        sampled: torch.Tensor | None = None,
        wrote: Wrote | None = None,
    ) -> torch.Tensor:
        """Compute the KV of every row and the logits of the rows wanted.

        On a GPU the work is queued and the call returns before it is done.

        Args:
            sampled: Ids that `inputs.sources` points into, on the device. Shape (n,), int64.
            wrote: Called with the numbers of layers, in order, as their K and V are in the pool; perhaps
                from another thread, perhaps not for all of them.

        Returns:
            Logits of `inputs.logit_rows`, in order. Shape (num_logits, vocab_size).
        """


class ModelRunner:
    """Runs a transformers model with its KV in one pool."""

    def __init__(self, model: PagedModel, pool: KVPool, backend: AttentionBackend) -> None:
        self._model = model
        self.backend = backend
        self.pool = pool
        self._events: LayerEvents | None = None

    @property
    def device(self) -> torch.device:
        """The pool's."""
        return self.pool.device

    @torch.inference_mode()
    def forward(
        self,
        inputs: ForwardInputs,
        sampled: torch.Tensor | None = None,
        wrote: Wrote | None = None,
    ) -> torch.Tensor:
        """Compute a forward as `Runner` has it."""
        token_ids = to_device(inputs.token_ids, self.device)
        token_ids = with_sampled(token_ids, inputs, sampled)
        # An empty selection is not supported everywhere; one row is computed and dropped.
        rows = inputs.logit_rows if len(inputs.logit_rows) else np.zeros(1, np.int64)
        positions = to_device(inputs.positions, self.device)
        batch = self._paged(inputs, wrote)
        logits = self.compute(token_ids, positions, to_device(rows, self.device), batch)
        return logits[: len(inputs.logit_rows)]

    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """Run `PagedModel.logits` on what is on the device already: what a graph records."""
        return self._model.logits(
            token_ids,
            positions,
            logit_rows,
            lambda layer: batch.backend.attend(layer, batch),
            wrote=batch.wrote,
        )

    def _paged(self, inputs: ForwardInputs, wrote: Wrote | None) -> PagedBatch:
        page_size = self.pool.page_size
        if wrote is not None and self.device.type != "cpu":
            self._events = self._events or LayerEvents()
            wrote = self._events.after(wrote)
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
            wrote=wrote,
        )


def with_sampled(
    token_ids: torch.Tensor, inputs: ForwardInputs, sampled: torch.Tensor | None
) -> torch.Tensor:
    """Put the ids of the forward before, which only the device knows, where `sources` names them."""
    if sampled is None or not (inputs.sources >= 0).any():
        return token_ids
    sources = to_device(inputs.sources, token_ids.device)
    return torch.where(sources >= 0, sampled[sources.clamp(min=0)], token_ids)


def _cuda_event() -> torch.cuda.Event:
    # Blocking: a thread that spins would take the core from the one that queues the layers.
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


class LayerEvents:
    """Reports when a layer's K and V are in the pool, where the host runs ahead of the device.

    A forward on a GPU is only queued when attention returns. So an event is queued behind each layer, and
    a thread of its own waits for one after another. Once a layer of a forward could not be reported, no
    further one of it is: what `wrote` was not called for is pushed when the forward is collected.
    """

    def __init__(self, make_event: Callable[[], torch.cuda.Event] = _cuda_event) -> None:
        self._make_event = make_event
        self._queued: queue.SimpleQueue[tuple[torch.cuda.Event, int, Wrote]] = queue.SimpleQueue()
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
                # The top of the thread's loop: the next forward has layers to report, too. If the device
                # failed, the engine's own thread finds that out when it reads the forward.
                log.exception("layers.not_told", layer=layer, effect="the rest is pushed later")
                failed = wrote
