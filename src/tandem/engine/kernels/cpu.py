"""Common code of the CPU kernels: pointers, bfloat16, the compile cache on disk, and torch's threads.

Numba compiles a kernel to a C function that takes one address, that of its arguments. `run` calls it on torch's threads.
"""

import ctypes
import hashlib
import os
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from tandem.telemetry.log import get_logger

log = get_logger(__name__)

UNBOUNDED = 1 << 62
"""Nominal length of arrays whose real length is unknown to the kernel."""
_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)

# Offsets into unbounded arrays must be unsigned: for a signed offset numba checks for a negative value, which prevents
# vectorization. Slices also vectorize, but take twice as long to compile.


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_typing: Any, _address: Any) -> Any:
    """Convert an address to a pointer."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def call_int(_typing: Any, _address: Any) -> Any:
    """Call the C function `int (*)(void)` at an address. Kernels with a constant address could not be cached on disk."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        function = context.get_value_type(types.FunctionPrototype(types.int32, ()))
        return builder.call(builder.inttoptr(arguments[0], function), [])

    return types.int32(types.int64), generate


# Helpers are inlined, so that the sizes in `Geometry` are compile-time constants.
inline = numba.njit(inline="always", fastmath=True, error_model="numpy")


@inline  # type: ignore[untyped-decorator]
def thread_and_count(call: Any) -> Any:
    """Return the index of the calling thread and the number of threads, which may be lower than `run` requested.

    Args:
        call: Arguments with `num_threads`, as passed to `run`, and the fields of `openmp_functions`.
    """
    if call.num_threads > 1:
        return np.int64(call_int(call.thread_number)), np.int64(call_int(call.num_started))
    return np.int64(0), np.int64(1)


@inline  # type: ignore[untyped-decorator]
def from_bfloat16(bits: Any) -> Any:
    """Convert bfloat16 bits, which are the upper half of a float32, to float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@inline  # type: ignore[untyped-decorator]
def to_bfloat16(value: Any) -> Any:
    """Round a float32 to the nearest bfloat16, ties to even, and return its bits."""
    bits = np.float32(value).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


class Element(NamedTuple):
    """Element type of a kernel's arrays, with conversions to and from float32."""

    kind: Any
    load: Any
    store: Any

    @classmethod
    def of(cls, is_bfloat16: bool) -> "Element":
        """Return the element type bfloat16 or float32."""
        if is_bfloat16:
            return cls(np.uint16, from_bfloat16, to_bfloat16)
        return cls(np.float32, np.float32, np.float32)


@inline  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """Return e^x for x <= 0, accurate to one or two units in the last place. Unlike libm's, it vectorizes."""
    x = max(x, np.float32(-87.0)) * _LOG2_E
    integer = np.floor(x + np.float32(0.5))
    f = (x - integer) * _LN_2
    # A Taylor series to the sixth power suffices, because |f| is at most ln(2) / 2.
    series = np.float32(1 / 120) + f * np.float32(1 / 720)
    series = np.float32(1 / 6) + f * (np.float32(1 / 24) + f * series)
    series = np.float32(1) + f * (np.float32(1) + f * (np.float32(0.5) + f * series))
    exponent = np.uint32(np.int32(integer) + np.int32(127)) << np.uint32(23)
    return series * np.uint32(exponent).view(np.float32)


def compile_kernel(kernel: Callable[[Any], None], call: np.dtype[Any], constants: object) -> Any:
    """Compile a kernel, or load it from numba's cache on disk if an earlier process compiled it.

    Args:
        call: Type of the arguments that the kernel receives a pointer to.
        constants: Compile-time constants of the kernel. Their `repr` is part of the cache key.

    Returns:
        An object whose `address` is the C function's.
    """
    # Numba numbers the cache files of a function, and two processes may use the same number for different
    # kernels. So each combination of constants, processor and numba version gets its own files.
    host = cpu_target.target_context.codegen().magic_tuple(), numba.__version__
    # Numba checks only the kernel's own file for changes. The helpers that it inlines are in this file.
    key = repr((kernel.__qualname__, constants, host, Path(__file__).read_text()))
    kernel.__qualname__ = f"kernel_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    signature = types.void(types.CPointer(numba.from_dtype(call)))
    compile_with = partial(
        numba.cfunc, signature, nopython=True, fastmath=True, error_model="numpy"
    )
    try:
        return compile_with(cache=True)(kernel)
    except Exception as error:  # noqa: BLE001 - there is no cache directory, or a file in it is corrupt
        log.warning("engine.kernel_not_kept", reason=str(error), effect="each start compiles it")
        return compile_with()(kernel)


# ── torch's own threads ──────────────────────────────────────────────────────────────────────────
#
# On Linux torch uses GNU OpenMP, whose threads spin for a while after each operator. A separate thread pool would
# compete with them for the cores; a parallel region of the same library reuses them.


@lru_cache
def _library() -> ctypes.CDLL | None:
    """Return the GNU OpenMP library that torch loaded, or None if torch uses a different one."""
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


def openmp_functions() -> dict[str, int]:
    """Return the addresses of the C functions that `thread_and_count` calls, by name of the argument field."""
    library = _library()
    if library is None:
        return {}
    functions = {"thread_number": "omp_get_thread_num", "num_started": "omp_get_num_threads"}
    return {
        field: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        for field, name in functions.items()
    }


def num_threads() -> int:
    """Return the number of threads to pass to `run`: torch's setting, or 1 if its threads cannot be used."""
    return torch.get_num_threads() if _library() is not None else 1


def run(function: int, argument: int, count: int) -> None:
    """Call `function(argument)` on `count` threads, and return when all calls have returned.

    Args:
        function: Address of a C function `void (*)(void *)`, which must not acquire the GIL.
        argument: Address to pass to the function.
        count: `num_threads()`, or 1 for the calling thread alone. Any other number would make the library stop and
            restart threads.
    """
    library = _library()
    if count == 1 or library is None:
        _c_function(function)(argument)
    else:
        library.GOMP_parallel(function, argument, count, 0)


@lru_cache
def _c_function(function: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
