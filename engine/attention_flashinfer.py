"""Paged attention for GPUs with FlashInfer's kernels, if it is installed.

FlashInfer plans a forward on the host and runs the plan once per layer. Layers with the same scoring and
heads share a plan, which is stored in the batch's scratch. A forward that is recorded into a graph has its
own wrappers, which are planned again before each replay.

Source: FlashInfer, Ye et al. 2025. A layer of our pool has its HND layout.
"""

from collections.abc import Callable
from typing import Any, Literal

import flashinfer
import numpy as np
import torch

from tandem.engine.attention import LayerInputs, PagedBatch, Scoring
from tandem.engine.device import to_device
from tandem.engine.forward import Ints32

# Memory for partial results of split keys, with the size of FlashInfer's examples.
_WORKSPACE_BYTES = 128 << 20

Kind = Literal["decode", "prompt"]


def page_runs(batch: PagedBatch, sequences: slice) -> tuple[torch.Tensor, Ints32, torch.Tensor]:
    """Return the pages of some sequences, concatenated, in host memory.

    Returns:
        Index of each sequence's first page, then the number of pages, shape (num_seqs + 1,); page ids,
        shape (num_pages,); number of keys in each sequence's last page, shape (num_seqs,).
    """
    table, lens = batch.host_page_table[sequences], batch.host_kv_lens[sequences]
    widths = -(-lens // batch.page_size)
    is_used = np.arange(table.shape[1]) < widths[:, np.newaxis]
    starts = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
    last_lens = (lens - (widths - 1) * batch.page_size).astype(np.int32)
    return torch.from_numpy(starts), table[is_used], torch.from_numpy(last_lens)


class _Planned:
    """A FlashInfer wrapper and the parameters of its plans."""

    def __init__(self, wrapper: Any, kind: Kind, layer: LayerInputs) -> None:
        self.wrapper = wrapper
        self.kind = kind
        self._index = layer.index  # any layer with this geometry
        self._num_heads = layer.query.shape[1]
        self._dtype = layer.query.dtype
        self._scoring = layer.scoring
        self._copied: torch.cuda.Event | None = None

    def plan(self, batch: PagedBatch) -> None:
        """Plan for the batch's host arrays, without waiting for the device's current work."""
        if self._copied is not None:
            # Wait for the copy of the previous plan, whose source this one overwrites.
            self._copied.synchronize()
        _, num_kv_heads, page_size, head_dim = batch.pool.layers[self._index].key.shape
        is_decode = self.kind == "decode"
        sequences = slice(0, batch.num_decodes) if is_decode else slice(batch.num_decodes, None)
        first_pages, page_ids, last_lens = page_runs(batch, sequences)
        starts = torch.from_numpy(batch.host_query_starts[batch.num_decodes :])
        self.wrapper.plan(
            *(() if is_decode else (starts - starts[0],)),
            first_pages,
            to_device(page_ids, batch.pool.device),
            last_lens,
            self._num_heads,
            num_kv_heads,
            head_dim,
            page_size,
            **({} if is_decode else {"causal": True}),
            window_left=-1 if self._scoring.window is None else self._scoring.window - 1,
            logits_soft_cap=self._scoring.softcap or 0.0,
            sm_scale=self._scoring.scale,
            q_data_type=self._dtype,
            kv_data_type=batch.dtype,
        )
        if batch.pool.pages.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()


class FlashInferAttention:
    """The FlashInfer backend.

    Args:
        write: Writes K and V of a layer into the pool.
    """

    name = "flashinfer"

    def __init__(
        self,
        device: str,
        write: Callable[[PagedBatch, LayerInputs], None] = PagedBatch.write,
    ) -> None:
        self._write = write
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # Wrappers of forwards that are not recorded.
        self._wrappers: dict[tuple[Kind, Scoring, torch.Size, torch.Size], _Planned] = {}

    def prepare(self, batch: PagedBatch) -> None:
        """Plan again for a recorded forward."""
        for planned in batch.scratch.values():
            planned.plan(batch)

    def attend(self, layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
        """Write K and V, then attend."""
        self._write(batch, layer)
        query, pages = layer.query.contiguous(), batch.pool.layers[layer.index].joined
        out = torch.empty_like(query)
        end = batch.num_decodes
        if end:
            self._planned("decode", layer, batch).run(query[:end], pages, out=out[:end])
        if end < len(batch.host_kv_lens):
            self._planned("prompt", layer, batch).run(query[end:], pages, out=out[end:])
        return out

    def _planned(self, kind: Kind, layer: LayerInputs, batch: PagedBatch) -> Any:
        # Layers share a plan if they have the same scoring and heads.
        key = kind, layer.scoring, layer.query.shape[1:], layer.key.shape[1:]
        found: _Planned | None = batch.scratch.get(key)
        if found is None:
            kept = None if batch.is_recorded else self._wrappers.get(key)
            found = kept or _Planned(self._make(kind, layer, batch), kind, layer)
            if not batch.is_recorded:
                self._wrappers[key] = found
            found.plan(batch)
            batch.scratch[key] = found
        return found.wrapper

    def _make(self, kind: Kind, layer: LayerInputs, batch: PagedBatch) -> Any:
        if kind == "prompt":
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        # FlashInfer's documentation recommends tensor cores for groups of four or more, and its other
        # kernels support only some group sizes.
        group = layer.query.shape[1] // layer.key.shape[1]
        buffers: dict[str, Any] = {}
        if batch.is_recorded:
            sizes = {
                "indptr": batch.num_decodes + 1,
                "indices": batch.page_table.numel(),
                "last_page_len": batch.num_decodes,
            }
            buffers = {
                f"paged_kv_{name}_buffer": torch.zeros(
                    size, dtype=torch.int32, device=batch.pool.device
                )
                for name, size in sizes.items()
            }
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=batch.is_recorded,
            use_tensor_cores=group > 2,
            **buffers,
        )
