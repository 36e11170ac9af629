"""The operators between matrix products on CPUs, as numba kernels."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch

from tandem.engine.kernels.cpu import (
    UNBOUNDED,
    Element,
    compile_kernel,
    exp,
    num_threads,
    openmp_functions,
    pointer,
    run,
    thread_and_count,
)

# With fewer elements, waking the other threads takes longer than the computation.
_MIN_PARALLEL = 1 << 15


class OperatorArguments(ctypes.Structure):
    """Kernel arguments: addresses, sizes, the row stride in elements, and the fields that `thread_and_count` reads."""

    _fields_ = [  # type: ignore[mutable-override]
        *((name, ctypes.c_int64) for name in ("rows", "first", "second", "out")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_heads", "width", "row_stride")),
        *((name, ctypes.c_int64) for name in ("num_threads", "thread_number", "num_started")),
        ("eps", ctypes.c_float),
    ]


class CpuOperators:
    """CPU kernels that implement `Operators`.

    Args:
        dtype: Type of all tensors: float32 or bfloat16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        is_bfloat16 = dtype is torch.bfloat16
        self._add_norm = _kernel_for(_add_norm, is_bfloat16=is_bfloat16)
        self._rotate = _kernel_for(_rotate, is_bfloat16=is_bfloat16)
        self._gated = _kernel_for(_gated, is_bfloat16=is_bfloat16)
        self._call = OperatorArguments(**openmp_functions())
        self._address = ctypes.addressof(self._call)

    def add_norm(
        self, rows: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add and normalize."""
        out, call = torch.empty_like(rows), self._call
        call.first = 0 if delta is None else delta.data_ptr()
        call.second, call.eps = weight.data_ptr(), eps
        call.num_rows, call.width = rows.shape
        self._run(self._add_norm, rows, out)
        return out

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate in place."""
        call = self._call
        call.first, call.second = cos.data_ptr(), sin.data_ptr()
        call.num_rows, call.num_heads, call.width = heads.shape
        call.row_stride = heads.stride(0)
        self._run(self._rotate, heads, heads)

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        num_rows, width = gate_up.shape
        out, call = gate_up.new_empty(num_rows, width // 2), self._call
        call.num_rows, call.width = num_rows, width // 2
        self._run(self._gated, gate_up, out)
        return out

    def _run(self, function: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        call = self._call
        call.rows, call.out = rows.data_ptr(), out.data_ptr()
        call.num_threads = num_threads() if rows.numel() >= _MIN_PARALLEL else 1
        run(function, self._address, call.num_threads)


# ── the kernels ──────────────────────────────────────────────────────────────────────────────────


@lru_cache
def _kernel_for(make: Callable[[bool], Callable[[Any], None]], *, is_bfloat16: bool) -> int:
    """Return the address of a compiled kernel."""
    address: int = compile_kernel(
        make(is_bfloat16), np.dtype(OperatorArguments), is_bfloat16
    ).address
    return address


def _add_norm(is_bfloat16: bool) -> Callable[[Any], None]:
    kind, load, store = Element.of(is_bfloat16)

    def add_norm(address: Any) -> None:
        call = numba.carray(address, 1)[0]
        width = call.width
        rows = numba.carray(pointer(call.rows), (UNBOUNDED,), kind)
        delta = numba.carray(pointer(call.first), (UNBOUNDED,), kind)
        weight = numba.carray(pointer(call.second), (UNBOUNDED,), kind)
        out = numba.carray(pointer(call.out), (UNBOUNDED,), kind)
        sums = np.empty(width, np.float32)
        thread, started = thread_and_count(call)
        for n in range(thread, call.num_rows, started):
            start = n * width
            if call.first:
                for i in range(width):
                    at = np.uint64(start + i)
                    rows[at] = store(load(rows[at]) + load(delta[at]))
            square = np.float32(0)
            for i in range(width):
                value = load(rows[np.uint64(start + i)])
                sums[i] = value
                square += value * value
            factor = np.float32(1) / np.sqrt(square / np.float32(width) + call.eps)
            for i in range(width):
                out[np.uint64(start + i)] = store(sums[i] * factor * load(weight[np.uint64(i)]))

    return add_norm


def _rotate(is_bfloat16: bool) -> Callable[[Any], None]:
    kind, load, store = Element.of(is_bfloat16)

    def rotate(address: Any) -> None:
        call = numba.carray(address, 1)[0]
        width, half = call.width, call.width // 2
        heads = numba.carray(pointer(call.rows), (UNBOUNDED,), kind)
        cos = numba.carray(pointer(call.first), (UNBOUNDED,), kind)
        sin = numba.carray(pointer(call.second), (UNBOUNDED,), kind)
        thread, started = thread_and_count(call)
        for n in range(thread, call.num_rows, started):
            for head in range(call.num_heads):
                start = n * call.row_stride + head * width
                for i in range(half):
                    at, angle = np.uint64(start + i), np.uint64(n * width + i)
                    at_right, angle_right = np.uint64(start + half + i), np.uint64(angle + half)
                    left, right = load(heads[at]), load(heads[at_right])
                    heads[at] = store(left * load(cos[angle]) - right * load(sin[angle]))
                    heads[at_right] = store(
                        right * load(cos[angle_right]) + left * load(sin[angle_right])
                    )

    return rotate


def _gated(is_bfloat16: bool) -> Callable[[Any], None]:
    kind, load, store = Element.of(is_bfloat16)

    def gated(address: Any) -> None:
        call = numba.carray(address, 1)[0]
        width = call.width
        gate_up = numba.carray(pointer(call.rows), (UNBOUNDED,), kind)
        out = numba.carray(pointer(call.out), (UNBOUNDED,), kind)
        thread, started = thread_and_count(call)
        for n in range(thread, call.num_rows, started):
            for i in range(width):
                at = np.uint64(2 * n * width + i)
                gate, up = load(gate_up[at]), load(gate_up[np.uint64(at + width)])
                # `exp` does not accept positive numbers.
                small = exp(-abs(gate))
                sigmoid = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
                out[np.uint64(n * width + i)] = store(gate * sigmoid * up)

    return gated
