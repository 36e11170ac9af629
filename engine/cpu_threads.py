"""Runs compiled code on the threads of torch's own operators, so that no second pool meets them.

Torch's threads on Linux are GNU OpenMP's, and spin for a while after each operator: a pool beside them
would find the cores taken, while a parallel region of the same library finds its threads waiting.
"""

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache

import numba
import torch


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
def thread_number() -> Callable[[], int]:
    """Return a function, for compiled code to call, that tells which thread of `run` it is on."""
    library = _library()
    if library is None:
        alone: Callable[[], int] = numba.njit(lambda: 0)
        return alone
    number = library.omp_get_thread_num
    number.argtypes, number.restype = (), ctypes.c_int
    return number


def num_threads() -> int:
    """Return how many threads `run` uses: torch's number, or one where they cannot be shared."""
    return torch.get_num_threads() if _library() is not None else 1


def run(function: int, argument: int) -> None:
    """Call `function(argument)` on every thread at once; return when all have.

    Args:
        function: Address of a C function `void (*)(void *)`; it must take no lock of Python's.
        argument: Address of what it is given.
    """
    count = num_threads()
    library = _library()
    if count == 1 or library is None:
        _one_argument(function)(argument)
    else:
        # Always all of them: another number than before makes the library end threads and start them.
        library.GOMP_parallel(function, argument, count, 0)


@lru_cache
def _one_argument(function: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
