"""Products of a few rows with bfloat16 weights on CPUs, limited only by memory bandwidth.

Most checkpoints are in bfloat16. CPUs without bfloat16 instructions compute in float32, where half of the bytes of each
weight are zeros. This kernel, compiled by numba, reads the weights as bfloat16, once for all rows, and widens them in
registers. The widening is exact.
"""

import ctypes
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch

from tandem.engine.kernels.cpu import (
    UNBOUNDED,
    Element,
    compile_kernel,
    from_bfloat16,
    num_threads,
    openmp_functions,
    pointer,
    run,
    thread_and_count,
)

MAX_ROWS = {torch.float32: 16, torch.bfloat16: 4}
"""Largest number of rows. Beyond it this kernel is limited by arithmetic, and oneDNN measured faster."""

_BLOCK = 1 << 20


class ProductArguments(ctypes.Structure):
    """Kernel arguments: addresses, sizes, and the fields that `thread_and_count` reads. `bias` is 0 without a bias."""

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
        weight: Values that bfloat16 represents exactly. Shape (num_out, num_in), float32 or bfloat16; the rows must have
            the same type.
        bias: Shape (num_out,), same type.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.to(torch.bfloat16).contiguous(), bias
        self._kernel = _kernel(is_bfloat16=weight.dtype is torch.bfloat16)
        self._dtype = weight.dtype
        self._max_elements = MAX_ROWS[weight.dtype] * weight.shape[1]
        self._call = ProductArguments(
            weight=self._weight.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            num_out=weight.shape[0],
            num_in=weight.shape[1],
            **openmp_functions(),
        )
        self._address = ctypes.addressof(self._call)

    def supports(self, rows: torch.Tensor) -> bool:
        """Return whether the rows have the right type and are few enough for this kernel to be the fastest."""
        return rows.dtype is self._dtype and rows.numel() <= self._max_elements

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product. Shape (..., num_in) → (..., num_out)."""
        rows, call = rows.contiguous(), self._call
        out = rows.new_empty(*rows.shape[:-1], call.num_out)
        call.rows, call.out = rows.data_ptr(), out.data_ptr()
        call.num_rows, call.num_threads = rows.numel() // call.num_in, num_threads()
        run(self._kernel, self._address, call.num_threads)
        return out


def fits_bfloat16(weight: torch.Tensor) -> bool:
    """Return whether a weight is a float32 or bfloat16 CPU tensor that bfloat16 represents exactly."""
    if weight.device.type != "cpu" or weight.dtype not in MAX_ROWS:
        return False
    if weight.dtype is torch.bfloat16:
        return True
    # Checked block by block: for most weights that do not fit, the first block already shows it.
    bits = weight.contiguous().view(torch.int32).flatten()
    blocks = (bits[start : start + _BLOCK] for start in range(0, len(bits), _BLOCK))
    return not any(bool((block & 0xFFFF).any()) for block in blocks)


@lru_cache
def _kernel(*, is_bfloat16: bool) -> int:
    """Return the address of the compiled kernel."""
    kind, load, store = Element.of(is_bfloat16)

    def narrow_product(address: Any) -> None:
        call = numba.carray(address, 1)[0]
        num_in, num_out, num_rows = call.num_in, call.num_out, call.num_rows
        rows = numba.carray(pointer(call.rows), (UNBOUNDED,), kind)
        weight = numba.carray(pointer(call.weight), (UNBOUNDED,), np.uint16)
        bias = numba.carray(pointer(call.bias), (UNBOUNDED,), kind)
        out = numba.carray(pointer(call.out), (UNBOUNDED,), kind)
        wide = np.empty(num_rows * num_in, np.float32)
        for i in range(num_rows * num_in):
            wide[i] = load(rows[np.uint64(i)])
        # Process four columns at a time, one from each quarter, to keep four load streams in flight, and two rows,
        # which share the widened weights. Indices past the end are clamped, so that the last column or row may be
        # written twice.
        quarter = (num_out + 3) // 4
        thread, started = thread_and_count(call)
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

    address: int = compile_kernel(narrow_product, np.dtype(ProductArguments), is_bfloat16).address
    return address
