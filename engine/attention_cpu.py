"""Paged attention for CPUs: decoding rows read and write the pages in place, without a copy.

One call of a kernel computes all decoding rows of a layer, on torch's threads. Numba compiles the kernel for
the geometry of the model. For each sequence and KV head it writes the row's K and V into the page. Then it
iterates over the pages with online softmax (Milakov and Gimelshein 2018). The query heads of a group share
each read.

Rows of prompts go through torch: they compute so much per key that copying the keys is cheap in comparison.
So do layers that the kernel does not support: sinks, chunks, latents, or K and V of different sizes.
"""

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from tandem.engine.attention import LayerInputs, PagedBatch
from tandem.engine.attention_torch import TorchAttention, attend_prompts, empty_output
from tandem.engine.cpu_kernels import (
    MOST,
    compiled,
    exp,
    from_bfloat16,
    inline,
    num_threads,
    place,
    pointer,
    run,
    team,
    to_bfloat16,
)

_NO_WINDOW = 1 << 62
# Below any score. Finite, because infinities are undefined with fast-math.
_FAR_BELOW = np.float32(-1e30)


class Call(ctypes.Structure):
    """What the kernel is told: addresses, and strides in elements.

    The threads are those of `place`.
    `pool_page` is from page to page, `pool_layer` from the page's begin to the layer. Dimensions of a head are
    neighbours everywhere. `out` is contiguous, (num_seqs, num_heads, head_dim). `softcap` 0 is none.
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
        """Write K and V, then attend."""
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
    """Write K and V of the decoding rows, and write their output to `out`."""
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


def _call(batch: PagedBatch) -> Call:
    """Return a `Call` with the fields that all layers of a forward share."""
    return Call(
        pool=batch.pool.pages.data_ptr(),
        pool_page=batch.pool.page_elements,
        page_table=batch.host_page_table.ctypes.data,
        max_pages=batch.host_page_table.shape[1],
        kv_lens=batch.host_kv_lens.ctypes.data,
        num_seqs=batch.num_decodes,
        num_threads=num_threads(),
        **team(),
    )


def _unit_stride(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()


# ── the kernel ───────────────────────────────────────────────────────────────────────────────────


class Geometry(NamedTuple):
    """Parameters that a kernel is compiled for: constant sizes let the compiler vectorize inner loops.

    Attributes:
        group: Number of query heads per KV head.
        is_bfloat16: Whether queries, pool and output are bfloat16; otherwise float32.
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
    """Replace scores by weights, 0 outside begin ... end-1; return the new maximum and the sum."""
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
def _add(weights: Any, values: Any, shrink: Any, sums: Any) -> None:
    for d in range(len(sums)):
        weighted = sums[d] * shrink
        for t in range(len(weights)):
            weighted += weights[t] * values[t, d]
        sums[d] = weighted


@lru_cache
def kernel_for(geometry: Geometry) -> Any:
    """Return a kernel: its `address` is a C function that takes the address of a `Call`.

    The kernel is compiled, or read from numba's cache on disk if an earlier process has compiled it.
    """
    num_kv_heads, group, head_dim = geometry.num_kv_heads, geometry.group, geometry.head_dim
    page_size, is_bfloat16 = geometry.page_size, geometry.is_bfloat16
    plane = page_size * head_dim  # elements of one head's K, or V, in a page
    element = np.uint16 if is_bfloat16 else np.float32

    # One long function, because the arrays are allocated once for all units, and any extracted part would
    # need most of them as arguments.
    def kernel(address: Any) -> None:
        call = numba.carray(address, 1)[0]
        query = numba.carray(pointer(call.query), (MOST,), element)
        key = numba.carray(pointer(call.key), (MOST,), element)
        value = numba.carray(pointer(call.value), (MOST,), element)
        pool = numba.carray(pointer(call.pool), (MOST,), element)
        page_table = numba.carray(pointer(call.page_table), (MOST,), np.int32)
        kv_lens = numba.carray(pointer(call.kv_lens), (MOST,), np.int32)
        out = numba.carray(pointer(call.out), (MOST,), element)
        q, sums = np.empty((2, group, head_dim), np.float32)
        highest, totals = np.empty((2, group), np.float32)
        flat_keys, flat_values = np.empty(plane, np.float32), np.empty(plane, np.float32)
        keys = flat_keys.reshape((page_size, head_dim))
        values = flat_values.reshape((page_size, head_dim))
        scores = np.empty(page_size, np.float32)
        thread, started = place(call)
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
                highest[g], totals[g] = _FAR_BELOW, 0
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
                # Values beyond `end` are stale and may be NaN, which a weight of zero would not
                # cancel.
                for t in range(end, page_size):
                    for d in range(head_dim):
                        values[t, d] = 0
                for g in range(group):
                    _score(q[g], keys, call.softcap, scores)
                    top, total = _weigh(scores, begin, end, highest[g])
                    shrink = exp(highest[g] - top)
                    highest[g], totals[g] = top, totals[g] * shrink + total
                    _add(scores, values, shrink, sums[g])

            for g in range(group):
                start = (n * num_kv_heads * group + kv_head * group + g) * head_dim
                _narrow(sums[g], totals[g], is_bfloat16, out, start)

    return compiled(kernel, np.dtype(Call), geometry)
