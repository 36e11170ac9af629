"""One forward of a model over a batch of rows, reading and writing the paged pool."""

from typing import Protocol

import numpy as np
import torch

from engine.attention import AttentionBackend, PagedBatch, to_device
from engine.forward import ForwardInputs, Wrote
from engine.layer_events import LayerEvents
from engine.shape import ModelShape


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
    """Runs a transformers model with its KV in one pool.

    Args:
        kv: The pool, page by page so that a page is one contiguous run of bytes to push.
            Shape (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim).
    """

    def __init__(self, model: torch.nn.Module, kv: torch.Tensor, backend: AttentionBackend) -> None:
        self._model = model
        self.backend = backend
        self.kv = kv
        self._events: LayerEvents | None = None

    @property
    def device(self) -> torch.device:
        """See `Runner.device`."""
        return self.kv.device

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
        output = self._model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logit_rows,
            paged_batch=batch,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _paged(self, inputs: ForwardInputs, wrote: Wrote | None) -> PagedBatch:
        page_size = self.kv.shape[4]
        if wrote is not None and self.device.type != "cpu":
            self._events = self._events or LayerEvents()
            wrote = self._events.after(wrote)
        return PagedBatch(
            backend=self.backend,
            kv=self.kv,
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


def pool_pages(shape: ModelShape, page_size: int, size_bytes: int) -> int:
    """Return how many pages fit into `size_bytes`."""
    return size_bytes // (shape.kv_bytes_per_token * page_size)


def make_pool(
    shape: ModelShape,
    num_pages: int,
    page_size: int,
    device: str,
    memory: torch.Tensor | None = None,
    *,
    has_scratch_page: bool = False,
) -> torch.Tensor:
    """Make the tensor of a pool.

    Args:
        memory: Bytes on `device` to use, such as a shared region's; None takes new ones. At least
            `page_size * shape.kv_bytes_per_token` for each page.
        has_scratch_page: Add one page behind those counted, with the number `num_pages`. Nobody owns it;
            rows that pad a batch write there.

    Returns:
        Shape (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim), with one page more if asked
        for.
    """
    num_made = num_pages + has_scratch_page
    dtype: torch.dtype = getattr(torch, shape.kv_dtype)
    sizes = (num_made, shape.num_layers, 2, shape.num_kv_heads, page_size, shape.head_dim)
    if memory is None:
        return torch.zeros(sizes, dtype=dtype, device=device)
    size_bytes = torch.Size(sizes).numel() * dtype.itemsize
    return memory[:size_bytes].view(dtype).view(sizes)
