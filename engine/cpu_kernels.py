"""What kernels for CPUs share: pointers, bfloat16, the compiler's cache on disk, and torch's threads.

Numba compiles a kernel to a C function of one address, where its arguments are. `run` calls it on torch's threads.
"""

import ctypes
import hashlib
import os
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tandem.telemetry.log import get_logger

log = get_logger(__name__)

MOST = 1 << 62
"""Nominal size of arrays known only by their address."""
_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)

# Offsets into arrays known only by their address are unsigned: numba must assume that a signed one may be
# negative, and then cannot vectorize. Slices would work too, but take twice as long to compile.


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_typing: Any, _address: Any) -> Any:
    """Convert an address to a pointer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def call_int(_typing: Any, _address: Any) -> Any:
    """Call the C function `int (*)(void)` at an address. A constant address would prevent caching on disk."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [])

    return types.int32(types.int64), generate


# Inlined, so that the sizes of the `Geometry` are compile-time constants.
inline = numba.njit(inline="always", fastmath=True, error_model="numpy")


@inline  # type: ignore[untyped-decorator]
def place(call: Any) -> Any:
    """Return the calling thread's number, and how many threads `run` started: OpenMP may start fewer than asked for.

    A `Call` has `num_threads`, as given to `run`, and the fields of `team`.
    """
    if call.num_threads > 1:
        return np.int64(call_int(call.thread_number)), np.int64(call_int(call.num_started))
    return np.int64(0), np.int64(1)


@inline  # type: ignore[untyped-decorator]
def from_bfloat16(bits: Any) -> Any:
    """Convert bits of bfloat16 to float32, whose upper half they are."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@inline  # type: ignore[untyped-decorator]
def to_bfloat16(value: Any) -> Any:
    """Round float32 to the nearest bfloat16, ties to even; return its bits."""
    bits = np.float32(value).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


class Element(NamedTuple):
    """How a kernel reads and writes elements: as float32, whatever their type is."""

    kind: Any
    load: Any
    store: Any

    @classmethod
    def of(cls, is_bfloat16: bool) -> "Element":
        """Return how to access bfloat16, or float32."""
        if is_bfloat16:
            return cls(np.uint16, from_bfloat16, to_bfloat16)
        return cls(np.float32, np.float32, np.float32)


@inline  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """Return e^x for x <= 0, accurate to one or two units in the last place. Unlike libm's, it vectorizes."""
    x = max(x, np.float32(-87.0)) * _LOG2_E
    whole = np.floor(x + np.float32(0.5))
    f = (x - whole) * _LN_2
    # Taylor to the sixth power: |f| is at most ln(2) / 2.
    series = np.float32(1 / 120) + f * np.float32(1 / 720)
    series = np.float32(1 / 6) + f * (np.float32(1 / 24) + f * series)
    series = np.float32(1) + f * (np.float32(1) + f * (np.float32(0.5) + f * series))
    exponent = np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23)
    return series * np.uint32(exponent).view(np.float32)


def compiled(kernel: Callable[[Any], None], call: np.dtype[Any], constants: object) -> Any:
    """Compile a kernel, or read it from numba's cache on disk if an earlier process has compiled it.

    Args:
        call: Type of what the kernel's only argument points to.
        constants: What the kernel was made from, which its name does not tell; its `repr` is part of the key.

    Returns:
        An object whose `address` is the C function.
    """
    # Numba numbers the cache files of a function, and two processes may use one number for two kernels.
    # So each set of constants, processor and numba version gets its own files.
    host = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), numba.__version__
    # Numba looks at the kernel's own file for changes; what it inlines is in this one.
    key = repr((kernel.__qualname__, constants, host, Path(__file__).read_text()))
    kernel.__qualname__ = f"kernel_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    signature = types.void(types.CPointer(numba.from_dtype(call)))
    compile_with = partial(
        numba.cfunc, signature, nopython=True, fastmath=True, error_model="numpy"
    )
    try:
        return compile_with(cache=True)(kernel)
    except Exception as error:  # noqa: BLE001 - no cache directory, or a corrupted file in it
        log.warning("engine.kernel_not_kept", reason=str(error), effect="each start compiles it")
        return compile_with()(kernel)


# ── torch's own threads ──────────────────────────────────────────────────────────────────────────
#
# On Linux these are GNU OpenMP's threads, which spin for a while after each operator. A separate thread pool
# would find the cores busy, while a parallel region of the same library reuses the spinning threads.


@lru_cache
def _library() -> ctypes.CDLL | None:
    """Return the GNU OpenMP library that torch loaded; None if torch uses another library."""
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


def team() -> dict[str, int]:
    """Return the addresses of the C functions that `place` calls, by their fields of a `Call`."""
    library = _library()
    if library is None:
        return {}
    functions = {"thread_number": "omp_get_thread_num", "num_started": "omp_get_num_threads"}
    return {
        field: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        for field, name in functions.items()
    }


def num_threads() -> int:
    """Return the number of threads that `run` asks for: torch's, or 1 if its threads cannot be shared."""
    return torch.get_num_threads() if _library() is not None else 1


def run(function: int, argument: int, count: int) -> None:
    """Call `function(argument)` on threads in parallel; return when all have returned.

    Args:
        function: Address of a C function `void (*)(void *)`, which must not acquire the GIL.
        argument: Address that is passed to the function.
        count: `num_threads()`, or 1 for the calling thread alone. Any other number would make the library terminate
            and start threads.
    """
    library = _library()
    if count == 1 or library is None:
        _one_argument(function)(argument)
    else:
        library.GOMP_parallel(function, argument, count, 0)


@lru_cache
def _one_argument(function: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
