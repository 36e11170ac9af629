"""Products of a few rows with weights that bfloat16 holds, which are read once for all rows, at the memory's rate.

Most checkpoints are in bfloat16. In float32, which CPUs without instructions for bfloat16 compute in, their weights have 16
bits of zeros, and so take twice the time to read. A kernel that numba compiles widens them in registers: nothing is rounded.
"""

import ctypes
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch

from tandem.engine.cpu_kernels import (
    MOST,
    Element,
    compiled,
    from_bfloat16,
    num_threads,
    place,
    pointer,
    run,
    team,
)

MOST_ROWS = {torch.float32: 16, torch.bfloat16: 4}
"""With more rows oneDNN's kernels are faster, as measured: these wait for arithmetic then, not for memory."""

_PART = 1 << 20


class Call(ctypes.Structure):
    """What the kernel is told: addresses, sizes, and the threads of `place`. `bias` 0 is none."""

    _fields_ = [  # type: ignore[mutable-override]
        (name, ctypes.c_int64)
        for name in (
            *("rows", "weight", "bias", "out", "num_rows", "num_in", "num_out"),
            *("num_threads", "thread_number", "num_started"),
        )
    ]


class NarrowProduct:
    """x W^T + b for few rows.

    Args:
        weight: Values that bfloat16 holds. Shape (num_out, num_in), float32 or bfloat16, which is the type of rows too.
        bias: Shape (num_out,), of the same type.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.to(torch.bfloat16).contiguous(), bias
        self._kernel = _kernel(is_bfloat16=weight.dtype is torch.bfloat16)
        self._dtype = weight.dtype
        self._most_elements = MOST_ROWS[weight.dtype] * weight.shape[1]
        self._call = Call(
            weight=self._weight.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            num_out=weight.shape[0],
            num_in=weight.shape[1],
            **team(),
        )
        self._address = ctypes.addressof(self._call)

    def suits(self, rows: torch.Tensor) -> bool:
        """Return whether rows are so few that this is the fastest way."""
        return rows.dtype is self._dtype and rows.numel() <= self._most_elements

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product. Shape (..., num_in) → (..., num_out)."""
        rows, call = rows.contiguous(), self._call
        out = rows.new_empty(*rows.shape[:-1], call.num_out)
        call.rows, call.out = rows.data_ptr(), out.data_ptr()
        call.num_rows, call.num_threads = rows.numel() // call.num_in, num_threads()
        run(self._kernel, self._address, call.num_threads)
        return out


def is_narrow(weight: torch.Tensor) -> bool:
    """Return whether a weight is on the CPU, in float32 or bfloat16, and held exactly by bfloat16."""
    if weight.device.type != "cpu" or weight.dtype not in MOST_ROWS:
        return False
    if weight.dtype is torch.bfloat16:
        return True
    # Part by part: in most weights that are not narrow, the first one shows it.
    bits = weight.contiguous().view(torch.int32).flatten()
    parts = (bits[start : start + _PART] for start in range(0, len(bits), _PART))
    return not any(bool((part & 0xFFFF).any()) for part in parts)


@lru_cache
def _kernel(*, is_bfloat16: bool) -> int:
    """Return the address of the compiled kernel."""
    kind, load, store = Element.of(is_bfloat16)

    def narrow_product(address: Any) -> None:
        call = numba.carray(address, 1)[0]
        num_in, num_out, num_rows = call.num_in, call.num_out, call.num_rows
        rows = numba.carray(pointer(call.rows), (MOST,), kind)
        weight = numba.carray(pointer(call.weight), (MOST,), np.uint16)
        bias = numba.carray(pointer(call.bias), (MOST,), kind)
        out = numba.carray(pointer(call.out), (MOST,), kind)
        wide = np.empty(num_rows * num_in, np.float32)
        for i in range(num_rows * num_in):
            wide[i] = load(rows[np.uint64(i)])
        # Four columns at a time, each from a quarter of its own: one stream of loads does not fill the memory's
        # queue. And two rows at a time, which share what was widened. The last of each stands in for what is missing.
        quarter = (num_out + 3) // 4
        thread, started = place(call)
        share = (quarter + started - 1) // started
        for n in range(thread * share, min(quarter, (thread + 1) * share)):
            n1, n2, n3 = (
                min(n + quarter, num_out - 1),
                min(n + 2 * quarter, num_out - 1),
                min(n + 3 * quarter, num_out - 1),
            )
            c0, c1, c2, c3 = (
                np.uint64(n * num_in),
                np.uint64(n1 * num_in),
                np.uint64(n2 * num_in),
                np.uint64(n3 * num_in),
            )
            for m in range(0, num_rows, 2):
                other = min(m + 1, num_rows - 1)
                a, b = np.uint64(m * num_in), np.uint64(other * num_in)
                a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
                for i in range(num_in):
                    at = np.uint64(i)
                    x, y = wide[a + at], wide[b + at]
                    w0, w1 = from_bfloat16(weight[c0 + at]), from_bfloat16(weight[c1 + at])
                    w2, w3 = from_bfloat16(weight[c2 + at]), from_bfloat16(weight[c3 + at])
                    a0, a1, a2, a3 = a0 + w0 * x, a1 + w1 * x, a2 + w2 * x, a3 + w3 * x
                    b0, b1, b2, b3 = b0 + w0 * y, b1 + w1 * y, b2 + w2 * y, b3 + w3 * y
                for column, total, below in ((n, a0, b0), (n1, a1, b1), (n2, a2, b2), (n3, a3, b3)):
                    first = load(bias[np.uint64(column)]) if call.bias else np.float32(0)
                    out[np.uint64(m * num_out + column)] = store(total + first)
                    out[np.uint64(other * num_out + column)] = store(below + first)

    address: int = compiled(narrow_product, np.dtype(Call), is_bfloat16).address
    return address
