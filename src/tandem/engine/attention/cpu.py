"""Paged attention for CPUs: decoding rows read and write the pages in place, without a copy.

One kernel call computes all decoding rows of a layer on torch's threads. Numba compiles the kernel for the
model's geometry. For each sequence and KV head, the kernel writes the row's K and V into the page, then
iterates over the pages with online softmax (Milakov and Gimelshein 2018). The query heads of a group share
each read.

torch computes the rows of prompts, whose arithmetic per key far outweighs the copy of the keys. It also computes
layers that the kernel does not support: those with sinks, chunks or latents, or with K and V of different sizes.
"""

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from tandem.engine.attention.paged import LayerInputs, PagedBatch
from tandem.engine.attention.torch import TorchAttention, attend_prompts, empty_output
from tandem.engine.kernels.cpu import (
    UNBOUNDED,
    compile_kernel,
    exp,
    from_bfloat16,
    inline,
    num_threads,
    openmp_functions,
    pointer,
    run,
    thread_and_count,
    to_bfloat16,
)

_NO_WINDOW = 1 << 62
# Below every score. Finite, because infinities are undefined with fast-math.
_MIN_SCORE = np.float32(-1e30)


class AttentionArguments(ctypes.Structure):
    """Kernel arguments: addresses, strides in elements, and the fields that `thread_and_count` reads.

    The dimensions of a head are contiguous in all arrays.

    Attributes:
        pool_page: Stride between pages.
        pool_layer: Offset of the layer in a page.
        out: Contiguous. Shape (num_seqs, num_heads, head_dim).
        softcap: 0 without a softcap.
    """

    _fields_ = [  # type: ignore[mutable-override]
        *((name, ctypes.c_int64) for name in ("query", "query_row", "query_head")),
        *((name, ctypes.c_int64) for name in ("key", "key_row", "key_head")),
        *((name, ctypes.c_int64) for name in ("value", "value_row", "value_head")),
        *((name, ctypes.c_int64) for name in ("pool", "pool_page", "pool_layer")),
        *((name, ctypes.c_int64) for name in ("page_table", "max_pages", "kv_lens", "num_seqs")),
        *((name, ctypes.c_int64) for name in ("out", "window")),
        *((name, ctypes.c_int64) for name in ("num_threads", "thread_number", "num_started")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class CpuAttention:
    """The CPU backend."""

    name = "cpu"

    def __init__(self) -> None:
        self._reference = TorchAttention()

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Return whether the backend supports pools of this type."""
        return dtype in (torch.float32, torch.bfloat16)

    def attend(self, layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
        """Write K and V, then compute attention."""
        layer.rotate()
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
    """Write K and V of the decoding rows into the pool, and their attention output into `out`."""
    pages = batch.pool.layers[layer.index]
    _, num_kv_heads, page_size, head_dim = pages.key.shape
    call = batch.scratch.get("call")
    if call is None:
        call = batch.scratch["call"] = _call(batch)
    query, key, value = (
        _unit_stride(part.to(batch.dtype)) for part in (layer.query, layer.key, layer.value)
    )
    call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
    call.query_row, call.query_head, _ = query.stride()
    call.key_row, call.key_head, _ = key.stride()
    call.value_row, call.value_head, _ = value.stride()
    call.pool_layer, call.out = pages.begin, out.data_ptr()
    call.window = layer.scoring.window or _NO_WINDOW
    call.scale, call.softcap = layer.scoring.scale, layer.scoring.softcap or 0
    group, is_bfloat16 = query.shape[1] // num_kv_heads, batch.dtype is torch.bfloat16
    kernel = kernel_for(Geometry(num_kv_heads, group, head_dim, page_size, is_bfloat16))
    run(kernel.address, ctypes.addressof(call), call.num_threads)


def _call(batch: PagedBatch) -> AttentionArguments:
    """Return kernel arguments with the fields that all layers of a forward share."""
    return AttentionArguments(
        pool=batch.pool.pages.data_ptr(),
        pool_page=batch.pool.page_elements,
        page_table=batch.host_page_table.ctypes.data,
        max_pages=batch.host_page_table.shape[1],
        kv_lens=batch.host_kv_lens.ctypes.data,
        num_seqs=batch.num_decodes,
        num_threads=num_threads(),
        **openmp_functions(),
    )


def _unit_stride(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()


# ── the kernel ───────────────────────────────────────────────────────────────────────────────────


class Geometry(NamedTuple):
    """Sizes that a kernel is compiled for. Constants let the compiler vectorize the inner loops.

    Attributes:
        group: Number of query heads per KV head.
        is_bfloat16: Whether queries, pool and output are bfloat16 instead of float32.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    is_bfloat16: bool


@inline  # type: ignore[untyped-decorator]
def _widen(elements: Any, start: int, is_bfloat16: bool, out: Any) -> None:
    for i in range(len(out)):
        element = elements[np.uint64(start + i)]
        if is_bfloat16:
            out[i] = from_bfloat16(element)
        else:
            out[i] = element


@inline  # type: ignore[untyped-decorator]
def _narrow(values: Any, total: Any, is_bfloat16: bool, out: Any, start: int) -> None:
    for i in range(len(values)):
        value = values[i] / total
        if is_bfloat16:
            out[np.uint64(start + i)] = to_bfloat16(value)
        else:
            out[np.uint64(start + i)] = value


@inline  # type: ignore[untyped-decorator]
def _score(q: Any, keys: Any, softcap: Any, scores: Any) -> None:
    for t in range(len(scores)):
        product = np.float32(0)
        for d in range(len(q)):
            product += q[d] * keys[t, d]
        scores[t] = product
    if softcap > 0:
        for t in range(len(scores)):
            scores[t] = softcap * np.tanh(scores[t] / softcap)


@inline  # type: ignore[untyped-decorator]
def _weigh(scores: Any, begin: int, end: int, highest: Any) -> Any:
    """Replace scores by weights, 0 outside begin ... end-1; return the new maximum score and the sum of weights."""
    top = highest
    for t in range(begin, end):
        top = max(top, scores[t])
    for t in range(len(scores)):
        scores[t] = exp(scores[t] - top)
    total = np.float32(0)
    for t in range(len(scores)):
        scores[t] = scores[t] if begin <= t < end else np.float32(0)
        total += scores[t]
    return top, total


@inline  # type: ignore[untyped-decorator]
def _add(weights: Any, values: Any, rescale: Any, sums: Any) -> None:
    for d in range(len(sums)):
        weighted = sums[d] * rescale
        for t in range(len(weights)):
            weighted += weights[t] * values[t, d]
        sums[d] = weighted


@lru_cache
def kernel_for(geometry: Geometry) -> Any:
    """Return the kernel for a geometry; its C function takes the address of an `AttentionArguments`."""
    num_kv_heads, group, head_dim = geometry.num_kv_heads, geometry.group, geometry.head_dim
    page_size, is_bfloat16 = geometry.page_size, geometry.is_bfloat16
    plane = page_size * head_dim  # elements of one head's K, or V, in a page
    element = np.uint16 if is_bfloat16 else np.float32

    # One long function: its arrays are allocated once for all units, and any extracted part would need most of
    # them as arguments.
    def kernel(address: Any) -> None:
        call = numba.carray(address, 1)[0]
        query = numba.carray(pointer(call.query), (UNBOUNDED,), element)
        key = numba.carray(pointer(call.key), (UNBOUNDED,), element)
        value = numba.carray(pointer(call.value), (UNBOUNDED,), element)
        pool = numba.carray(pointer(call.pool), (UNBOUNDED,), element)
        page_table = numba.carray(pointer(call.page_table), (UNBOUNDED,), np.int32)
        kv_lens = numba.carray(pointer(call.kv_lens), (UNBOUNDED,), np.int32)
        out = numba.carray(pointer(call.out), (UNBOUNDED,), element)
        q, sums = np.empty((2, group, head_dim), np.float32)
        highest, totals = np.empty((2, group), np.float32)
        flat_keys, flat_values = np.empty(plane, np.float32), np.empty(plane, np.float32)
        keys = flat_keys.reshape((page_size, head_dim))
        values = flat_values.reshape((page_size, head_dim))
        scores = np.empty(page_size, np.float32)
        thread, started = thread_and_count(call)
        for unit in range(thread, call.num_seqs * num_kv_heads, started):
            n, kv_head = unit // num_kv_heads, unit % num_kv_heads
            kv_len, pages = int(kv_lens[n]), n * call.max_pages
            plane_k = call.pool_layer + kv_head * plane
            plane_v = plane_k + num_kv_heads * plane

            last_page, offset = divmod(kv_len - 1, page_size)
            slot = int(page_table[pages + last_page]) * call.pool_page + offset * head_dim
            start = n * call.key_row + kv_head * call.key_head
            row = n * call.value_row + kv_head * call.value_head
            for d in range(head_dim):
                pool[np.uint64(plane_k + slot + d)] = key[np.uint64(start + d)]
                pool[np.uint64(plane_v + slot + d)] = value[np.uint64(row + d)]

            for g in range(group):
                start = n * call.query_row + (kv_head * group + g) * call.query_head
                highest[g], totals[g] = _MIN_SCORE, 0
                _widen(query, start, is_bfloat16, q[g])
                for d in range(head_dim):
                    q[g, d] *= call.scale
                    sums[g, d] = 0
            first = max(0, kv_len - call.window)
            for p in range(first // page_size, (kv_len + page_size - 1) // page_size):
                begin = max(0, first - p * page_size)
                end = min(page_size, kv_len - p * page_size)
                page = int(page_table[pages + p]) * call.pool_page
                _widen(pool, page + plane_k, is_bfloat16, flat_keys)
                _widen(pool, page + plane_v, is_bfloat16, flat_values)
                # Values beyond `end` are stale and may be NaN, which a weight of 0 does not cancel.
                for t in range(end, page_size):
                    for d in range(head_dim):
                        values[t, d] = 0
                for g in range(group):
                    _score(q[g], keys, call.softcap, scores)
                    top, total = _weigh(scores, begin, end, highest[g])
                    rescale = exp(highest[g] - top)
                    highest[g], totals[g] = top, totals[g] * rescale + total
                    _add(scores, values, rescale, sums[g])

            for g in range(group):
                start = (n * num_kv_heads * group + kv_head * group + g) * head_dim
                _narrow(sums[g], totals[g], is_bfloat16, out, start)

    return compile_kernel(kernel, np.dtype(AttentionArguments), geometry)
