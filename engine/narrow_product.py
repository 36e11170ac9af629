"""Products of a few float32 rows with weights that bfloat16 holds exactly, which so take half the time to read.

Most checkpoints are in bfloat16. In float32, which CPUs without instructions for bfloat16 compute in, their weights have 16
bits of zeros. A kernel that numba compiles widens them in registers, so that nothing is rounded.
"""

import ctypes
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch

from tandem.engine.cpu_kernels import (
    MOST,
    call_int,
    compiled,
    from_bfloat16,
    num_threads,
    pointer,
    run,
    thread_number,
)

MOST_ROWS = 4
"""With more rows oneDNN's kernels are faster: they read a weight once for all rows, this one once for each."""


_PART = 1 << 20


class Call(ctypes.Structure):
    """What the kernel is told: addresses, sizes, and the threads as in `operators_cpu.Call`. `bias` 0 is none."""

    _fields_ = [  # type: ignore[mutable-override]
        (name, ctypes.c_int64)
        for name in (
            *("rows", "weight", "bias", "out", "num_rows", "num_in", "num_out"),
            *("num_threads", "thread_number"),
        )
    ]


class NarrowProduct:
    """x W^T + b for few rows.

    Args:
        weight: Values that bfloat16 holds. Shape (num_out, num_in), float32.
        bias: Shape (num_out,), float32.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.to(torch.bfloat16).contiguous(), bias
        self._kernel = _kernel()
        self._call = Call(
            weight=self._weight.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            num_out=weight.shape[0],
            num_in=weight.shape[1],
            thread_number=thread_number(),
        )

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product. Shape (..., num_in) → (..., num_out)."""
        rows, call = rows.contiguous(), self._call
        out = rows.new_empty(*rows.shape[:-1], call.num_out)
        call.rows, call.out = rows.data_ptr(), out.data_ptr()
        call.num_rows, call.num_threads = rows.numel() // call.num_in, num_threads()
        run(self._kernel, ctypes.addressof(call), call.num_threads)
        return out


def is_narrow(weight: torch.Tensor) -> bool:
    """Return whether a weight is on the CPU, in float32, and held exactly by bfloat16."""
    if weight.device.type != "cpu" or weight.dtype is not torch.float32:
        return False
    # Part by part: in most weights that are not narrow, the first one shows it.
    bits = weight.contiguous().view(torch.int32).flatten()
    parts = (bits[start : start + _PART] for start in range(0, len(bits), _PART))
    return not any(bool((part & 0xFFFF).any()) for part in parts)


@lru_cache
def _kernel() -> int:
    """Return the address of the compiled kernel."""

    def narrow_product(address: Any) -> None:
        call = numba.carray(address, 1)[0]
        num_in, num_rows = call.num_in, call.num_rows
        rows = numba.carray(pointer(call.rows), (MOST,), np.float32)
        weight = numba.carray(pointer(call.weight), (MOST,), np.uint16)
        bias = numba.carray(pointer(call.bias), (MOST,), np.float32)
        out = numba.carray(pointer(call.out), (MOST,), np.float32)
        thread = call_int(call.thread_number) if call.num_threads > 1 else 0
        share = (call.num_out + call.num_threads - 1) // call.num_threads
        for n in range(thread * share, min(call.num_out, (thread + 1) * share)):
            column = np.uint64(n * num_in)
            first = bias[np.uint64(n)] if call.bias else np.float32(0)
            for m in range(num_rows):
                a, total = np.uint64(m * num_in), first
                for i in range(num_in):
                    at = np.uint64(i)
                    total += from_bfloat16(weight[column + at]) * rows[a + at]
                out[np.uint64(m * call.num_out + n)] = total

    address: int = compiled(narrow_product, np.dtype(Call), ()).address
    return address
