"""One forward of a model over a batch of rows, reading and writing the paged pool."""

from typing import Protocol

import numpy as np
import torch

from engine.attention import AttentionBackend, PagedBatch
from engine.forward import ForwardInputs
from engine.model import ModelShape


class Runner(Protocol):
    """Computes logits for a batch. The engine is given one; tests and simulations give others."""

    @property
    def device(self) -> torch.device:
        """Where logits are."""
        ...

    def forward(self, inputs: ForwardInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the KV of every row and the logits of the rows wanted.

        On a GPU the work is queued and the call returns before it is done.

        Args:
            sampled: Ids that `inputs.sources` points into, on the device. Shape (n,), int64.

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
        self._backend = backend
        self.kv = kv

    @property
    def device(self) -> torch.device:
        """See `Runner.device`."""
        return self.kv.device

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        """See `Runner.forward`."""
        token_ids = self._on_device(inputs.token_ids)
        if sampled is not None and (inputs.sources >= 0).any():
            sources = self._on_device(inputs.sources)
            token_ids = torch.where(sources >= 0, sampled[sources.clamp(min=0)], token_ids)
        # An empty selection is not supported everywhere; one row is computed and dropped.
        rows = inputs.logit_rows if len(inputs.logit_rows) else np.zeros(1, np.int64)
        output = self._model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=self._on_device(inputs.positions).unsqueeze(0),
            use_cache=False,
            logits_to_keep=self._on_device(rows),
            paged_batch=self._paged(inputs),
        )
        logits: torch.Tensor = output.logits[0, : len(inputs.logit_rows)]
        return logits

    def _paged(self, inputs: ForwardInputs) -> PagedBatch:
        page_size = self.kv.shape[4]
        write_pages = inputs.write_pages(page_size)
        return PagedBatch(
            backend=self._backend,
            kv=self.kv,
            num_decodes=inputs.num_decodes,
            page_table=self._on_device(inputs.page_table),
            kv_lens=self._on_device(inputs.kv_lens),
            write_pages=self._on_device(write_pages),
            write_offsets=self._on_device(inputs.positions % page_size),
            host_page_table=inputs.page_table,
            host_kv_lens=inputs.kv_lens,
            host_query_starts=inputs.query_starts,
        )

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        if self.kv.device.type == "cpu":
            return tensor
        # From pinned memory the copy is queued behind what runs, and nothing waits for it.
        return tensor.pin_memory().to(self.kv.device, non_blocking=True)


def pool_pages(shape: ModelShape, page_size: int, size_bytes: int) -> int:
    """Return how many pages fit into `size_bytes`."""
    return size_bytes // (shape.kv_bytes_per_token * page_size)


def make_pool(
    shape: ModelShape, num_pages: int, page_size: int, device: str, buffer: memoryview | None = None
) -> torch.Tensor:
    """Make the tensor of a pool.

    Args:
        buffer: Memory to use instead of torch's own, such as a shared region; at least
            `num_pages * page_size * shape.kv_bytes_per_token` bytes.

    Returns:
        Shape (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim).
    """
    sizes = (num_pages, shape.num_layers, 2, shape.num_kv_heads, page_size, shape.head_dim)
    if buffer is None:
        return torch.zeros(sizes, dtype=shape.kv_dtype, device=device)
    num_elements = torch.Size(sizes).numel()
    return torch.frombuffer(buffer, dtype=shape.kv_dtype, count=num_elements).view(sizes)
