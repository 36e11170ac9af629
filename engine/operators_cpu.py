"""The operators between products on CPUs, as kernels that numba compiles."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch

from tandem.engine.cpu_kernels import (
    MOST,
    call_int,
    compiled,
    exp,
    from_bfloat16,
    inline,
    num_threads,
    pointer,
    run,
    thread_number,
    to_bfloat16,
)

# With fewer elements, waking the other threads takes longer than the work.
_LEAST_SHARED = 1 << 15


class Call(ctypes.Structure):
    """What a kernel is told: addresses, sizes, and the strides of `rows` and `out` in elements.

    `thread_number` is a C function's that tells which of `num_threads` it is called on; 0 where there is one.
    """

    _fields_ = [  # noqa: RUF012 - ctypes reads it
        *((name, ctypes.c_int64) for name in ("rows", "first", "second", "out")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_heads", "width", "row_stride")),
        *((name, ctypes.c_int64) for name in ("num_threads", "thread_number")),
        ("eps", ctypes.c_float),
    ]


class CpuOperators:
    """See `Operators`.

    Args:
        dtype: Of all tensors: float32 or bfloat16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        is_bfloat16 = dtype is torch.bfloat16
        self._add_norm = _kernel_for(_add_norm, is_bfloat16=is_bfloat16)
        self._rotate = _kernel_for(_rotate, is_bfloat16=is_bfloat16)
        self._gated = _kernel_for(_gated, is_bfloat16=is_bfloat16)
        self._call = Call(thread_number=thread_number())
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
        call.num_threads = num_threads() if rows.numel() >= _LEAST_SHARED else 1
        run(function, self._address, call.num_threads)


# ── the kernels ──────────────────────────────────────────────────────────────────────────────────


@lru_cache
def _kernel_for(make: Callable[[bool], Callable[[Any], None]], *, is_bfloat16: bool) -> int:
    """Return the address of a compiled kernel."""
    address: int = compiled(make(is_bfloat16), np.dtype(Call), is_bfloat16).address
    return address


@inline  # type: ignore[untyped-decorator]
def _get(elements: Any, index: Any, is_bfloat16: bool) -> Any:
    element = elements[np.uint64(index)]
    if is_bfloat16:
        return from_bfloat16(element)
    return element


@inline  # type: ignore[untyped-decorator]
def _set(elements: Any, index: Any, value: Any, is_bfloat16: bool) -> None:
    if is_bfloat16:
        elements[np.uint64(index)] = to_bfloat16(value)
    else:
        elements[np.uint64(index)] = value


def _add_norm(is_bfloat16: bool) -> Callable[[Any], None]:
    element = np.uint16 if is_bfloat16 else np.float32

    def add_norm(address: Any) -> None:
        call = numba.carray(address, 1)[0]
        width = call.width
        rows = numba.carray(pointer(call.rows), (MOST,), element)
        delta = numba.carray(pointer(call.first), (MOST,), element)
        weight = numba.carray(pointer(call.second), (MOST,), element)
        out = numba.carray(pointer(call.out), (MOST,), element)
        sums = np.empty(width, np.float32)
        thread = call_int(call.thread_number) if call.num_threads > 1 else 0
        for n in range(thread, call.num_rows, call.num_threads):
            start = n * width
            if call.first:
                for i in range(width):
                    total = _get(rows, start + i, is_bfloat16) + _get(delta, start + i, is_bfloat16)
                    _set(rows, start + i, total, is_bfloat16)
            square = np.float32(0)
            for i in range(width):
                value = _get(rows, start + i, is_bfloat16)
                sums[i] = value
                square += value * value
            factor = np.float32(1) / np.sqrt(square / np.float32(width) + call.eps)
            for i in range(width):
                scaled = sums[i] * factor * _get(weight, i, is_bfloat16)
                _set(out, start + i, scaled, is_bfloat16)

    return add_norm


def _rotate(is_bfloat16: bool) -> Callable[[Any], None]:
    element = np.uint16 if is_bfloat16 else np.float32

    def rotate(address: Any) -> None:
        call = numba.carray(address, 1)[0]
        width, half = call.width, call.width // 2
        heads = numba.carray(pointer(call.rows), (MOST,), element)
        cos = numba.carray(pointer(call.first), (MOST,), element)
        sin = numba.carray(pointer(call.second), (MOST,), element)
        turned = np.empty(width, np.float32)
        thread = call_int(call.thread_number) if call.num_threads > 1 else 0
        for n in range(thread, call.num_rows, call.num_threads):
            angle = n * width
            for head in range(call.num_heads):
                start = n * call.row_stride + head * width
                for i in range(half):
                    left = _get(heads, start + i, is_bfloat16)
                    right = _get(heads, start + half + i, is_bfloat16)
                    turned[i] = left * _get(cos, angle + i, is_bfloat16) - right * _get(
                        sin, angle + i, is_bfloat16
                    )
                    turned[half + i] = right * _get(
                        cos, angle + half + i, is_bfloat16
                    ) + left * _get(sin, angle + half + i, is_bfloat16)
                for i in range(width):
                    _set(heads, start + i, turned[i], is_bfloat16)

    return rotate


def _gated(is_bfloat16: bool) -> Callable[[Any], None]:
    element = np.uint16 if is_bfloat16 else np.float32

    def gated(address: Any) -> None:
        call = numba.carray(address, 1)[0]
        width = call.width
        rows = numba.carray(pointer(call.rows), (MOST,), element)
        out = numba.carray(pointer(call.out), (MOST,), element)
        thread = call_int(call.thread_number) if call.num_threads > 1 else 0
        for n in range(thread, call.num_rows, call.num_threads):
            start = 2 * n * width
            for i in range(width):
                gate = _get(rows, start + i, is_bfloat16)
                # `exp` takes no positive number.
                small = exp(-abs(gate))
                sigmoid = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
                value = gate * sigmoid * _get(rows, start + width + i, is_bfloat16)
                _set(out, n * width + i, value, is_bfloat16)

    return gated
