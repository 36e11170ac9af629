"""Paged attention for CPUs: decoding rows read K and V in the pages, without a copy.

One kernel, compiled by numba for the geometry of the model: for each sequence it walks the pages,
takes a page of all heads at once (one contiguous run in memory), and keeps running sums as in online
softmax (Milakov and Gimelshein 2018). Grouped heads share what was read. Rows of prompts go
through torch: with hundreds of rows a page, copying the keys costs nothing beside the arithmetic.

It runs on the calling thread alone. A second pool of threads meets torch's, whose threads spin between
operations: on two cores that was measured to cost more than it gave (8 requests: 29 ms a step
instead of 25). A machine with many cores runs several nodes.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch

from engine.attention import LayerInputs, PagedBatch
from engine.attention_torch import attend_prompts

# Below any score; finite, because with fast-math infinities are undefined.
_FAR_BELOW = np.float32(-1e30)
_NO_WINDOW = 1 << 62
_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)

Kernel = Callable[..., None]


class CpuAttention:
    """The CPU backend."""

    name = "cpu"

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Tell whether pools of this type can be read."""
        return dtype in (torch.float32, torch.bfloat16)

    def attend(self, layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        batch.write(layer)
        if batch.num_decodes == len(layer.query):
            return self._attend_decodes(layer, batch).to(layer.query.dtype)
        out = torch.empty(layer.query.shape, dtype=layer.query.dtype)
        if batch.num_decodes:
            out[: batch.num_decodes] = self._attend_decodes(layer, batch)
        attend_prompts(layer, batch, out)
        return out

    def _attend_decodes(self, layer: LayerInputs, batch: PagedBatch) -> torch.Tensor:
        """Return float32 of shape (num_decodes, num_heads, head_dim)."""
        num_kv_heads, page_size, head_dim = batch.kv.shape[3:]
        query, scoring = layer.query[: batch.num_decodes], layer.scoring
        kernel = _kernel(
            num_kv_heads,
            query.shape[1] // num_kv_heads,
            head_dim,
            page_size,
            is_bfloat16=batch.kv.dtype is torch.bfloat16,
        )
        rows = (query.float() * scoring.scale).contiguous()
        out = torch.empty_like(rows)
        kernel(
            rows.numpy(),
            _bits(batch),
            layer.index,
            batch.host_page_table,
            batch.host_kv_lens,
            scoring.window or _NO_WINDOW,
            np.float32(scoring.softcap or 0.0),
            out.numpy(),
        )
        return out


def _bits(batch: PagedBatch) -> Any:
    """Return the pool as numpy sees it: shape (num_pages, num_layers, elements of a page)."""
    found = batch.scratch.get("bits")
    if found is None:
        kv = batch.kv.view(*batch.kv.shape[:2], -1)
        is_bfloat16 = kv.dtype is torch.bfloat16
        found = kv.view(torch.uint16).numpy() if is_bfloat16 else kv.numpy()
        batch.scratch["bits"] = found
    return found


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _from_bfloat16(bits: Any) -> Any:
    """A bfloat16 is the upper half of the float32 of the same value."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _from_float32(value: Any) -> Any:
    return value


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


@lru_cache
def _kernel(
    num_kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    *,
    is_bfloat16: bool,
) -> Kernel:
    """Compile the kernel for one geometry: with fixed sizes its inner loops become vectors.

    The kernel's arguments: queries, already scaled (n, heads, dim) float32; the pool; the layer; page
    table (n, pages); keys of each sequence (n,); window; softcap, 0 for none; out like queries.
    """
    num_heads = num_kv_heads * group
    page_elements = 2 * num_kv_heads * page_size * head_dim
    load = _from_bfloat16 if is_bfloat16 else _from_float32

    # Branches and arguments: a kernel is one function, and numba reads it as it stands.
    def kernel(  # noqa: PLR0912, PLR0917
        query: Any,
        pool: Any,
        layer: int,
        page_table: Any,
        kv_lens: Any,
        window: int,
        softcap: Any,
        out: Any,
    ) -> None:
        for n in range(len(query)):
            sums = np.zeros((num_heads, head_dim), np.float32)
            highest = np.full(num_heads, _FAR_BELOW, np.float32)
            totals = np.zeros(num_heads, np.float32)
            flat = np.empty(page_elements, np.float32)
            page = flat.reshape((2, num_kv_heads, page_size, head_dim))
            scores = np.empty(page_size, np.float32)
            kv_len = kv_lens[n]
            first = max(0, kv_len - window)
            for p in range(first // page_size, (kv_len + page_size - 1) // page_size):
                source = pool[page_table[n, p], layer]
                for i in range(page_elements):
                    flat[i] = load(source[i])
                begin = max(0, first - p * page_size)
                end = min(page_size, kv_len - p * page_size)
                for head in range(num_heads):
                    keys, values = page[0, head // group], page[1, head // group]
                    for t in range(page_size):
                        score = np.float32(0)
                        for d in range(head_dim):
                            score += query[n, head, d] * keys[t, d]
                        scores[t] = score
                    if softcap > 0:
                        for t in range(page_size):
                            scores[t] = softcap * np.tanh(scores[t] / softcap)
                    top = highest[head]
                    for t in range(begin, end):
                        top = max(top, scores[t])
                    shrink = _exp(highest[head] - top)
                    highest[head] = top
                    total = np.float32(0)
                    for t in range(page_size):
                        scores[t] = _exp(scores[t] - top)
                    for t in range(begin, end):
                        total += scores[t]
                    totals[head] = totals[head] * shrink + total
                    for d in range(head_dim):
                        sums[head, d] *= shrink
                    # What lies past `end` is another request's, or nothing: never touched.
                    for t in range(begin, end):
                        weight = scores[t]
                        for d in range(head_dim):
                            sums[head, d] += weight * values[t, d]
            for head in range(num_heads):
                for d in range(head_dim):
                    out[n, head, d] = sums[head, d] / totals[head]

    compiled: Kernel = numba.njit(kernel, fastmath=True, nogil=True, error_model="numpy")
    return compiled
