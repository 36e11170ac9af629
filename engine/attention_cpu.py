"""Paged attention for CPUs: decoding rows read and write the pages where they are, without a copy.

A kernel does all of a layer's decoding rows in one call, on torch's own threads. It is compiled by numba for
the geometry of the model. For each sequence and KV head it puts the row's own K and V into the page, then
walks the pages with running sums as in online softmax (Milakov and Gimelshein 2018). The heads of a group
share what was read.

Rows of prompts go through torch: with hundreds of rows a page, copying the keys costs nothing beside the
arithmetic. So do layers that the kernel does not know: with sinks, chunks, latents, or K and V of two sizes.
"""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tandem.engine.attention import LayerInputs, PagedBatch
from tandem.engine.attention_torch import TorchAttention, attend_prompts, empty_output

_NO_WINDOW = 1 << 62
# Elements of what is only known by its address.
_MOST = 1 << 62
# Below any score; finite, because with fast-math infinities are undefined.
_FAR_BELOW = np.float32(-1e30)
_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)

CALL = np.dtype(
    [
        *((name, np.int64) for name in ("query", "query_row", "query_head")),
        *((name, np.int64) for name in ("key", "key_row", "key_head")),
        *((name, np.int64) for name in ("value", "value_row", "value_head")),
        ("pool", np.int64),
        ("pool_page", np.int64),
        ("pool_layer", np.int64),
        ("page_table", np.int64),
        ("max_pages", np.int64),
        ("kv_lens", np.int64),
        ("num_seqs", np.int64),
        ("out", np.int64),
        ("num_threads", np.int64),
        ("window", np.int64),
        ("scale", np.float32),
        ("softcap", np.float32),
    ],
    align=True,
)
"""What the kernel is told: addresses, and strides in elements.

`pool_page` is from page to page, `pool_layer` from the page's begin to the layer. Dimensions of a head are
neighbours everywhere. `out` is contiguous, (num_seqs, num_heads, head_dim). `softcap` 0 is none.
"""


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
        """Write K and V, then attend."""
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
    _run(kernel, call.ctypes.data)


def _call(batch: PagedBatch) -> np.ndarray:
    """Return what is the same for all layers of a forward. One element of type `CALL`."""
    call = np.zeros((), CALL)
    call["pool"], call["pool_page"] = batch.pool.pages.data_ptr(), batch.pool.page_elements
    call["page_table"] = batch.host_page_table.ctypes.data
    call["max_pages"] = batch.host_page_table.shape[1]
    call["kv_lens"] = batch.host_kv_lens.ctypes.data
    call["num_seqs"], call["num_threads"] = batch.num_decodes, _num_threads()
    return call


def _unit_stride(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()


# ── the kernel ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a kernel is compiled for: with fixed sizes its inner loops become vectors.

    Attributes:
        group: Query heads of each KV head.
        is_bfloat16: Whether everything is bfloat16, and not float32.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    is_bfloat16: bool


# Offsets into what is known by its address only are unsigned: a signed one may be negative to numba, which
# then cannot use vectors. Slices would do as well, and take twice as long to compile.


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_typing: Any, _address: Any) -> Any:
    """Make a pointer of an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _from_bfloat16(bits: Any) -> Any:
    """A bfloat16 is the upper half of the float32 of the same value."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _to_bfloat16(value: Any) -> Any:
    """Round to the nearest, ties to even."""
    bits = np.float32(value).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _float32(value: Any) -> Any:
    return np.float32(value)


@numba.njit(inline="always", fastmath=True)  # type: ignore[untyped-decorator]
def _exp(x: Any) -> Any:
    """e^x for x <= 0, to one unit in the last place or two: vectorised, which libm's is not."""
    x = max(x, np.float32(-87.0)) * _LOG2_E
    whole = np.floor(x + np.float32(0.5))
    f = (x - whole) * _LN_2
    # Taylor to the sixth power: |f| is at most ln(2) / 2.
    series = np.float32(1 / 120) + f * np.float32(1 / 720)
    series = np.float32(1 / 6) + f * (np.float32(1 / 24) + f * series)
    series = np.float32(1) + f * (np.float32(1) + f * (np.float32(0.5) + f * series))
    exponent = np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23)
    return series * np.uint32(exponent).view(np.float32)


def kernel_for(geometry: Geometry) -> int:
    """Return the address of a C function that takes the address of a `CALL`; see `_run`."""
    return int(_compile(geometry).address)


class _PageFunctions(NamedTuple):
    """What is done to one page of one KV head. They become part of the kernel that calls them."""

    widen: Any
    score: Any
    weigh: Any
    add: Any


def _page_functions(geometry: Geometry) -> _PageFunctions:
    page_size, head_dim = geometry.page_size, geometry.head_dim
    load = _from_bfloat16 if geometry.is_bfloat16 else _float32
    inline = numba.njit(inline="always", fastmath=True, error_model="numpy")

    @inline  # type: ignore[untyped-decorator]
    def widen(elements: Any, start: int, out: Any) -> None:
        for i in range(len(out)):
            out[i] = load(elements[np.uint64(start + i)])

    @inline  # type: ignore[untyped-decorator]
    def score(q: Any, g: int, keys: Any, softcap: Any, scores: Any) -> None:
        for t in range(page_size):
            product = np.float32(0)
            for d in range(head_dim):
                product += q[g, d] * keys[t, d]
            scores[t] = product
        if softcap > 0:
            for t in range(page_size):
                scores[t] = softcap * np.tanh(scores[t] / softcap)

    @inline  # type: ignore[untyped-decorator]
    def weigh(scores: Any, begin: int, end: int, highest: Any) -> Any:
        """Make weights of scores, none outside of begin ... end; return the new highest and the sum."""
        top = highest
        for t in range(begin, end):
            top = max(top, scores[t])
        for t in range(page_size):
            scores[t] = _exp(scores[t] - top)
        total = np.float32(0)
        for t in range(page_size):
            scores[t] = scores[t] if begin <= t < end else np.float32(0)
            total += scores[t]
        return top, total

    @inline  # type: ignore[untyped-decorator]
    def add(weights: Any, values: Any, shrink: Any, sums: Any, g: int) -> None:
        for d in range(head_dim):
            weighted = sums[g, d] * shrink
            for t in range(page_size):
                weighted += weights[t] * values[t, d]
            sums[g, d] = weighted

    return _PageFunctions(widen, score, weigh, add)


def _c_function(kernel: Callable[[Any], None]) -> Any:
    signature = types.void(types.CPointer(numba.from_dtype(CALL)))
    return numba.cfunc(signature, nopython=True, fastmath=True, error_model="numpy")(kernel)


# Kept for good: compiled code lives as long as its function object.
@lru_cache
def _compile(geometry: Geometry) -> Any:
    num_kv_heads, group, head_dim = geometry.num_kv_heads, geometry.group, geometry.head_dim
    page_size = geometry.page_size
    plane = page_size * head_dim  # elements of one head's K, or V, in a page
    element = np.uint16 if geometry.is_bfloat16 else np.float32
    load, store = (_from_bfloat16, _to_bfloat16) if geometry.is_bfloat16 else (_float32, _float32)
    thread_number = _thread_number()
    widen, score, weigh, add = _page_functions(geometry)

    # One function, long as it is: the arrays are made once for all units, and any part of it would take
    # most of them. What stands alone is in `_page_functions`.
    def kernel(pointer: Any) -> None:
        call = numba.carray(pointer, 1)[0]
        query = numba.carray(_pointer(call.query), (_MOST,), element)
        key = numba.carray(_pointer(call.key), (_MOST,), element)
        value = numba.carray(_pointer(call.value), (_MOST,), element)
        pool = numba.carray(_pointer(call.pool), (_MOST,), element)
        page_table = numba.carray(_pointer(call.page_table), (_MOST,), np.int32)
        kv_lens = numba.carray(_pointer(call.kv_lens), (_MOST,), np.int32)
        out = numba.carray(_pointer(call.out), (_MOST,), element)
        q, sums = np.empty((2, group, head_dim), np.float32)
        highest, totals = np.empty((2, group), np.float32)
        flat_keys, flat_values = np.empty(plane, np.float32), np.empty(plane, np.float32)
        keys = flat_keys.reshape((page_size, head_dim))
        values = flat_values.reshape((page_size, head_dim))
        scores = np.empty(page_size, np.float32)
        for unit in range(thread_number(), call.num_seqs * num_kv_heads, call.num_threads):
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
                for d in range(head_dim):
                    q[g, d] = load(query[np.uint64(start + d)]) * call.scale
                    sums[g, d] = 0
            first = max(0, kv_len - call.window)
            for p in range(first // page_size, (kv_len + page_size - 1) // page_size):
                begin = max(0, first - p * page_size)
                end = min(page_size, kv_len - p * page_size)
                page = int(page_table[pages + p]) * call.pool_page
                widen(pool, page + plane_k, flat_keys)
                widen(pool, page + plane_v, flat_values)
                # What lies past `end` is another request's, or nothing, and may be no number at all:
                # a weight of zero would not do.
                for t in range(end, page_size):
                    for d in range(head_dim):
                        values[t, d] = 0
                for g in range(group):
                    score(q, g, keys, call.softcap, scores)
                    top, total = weigh(scores, begin, end, highest[g])
                    shrink = _exp(highest[g] - top)
                    highest[g], totals[g] = top, totals[g] * shrink + total
                    add(scores, values, shrink, sums, g)

            for g in range(group):
                start = (n * num_kv_heads * group + kv_head * group + g) * head_dim
                for d in range(head_dim):
                    out[np.uint64(start + d)] = store(sums[g, d] / totals[g])

    return _c_function(kernel)


# ── torch's own threads ──────────────────────────────────────────────────────────────────────────
#
# On Linux they are GNU OpenMP's, and spin for a while after each operator: a pool beside them would find
# the cores taken, while a parallel region of the same library finds its threads waiting.


@lru_cache
def _library() -> ctypes.CDLL | None:
    """Return the OpenMP library that torch loaded; None where torch uses another."""
    try:
        library = ctypes.CDLL("libgomp.so.1", mode=getattr(os, "RTLD_NOLOAD", 0))
        library.GOMP_parallel.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint,
            ctypes.c_uint,
        )
        library.GOMP_parallel.restype = None
    except (OSError, AttributeError):
        return None
    return library


@lru_cache
def _thread_number() -> Callable[[], int]:
    """Return a function, for compiled code to call, that tells which thread of `_run` it is on."""
    library = _library()
    if library is None:
        alone: Callable[[], int] = numba.njit(lambda: 0)
        return alone
    number = library.omp_get_thread_num
    number.argtypes, number.restype = (), ctypes.c_int
    return number


def _num_threads() -> int:
    """Return how many threads `_run` uses: torch's number, or one where they cannot be shared."""
    return torch.get_num_threads() if _library() is not None else 1


def _run(function: int, argument: int) -> None:
    """Call `function(argument)` on every thread at once; return when all have.

    Args:
        function: Address of a C function `void (*)(void *)`; it must take no lock of Python's.
        argument: Address of what it is given.
    """
    count = _num_threads()
    library = _library()
    if count == 1 or library is None:
        _one_argument(function)(argument)
    else:
        # Always all of them: another number than before makes the library end threads and start them.
        library.GOMP_parallel(function, argument, count, 0)


@lru_cache
def _one_argument(function: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
