"""One forward of a model over a batch of slices, reading and writing the paged pool."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.attention import PagedBatch, PromptSpan, head_rows
from engine.batcher import Slice
from engine.model import ModelShape


class Runner(Protocol):
    """Computes logits for a batch. The engine is given one; tests and simulations give others."""

    def forward(self, batch: Sequence[Slice]) -> torch.Tensor:
        """Compute the KV of every slice and the logits of its last token.

        Returns:
            Logits of the slices that are their request's last, in order. Shape (n, vocab_size).
        """
        ...


class ModelRunner:
    """Runs a transformers model with its KV in one pool.

    Args:
        kv: The pool, page by page so that a page is one contiguous run of bytes to push.
            Shape (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim).
    """

    def __init__(self, model: torch.nn.Module, kv: torch.Tensor) -> None:
        self._model = model
        self.kv = kv
        self._device = kv.device

    @torch.inference_mode()
    def forward(self, batch: Sequence[Slice]) -> torch.Tensor:
        """See `Runner.forward`."""
        ids: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        for piece in batch:
            begin, end = piece.request.num_computed, piece.request.num_computed + piece.num_tokens
            ids += piece.request.token_ids[begin:end]
            positions += range(begin, end)
            if piece.is_last:
                last_rows.append(len(ids) - 1)
        output = self._model(
            input_ids=self._tensor([ids]),
            position_ids=self._tensor([positions]),
            use_cache=False,
            # An empty selection is not supported everywhere; one row is computed and dropped.
            logits_to_keep=self._tensor(last_rows or [0]),
            paged_batch=self._paged(batch, positions),
        )
        logits: torch.Tensor = output.logits[0, : len(last_rows)]
        return logits

    def _paged(self, batch: Sequence[Slice], positions: Sequence[int]) -> PagedBatch:
        page_size = self.kv.shape[4]
        prompts, decodes, decode_rows = [], [], []
        write_pages: list[int] = []
        row = 0
        for piece in batch:
            request = piece.request
            kv_len = request.num_computed + piece.num_tokens
            pages = request.page_ids[: -(-kv_len // page_size)]
            write_pages += [
                pages[position // page_size] for position in range(request.num_computed, kv_len)
            ]
            if piece.num_tokens == 1:
                decodes.append((pages, kv_len))
                decode_rows.append(row)
            else:
                rows = head_rows(self.kv, self._tensor(pages))
                prompts.append(PromptSpan(row, piece.num_tokens, kv_len, rows))
            row += piece.num_tokens
        width = max((len(pages) for pages, _ in decodes), default=0)
        table = [pages + [0] * (width - len(pages)) for pages, _ in decodes]
        return PagedBatch(
            kv=self.kv,
            write_pages=self._tensor(write_pages),
            write_offsets=self._tensor(positions) % page_size,
            prompts=prompts,
            decode_rows=self._tensor(decode_rows),
            decode_kv_rows=head_rows(self.kv, self._tensor(table)),
            kv_lens=self._tensor([kv_len for _, kv_len in decodes]),
        )

    def _tensor(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


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
        return torch.zeros(sizes, dtype=shape.dtype, device=device)
    num_elements = torch.Size(sizes).numel()
    return torch.frombuffer(buffer, dtype=shape.dtype, count=num_elements).view(sizes)
