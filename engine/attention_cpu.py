"""Paged attention for CPUs: decoding rows read and write the pages where they are, without a copy.

The kernel of `cpu_kernel.py` does all of a layer's decoding rows in one call, on torch's own threads. Rows
of prompts go through torch: with hundreds of rows a page, copying the keys costs nothing beside the
arithmetic. So do layers that the kernel does not know: with sinks, chunks, latents, or K and V of two sizes.
"""

import numpy as np
import torch

from tandem.engine import cpu_threads
from tandem.engine.attention import LayerInputs, PagedBatch
from tandem.engine.attention_torch import TorchAttention, attend_prompts, empty_output
from tandem.engine.cpu_kernel import CALL, Geometry, kernel_for

_NO_WINDOW = 1 << 62


class CpuAttention:
    """The CPU backend."""

    name = "cpu"

    def __init__(self) -> None:
        self._reference = TorchAttention()

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Tell whether pools of this type can be read."""
        return dtype in (torch.float32, torch.bfloat16)

    def attend(self, layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        has_kernel = batch.pool.layers[layer.index].joined is not None
        if not has_kernel or layer.sinks is not None or layer.scoring.chunk is not None:
            return self._reference.attend(layer, batch)
        out = empty_output(layer, batch.dtype)
        if batch.num_decodes:
            _attend_decodes(layer, batch, out)
        if batch.num_decodes < len(layer.query):
            batch.write(layer)
            attend_prompts(layer, batch, out)
        return out.to(layer.query.dtype)


def _attend_decodes(layer: LayerInputs, batch: PagedBatch, out: torch.Tensor) -> None:
    """Write K and V of the decoding rows, and fill their part of `out`."""
    pages = batch.pool.layers[layer.index]
    _, num_kv_heads, page_size, head_dim = pages.key.shape
    call = batch.scratch.get("call")
    if call is None:
        call = batch.scratch["call"] = _call(batch)
    rows = [_unit_stride(part.to(batch.dtype)) for part in (layer.query, layer.key, layer.value)]
    for name, part in zip(("query", "key", "value"), rows, strict=True):
        call[name] = part.data_ptr()
        call[f"{name}_row"], call[f"{name}_head"] = part.stride(0), part.stride(1)
    call["pool_layer"] = pages.begin
    call["out"] = out.data_ptr()
    call["window"] = layer.scoring.window or _NO_WINDOW
    call["scale"], call["softcap"] = layer.scoring.scale, layer.scoring.softcap or 0
    kernel = kernel_for(
        Geometry(
            num_kv_heads=num_kv_heads,
            group=rows[0].shape[1] // num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            is_bfloat16=batch.dtype is torch.bfloat16,
        )
    )
    cpu_threads.run(kernel, call.ctypes.data)


def _call(batch: PagedBatch) -> np.ndarray:
    """Return what is the same for all layers of a forward. One element of type `CALL`."""
    call = np.zeros((), CALL)
    call["pool"], call["pool_page"] = batch.pool.pages.data_ptr(), batch.pool.page_elements
    call["page_table"] = batch.host_page_table.ctypes.data
    call["max_pages"] = batch.host_page_table.shape[1]
    call["kv_lens"] = batch.host_kv_lens.ctypes.data
    call["num_seqs"], call["num_threads"] = batch.num_decodes, cpu_threads.num_threads()
    return call


def _unit_stride(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()
