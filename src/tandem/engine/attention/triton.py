"""Paged attention for GPUs with our own Triton kernels, in `kernels/triton.py`.

Grids and block sizes depend only on shapes, so a decode-only forward can be recorded into a CUDA graph. The keys
that each program reads depend on the sequence lengths: the host writes them into a table before each forward and
each replay.

In this form the kernels have not run on a GPU: tests interpret them and compile them for GPUs.

This module imports triton, which torch's CUDA wheels include.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton

from tandem.engine.attention.paged import LayerInputs, PagedBatch, Scoring
from tandem.engine.attention.torch import TorchAttention, attend_fresh, empty_output, rows_of
from tandem.engine.device import to_device
from tandem.engine.kernels import triton as triton_kernels
from tandem.engine.scheduling.forward import Ints32

# Smaller splits are not worth the merge. FlashInfer's scheduler uses the same limit.
_MIN_KEYS_PER_SPLIT = 128
# Programs per multiprocessor: while some wait for memory or have ended, others compute.
_PROGRAMS_PER_PROCESSOR = 4
# Splits that a program merges at a time: 16 KiB of registers with a head dim of 128.
_MERGED_TOGETHER = 32
# Heads that a program rotates: two loads of 16 bytes per thread of four warps with a head dim of 128.
_ROTATED_HEADS = 16
# Smallest number of rows for a tensor core.
_MIN_GROUP = 16
# Four programs with five stages of tiles of this size fit into an A100's shared memory.
_DECODE_TILE_BYTES = 8 << 10
# With five stages, triton loads the next K and V while it computes a block's products. With two to four stages a
# program waits for all of its outstanding loads, because the load of page ids takes stages too.
_STAGES_AHEAD = 5


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Block sizes of one program, chosen so that few or no registers spill.

    Attributes:
        rows: Rows times heads of a group.
        keys: Keys loaded at a time.
        dim: Padded head dim.
    """

    rows: int
    keys: int
    dim: int
    num_warps: int
    num_stages: int

    @classmethod
    def of_prompts(
        cls, head_dim: int, dtype: torch.dtype, group: int, *, is_fp8: bool
    ) -> "TileSizes":
        """Choose block sizes for tiles of prompts.

        Args:
            dtype: Type of the queries.
        """
        dim = _padded(head_dim)
        row_bytes = dim * dtype.itemsize
        # Several programs fit on a multiprocessor, so some load while others compute.
        num_warps, num_stages = 4, 2
        if dtype is torch.float32:  # without tensor cores, operands are in registers
            rows, keys = (32, 32) if row_bytes <= 512 else (16, 16)
        elif row_bytes <= 256:
            # A multiprocessor has registers for one such program (two with a small head dim). That is too few to hide
            # one program's loads behind the others' products, so each program prefetches.
            rows, keys, num_warps, num_stages = 128, 32 if is_fp8 else 64, 8, _STAGES_AHEAD
        elif row_bytes <= 512:
            rows, keys = 64, 32
        else:
            rows, keys = 32, 16
        return cls(max(rows, triton.next_power_of_2(group)), keys, dim, num_warps, num_stages)

    @classmethod
    def of_decodes(cls, head_dim: int, dtype: torch.dtype, group: int) -> "TileSizes":
        """Choose block sizes for one decoding row and the heads of one group."""
        dim = _padded(head_dim)
        rows = max(_MIN_GROUP, triton.next_power_of_2(group))
        keys = min(64, max(16, _DECODE_TILE_BYTES // (dim * dtype.itemsize)))
        return cls(rows, keys, dim, num_warps=4, num_stages=_STAGES_AHEAD)


def _padded(head_dim: int) -> int:
    size: int = triton.next_power_of_2(head_dim)
    return max(16, size)


class Splits(NamedTuple):
    """Parameters of the work table for decoding rows. Layers with equal parameters share a table.

    Attributes:
        num_programs: Programs per KV head.
        window, chunk: See `Scoring`.
    """

    num_programs: int
    window: int | None
    chunk: int | None

    def table(self, kv_lens: Ints32) -> Ints32:
        """Distribute the keys over programs so that no program gets much more than the average.

        Args:
            kv_lens: Lengths of the decoding rows. Shape (num_decodes,), with num_decodes < num_programs.

        Returns:
            Shape (num_programs, 4). The first three columns describe each program's work: row, first key, and end
            of its keys. Programs of the same row are adjacent; unused programs have no keys. The last column is
            indexed by row instead of program: entry i is the first program of row i, and entry num_decodes is
            the number of programs in use.
        """
        first = np.zeros_like(kv_lens)
        if self.window is not None:
            first = np.maximum(first, kv_lens - self.window)
        if self.chunk is not None:
            first = np.maximum(first, (kv_lens - 1) // self.chunk * self.chunk)
        num_keys = kv_lens - first
        # Rounding up costs each row less than one program, so one per row is subtracted.
        average = -(-int(num_keys.sum()) // (self.num_programs - len(kv_lens)))
        counts = -(-num_keys // max(_MIN_KEYS_PER_SPLIT, average))
        starts = np.concatenate([[0], np.cumsum(counts)])
        rows = np.repeat(np.arange(len(kv_lens)), counts)
        sizes = -(-num_keys // counts)[rows]
        begins = first[rows] + (np.arange(len(rows)) - starts[rows]) * sizes
        table = np.zeros((self.num_programs, 4), np.int32)
        table[: len(rows), :3] = np.stack(
            [rows, begins, np.minimum(begins + sizes, kv_lens[rows])], 1
        )
        table[: len(starts), 3] = starts
        return table


class TritonAttention:
    """The Triton backend.

    Args:
        num_processors: Number of multiprocessors of the GPU.
    """

    name = "triton"

    def __init__(self, num_processors: int) -> None:
        self._num_processors = num_processors
        self._reference = TorchAttention()

    def prepare(self, batch: PagedBatch) -> None:
        """Rewrite the work tables that the recorded kernels read."""
        for splits, table in batch.scratch.items():
            table.copy_(_on_device(splits, batch))

    def attend(self, layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
        """Write K and V, then compute attention."""
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

    def splits(
        self, num_decodes: int, num_kv_heads: int, max_keys: int, scoring: Scoring
    ) -> Splits:
        """Return how to split decoding rows: one program per row, plus enough programs to fill the GPU.

        Args:
            max_keys: Upper bound on the keys of a row.
        """
        to_fill_gpu = -(-_PROGRAMS_PER_PROCESSOR * self._num_processors // num_kv_heads)
        useful = num_decodes * ((max_keys - 1) // _MIN_KEYS_PER_SPLIT)
        num_extra = max(1, min(to_fill_gpu, useful))
        return Splits(num_decodes + num_extra, scoring.window, scoring.chunk)

    def _attend_decodes(self, layer: LayerInputs, batch: PagedBatch, out: torch.Tensor) -> None:
        pages, num_heads = _pages(batch, layer), layer.query.shape[1]
        num_kv_heads, _, head_dim = pages.shape[2:]
        blocks = TileSizes.of_decodes(head_dim, layer.query.dtype, num_heads // num_kv_heads)
        max_keys = batch.page_table.shape[1] * batch.page_size
        splits = self.splits(batch.num_decodes, num_kv_heads, max_keys, layer.scoring)
        table = batch.cached(splits, lambda: _on_device(splits, batch))
        num_parts = splits.num_programs, num_heads
        partial = out.new_empty((*num_parts, blocks.dim), dtype=torch.float32)
        sizes = out.new_empty(num_parts, dtype=torch.float32)
        triton_kernels.attend_decodes[splits.num_programs, num_kv_heads](
            layer.query,
            pages,
            table,
            batch.page_table,
            _sinks(layer),
            out,
            partial,
            sizes,
            *_numbers(batch, layer, out),
            num_heads=num_heads,
            **_constants(batch, layer, blocks),
        )
        triton_kernels.merge_splits[batch.num_decodes, num_heads](
            partial,
            sizes,
            table,
            _sinks(layer),
            out,
            out.stride(0),
            num_heads=num_heads,
            head_dim=head_dim,
            block_splits=_MERGED_TOGETHER,
            block_dim=blocks.dim,
            has_sinks=layer.sinks is not None,
        )


def _on_device(splits: Splits, batch: PagedBatch) -> torch.Tensor:
    table = splits.table(batch.host_kv_lens[: batch.num_decodes])
    return to_device(table, batch.page_table.device)


def write(batch: PagedBatch, layer: LayerInputs) -> None:
    """Do the same as `PagedBatch.write`, in a single launch if K and V have the same size.

    If query and key are not yet rotated, the elements of a head must be contiguous.
    """
    view = batch.pool.layers[layer.index]
    if view.joined is None:
        return batch.write(layer)
    if view.is_shared:
        return layer.rotate()
    pages = _pages(batch, layer)
    if layer.rotary is not None:
        return _rotate_and_write(batch, layer, pages)
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


def _rotate_and_write(batch: PagedBatch, layer: LayerInputs, pages: torch.Tensor) -> None:
    assert layer.rotary is not None
    query, key, value = layer.query, layer.key, layer.value
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, page_size = pages.shape[2:4]
    num_blocks = triton.cdiv(num_heads, _ROTATED_HEADS) + triton.cdiv(num_kv_heads, _ROTATED_HEADS)
    triton_kernels.rotate_and_write[len(query), num_blocks](
        query,
        key,
        value,
        *layer.rotary,
        pages,
        batch.write_pages,
        batch.write_offsets,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *pages.stride()[:2],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        block_heads=_ROTATED_HEADS,
        block_half=triton.next_power_of_2(head_dim // 2),
        is_fp8=_is_fp8(batch),
    )
    layer.rotary = None


def _attend_prompts(layer: LayerInputs, batch: PagedBatch, out: torch.Tensor) -> None:
    chunks = list(range(batch.num_decodes, len(batch.host_kv_lens)))
    # In 16-bit types, whole prompts go to torch: its FlashAttention or cuDNN is faster than our kernel, because it
    # looks up no pages. In float32, torch would store all scores.
    if layer.query.dtype.itemsize == 2:
        chunks = attend_fresh(layer, batch, out)
    if not chunks:
        return
    pages, scoring = _pages(batch, layer), layer.scoring
    num_kv_heads, _, head_dim = pages.shape[2:]
    group = layer.query.shape[1] // num_kv_heads
    blocks = TileSizes.of_prompts(head_dim, layer.query.dtype, group, is_fp8=_is_fp8(batch))
    num_rows = blocks.rows // group  # rows per tile; layers of the same size share tiles
    tiles = batch.cached(
        ("tiles", num_rows, len(chunks)),
        lambda: to_device(prompt_tiles(batch, chunks, num_rows), out.device),
    )
    triton_kernels.attend_prompts[len(tiles), num_kv_heads](
        layer.query,
        pages,
        tiles,
        batch.page_table,
        _sinks(layer),
        out,
        *_numbers(batch, layer, out),
        scoring.window or 0,
        scoring.chunk or 0,
        has_window=scoring.window is not None,
        has_chunk=scoring.chunk is not None,
        **_constants(batch, layer, blocks),
    )


def _numbers(batch: PagedBatch, layer: LayerInputs, out: torch.Tensor) -> tuple[int | float, ...]:
    """Return the numeric arguments that follow the tensors in both kernels: strides, scale and softcap."""
    return (
        *layer.query.stride()[:2],
        out.stride(0),
        batch.page_table.stride(0),
        *_pages(batch, layer).stride()[:2],
        layer.scoring.scale,
        layer.scoring.softcap or 0.0,
    )


def _constants(batch: PagedBatch, layer: LayerInputs, blocks: TileSizes) -> dict[str, int]:
    """Return the compile-time constants and launch options of both kernels."""
    num_kv_heads, page_size, head_dim = _pages(batch, layer).shape[2:]
    return {
        "group": layer.query.shape[1] // num_kv_heads,
        "page_size": page_size,
        "head_dim": head_dim,
        "block_rows": blocks.rows,
        "block_dim": blocks.dim,
        "block_keys": blocks.keys,
        "has_softcap": layer.scoring.softcap is not None,
        "has_sinks": layer.sinks is not None,
        "is_fp8": _is_fp8(batch),
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def prompt_tiles(batch: PagedBatch, chunks: Sequence[int], num_rows: int) -> Ints32:
    """Cut chunks of prompts into tiles.

    Args:
        chunks: Sequence numbers of the chunks.
        num_rows: Maximum number of rows per tile.

    Returns:
        For each tile: sequence, first row, number of rows, position of the first row. Tiles with the highest
        positions come first, because they have the most keys and take longest. Shape (num_tiles, 4).
    """
    tiles = [
        (sequence, row, min(num_rows, rows.stop - row), int(kv_len) - (rows.stop - row))
        for sequence in chunks
        for rows, kv_len in [(rows_of(batch, sequence), batch.host_kv_lens[sequence])]
        for row in range(rows.start, rows.stop, num_rows)
    ]
    table = np.array(tiles, np.int32)
    return table[np.argsort(-table[:, 3], kind="stable")]


def _pages(batch: PagedBatch, layer: LayerInputs) -> torch.Tensor:
    """Return one layer's view of the pool. Shape (num_pages, 2, num_kv_heads, page_size, head_dim)."""
    pages = batch.pool.layers[layer.index].joined
    assert pages is not None
    return pages.view(torch.uint8) if _is_fp8(batch) else pages


def _is_fp8(batch: PagedBatch) -> bool:
    return batch.dtype is torch.float8_e4m3fn


def _sinks(layer: LayerInputs) -> torch.Tensor:
    """Return the sinks, or a placeholder that the kernel ignores."""
    return layer.query if layer.sinks is None else layer.sinks
