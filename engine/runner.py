"""One forward of a model over a batch of rows, reading and writing the paged pool."""

from typing import Protocol

import numpy as np
import torch

from tandem.engine.attention import AttentionBackend, PagedBatch, to_device
from tandem.engine.forward import ForwardInputs, Wrote
from tandem.engine.kv_pool import KVPool
from tandem.engine.layer_events import LayerEvents
from tandem.engine.paged_model import PagedModel


class Runner(Protocol):
    """Computes logits for a batch. The engine is given one; tests and simulations give others."""

    @property
    def device(self) -> torch.device:
        """Where logits are."""
        ...

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
        ...


class ModelRunner:
    """Runs a transformers model with its KV in one pool."""

    def __init__(self, model: PagedModel, pool: KVPool, backend: AttentionBackend) -> None:
        self._model = model
        self.backend = backend
        self.pool = pool
        self._events: LayerEvents | None = None

    @property
    def device(self) -> torch.device:
        """See `Runner.device`."""
        return self.pool.device

    @torch.inference_mode()
    def forward(
        self,
        inputs: ForwardInputs,
        sampled: torch.Tensor | None = None,
        wrote: Wrote | None = None,
    ) -> torch.Tensor:
        """See `Runner.forward`."""
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
        """Run the model on what is on the device already: what a graph records.

        Args:
            token_ids, positions: Shape (num_rows,), int64.
            logit_rows: Shape (num_logits,), int64.

        Returns:
            Shape (num_logits, vocab_size).
        """
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
    """Put the ids of the forward before, which only the device knows, where `sources` names them.

    Args:
        token_ids: On the device. Shape (num_rows,).
        sampled: See `Runner.forward`.
    """
    if sampled is None or not (inputs.sources >= 0).any():
        return token_ids
    sources = to_device(inputs.sources, token_ids.device)
    return torch.where(sources >= 0, sampled[sources.clamp(min=0)], token_ids)
