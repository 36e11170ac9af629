"""Paged attention for GPUs with our own Triton kernels, in `triton_kernels.py`.

Block sizes and the number of splits depend only on shapes, not on values of one forward. So a decode-only
forward can be recorded into a CUDA graph.

Importing this module needs triton, which torch's CUDA wheels include.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton

from tandem.engine import triton_kernels
from tandem.engine.attention import LayerInputs, PagedBatch
from tandem.engine.attention_torch import TorchAttention, empty_output
from tandem.engine.device import to_device
from tandem.engine.forward import Ints32

# A smaller split is too little work to be worth the merge.
_MIN_KEYS_PER_SPLIT = 256
# The merge kernel holds all splits of a head at once.
_MAX_SPLITS = 64
# The smallest number of rows that a tensor core multiplies.
_MIN_GROUP = 16


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block sizes of one program, chosen so that two stages of K and V fit into 96 KiB of shared memory.

    Attributes:
        rows: Rows times heads in a tile of a prompt.
        keys: Keys loaded at a time.
        dim: Head dim, padded.
        num_warps: Warps of a program for prompts.
    """

    rows: int
    keys: int
    dim: int
    num_warps: int

    @classmethod
    def of(cls, head_dim: int, dtype: torch.dtype, group: int, *, is_fp8: bool) -> "Blocks":
        """Choose block sizes for a geometry, such that the assembler spills few registers or none.

        Args:
            dtype: Type of the queries.
        """
        dim = max(16, triton.next_power_of_2(head_dim))
        row_bytes = dim * dtype.itemsize
        if dtype is torch.float32:  # no tensor cores, so operands are in registers
            rows, keys, num_warps = (32, 32, 4) if row_bytes <= 512 else (16, 16, 4)
        elif row_bytes <= 256:
            rows, keys, num_warps = 128, 32 if is_fp8 else 64, 8
        elif row_bytes <= 512:
            rows, keys, num_warps = 64, 32, 4
        else:
            rows, keys, num_warps = 32, 16, 4
        return cls(max(rows, triton.next_power_of_2(group)), keys, dim, num_warps)


class TritonAttention:
    """The backend of our own kernels.

    Args:
        num_processors: Multiprocessors of the GPU. Decoding rows are split until each has two programs.
    """

    name = "triton"

    def __init__(self, num_processors: int) -> None:
        self._num_processors = num_processors
        self._reference = TorchAttention()

    def prepare(self, batch: PagedBatch) -> None:
        """Do nothing: decodes need no host work."""

    def attend(self, layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
        """Write K and V, then attend."""
        if batch.pool.layers[layer.index].joined is None:
            return self._reference.attend(layer, batch)
        write(batch, layer)
        if layer.query.stride(-1) != 1:
            layer.query = layer.query.contiguous()
        out = empty_output(layer)
        if batch.num_decodes:
            self._attend_decodes(layer, batch, out)
        if batch.num_decodes < len(batch.host_kv_lens):
            _attend_prompts(layer, batch, out)
        return out

    def num_splits(self, num_decodes: int, num_kv_heads: int, max_keys: int) -> int:
        """Return the number of parts that the keys of each row are split into: a power of two.

        Each new number compiles the kernels again, for seconds, while requests wait.
        """
        wanted = 2 * self._num_processors // (num_decodes * num_kv_heads)
        most = min(wanted, -(-max_keys // _MIN_KEYS_PER_SPLIT), _MAX_SPLITS)
        return 1 << (max(1, most).bit_length() - 1)

    def _attend_decodes(self, layer: LayerInputs, batch: PagedBatch, out: torch.Tensor) -> None:
        pages = _pages(batch, layer)
        num_kv_heads, page_size, head_dim = pages.shape[2:]
        num_decodes, num_heads = batch.num_decodes, layer.query.shape[1]
        group = num_heads // num_kv_heads
        blocks = Blocks.of(head_dim, layer.query.dtype, group, is_fp8=_is_fp8(batch))
        max_keys = batch.page_table.shape[1] * page_size
        num_splits = self.num_splits(num_decodes, num_kv_heads, max_keys)
        partial = torch.empty(
            (num_decodes, num_heads, num_splits, blocks.dim if num_splits > 1 else 0),
            dtype=torch.float32,
            device=out.device,
        )
        sizes = torch.empty(partial.shape[:3], dtype=torch.float32, device=out.device)
        triton_kernels.attend_decodes[num_decodes, num_kv_heads, num_splits](
            layer.query,
            pages,
            batch.page_table,
            batch.kv_lens,
            _sinks(layer),
            out,
            partial,
            sizes,
            *_strides(batch, layer, out),
            num_splits=num_splits,
            num_heads=num_heads,
            group=group,
            block_group=max(_MIN_GROUP, triton.next_power_of_2(group)),
            **_constants(batch, layer, blocks),
            num_warps=4,
            num_stages=2,
        )
        if num_splits > 1:
            triton_kernels.merge_splits[num_decodes, num_heads](
                partial,
                sizes,
                _sinks(layer),
                out,
                out.stride(0),
                num_splits=num_splits,
                num_heads=num_heads,
                head_dim=head_dim,
                block_splits=triton.next_power_of_2(num_splits),
                block_dim=blocks.dim,
                has_sinks=layer.sinks is not None,
            )


def write(batch: PagedBatch, layer: LayerInputs) -> None:
    """Do the same as `PagedBatch.write`, in one launch if K and V have the same size."""
    view = batch.pool.layers[layer.index]
    if view.joined is None:
        return batch.write(layer)
    if view.is_shared:
        return None
    pages = _pages(batch, layer)
    num_kv_heads, page_size, head_dim = pages.shape[2:]
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (layer.key, layer.value))
    triton_kernels.write_rows[len(key),](
        key,
        value,
        pages,
        batch.write_pages,
        batch.write_offsets,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        pages.stride(0),
        pages.stride(1),
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        block_heads=triton.next_power_of_2(num_kv_heads),
        block_dim=triton.next_power_of_2(head_dim),
        is_fp8=_is_fp8(batch),
    )
    return None


def _attend_prompts(layer: LayerInputs, batch: PagedBatch, out: torch.Tensor) -> None:
    pages = _pages(batch, layer)
    num_kv_heads, _, head_dim = pages.shape[2:]
    group = layer.query.shape[1] // num_kv_heads
    blocks = Blocks.of(head_dim, layer.query.dtype, group, is_fp8=_is_fp8(batch))
    num_rows = blocks.rows // group  # rows per tile; layers of the same size share tiles
    tiles = batch.once(
        ("tiles", num_rows), lambda: to_device(prompt_tiles(batch, num_rows), out.device)
    )
    triton_kernels.attend_prompts[len(tiles), num_kv_heads](
        layer.query,
        pages,
        tiles,
        batch.page_table,
        _sinks(layer),
        out,
        *_strides(batch, layer, out),
        group=group,
        block_rows=blocks.rows,
        **_constants(batch, layer, blocks),
        num_warps=blocks.num_warps,
        num_stages=2,
    )


def _strides(batch: PagedBatch, layer: LayerInputs, out: torch.Tensor) -> tuple[int | float, ...]:
    """Return the kernels' arguments after the tensors: strides, then scoring parameters."""
    pages, scoring = _pages(batch, layer), layer.scoring
    return (
        *layer.query.stride()[:2],
        out.stride(0),
        batch.page_table.stride(0),
        *pages.stride()[:2],
        scoring.scale,
        scoring.softcap or 0.0,
        scoring.window or 0,
        scoring.chunk or 0,
    )


def _constants(batch: PagedBatch, layer: LayerInputs, blocks: Blocks) -> dict[str, int]:
    """Return the compile-time constants of both kernels."""
    page_size, head_dim = _pages(batch, layer).shape[3:]
    return {
        "page_size": page_size,
        "head_dim": head_dim,
        "block_dim": blocks.dim,
        "block_keys": blocks.keys,
        "has_window": layer.scoring.window is not None,
        "has_chunk": layer.scoring.chunk is not None,
        "has_softcap": layer.scoring.softcap is not None,
        "has_sinks": layer.sinks is not None,
        "is_fp8": _is_fp8(batch),
    }


def prompt_tiles(batch: PagedBatch, num_rows: int) -> Ints32:
    """Cut the chunks of prompts into tiles.

    Args:
        num_rows: Limit of rows in a tile.

    Returns:
        For each tile: sequence, first row, number of rows, position of the first row. Tiles of the latest
        positions are first, because they have the most keys and take longest. Shape (num_tiles, 4).
    """
    starts, kv_lens = batch.host_query_starts, batch.host_kv_lens
    tiles = [
        (sequence, row, min(num_rows, end - row), int(kv_lens[sequence]) - (end - row))
        for sequence in range(batch.num_decodes, len(kv_lens))
        for end in [int(starts[sequence + 1])]
        for row in range(int(starts[sequence]), end, num_rows)
    ]
    table = np.array(tiles, np.int32)
    return table[np.argsort(-table[:, 3], kind="stable")]


def _pages(batch: PagedBatch, layer: LayerInputs) -> torch.Tensor:
    """Return one layer of the pool: shape (num_pages, 2, num_kv_heads, page_size, head_dim)."""
    pages = batch.pool.layers[layer.index].joined
    assert pages is not None
    return pages.view(torch.uint8) if _is_fp8(batch) else pages


def _is_fp8(batch: PagedBatch) -> bool:
    return batch.dtype is torch.float8_e4m3fn


def _sinks(layer: LayerInputs) -> torch.Tensor:
    """Return the sinks, or a placeholder that the kernel does not read."""
    return layer.query if layer.sinks is None else layer.sinks
