"""Executes a plan within this process, with numpy.

Large copies are slices, one at a time. Small copies of equal size are indexed together, because a slice costs 0.4 µs
whatever its size: on Zen 4 copies of 512 bytes then take a fifth of the time.
"""

import numpy as np
from numpy.typing import NDArray

from tandem.kvtransfer.plan import CopyPlan, Int64s

# Larger copies are as fast one by one. Indexing moves each byte twice, through a buffer that fits into a cache.
MAX_INDEXED_BYTES = 4096
BUFFER_BYTES = 256 << 10

Bytes = NDArray[np.uint8]


def copy(plan: CopyPlan, source: Bytes, destination: Bytes) -> None:
    """Execute a plan, in any order. The caller has checked its bounds, and that nothing overlaps."""
    if len(plan) > 1 and (size_bytes := _small_size(plan)):
        _copy_indexed(plan, source, destination, size_bytes)
        return
    for begin, to, size in plan.copies():
        destination[to : to + size] = source[begin : begin + size]


def gather(memory: Bytes, plan: CopyPlan, staging: Bytes) -> None:
    """Copy the sources of a plan, one after the other, to the start of `staging`."""
    copy(CopyPlan(plan.source_offset, _packed(plan), plan.size_bytes), memory, staging)


def scatter(staging: Bytes, plan: CopyPlan, memory: Bytes) -> None:
    """Copy the start of `staging` to the destinations of a plan: the inverse of `gather`."""
    copy(CopyPlan(_packed(plan), plan.destination_offset, plan.size_bytes), staging, memory)


def _packed(plan: CopyPlan) -> Int64s:
    return np.cumsum(plan.size_bytes) - plan.size_bytes


def _small_size(plan: CopyPlan) -> int:
    """Return the size of the copies if it is small and the same for all; else 0."""
    size_bytes = int(plan.size_bytes[0])
    is_equal = size_bytes <= MAX_INDEXED_BYTES and (plan.size_bytes == size_bytes).all()
    return size_bytes if is_equal else 0


def _copy_indexed(plan: CopyPlan, source: Bytes, destination: Bytes, size_bytes: int) -> None:
    source_windows = _windows(source, size_bytes)
    destination_windows = _windows(destination, size_bytes)
    copies_at_a_time = BUFFER_BYTES // size_bytes
    for first in range(0, len(plan), copies_at_a_time):
        part = plan[first : first + copies_at_a_time]
        destination_windows[part.destination_offset] = source_windows[part.source_offset]


def _windows(memory: Bytes, size_bytes: int) -> NDArray[np.void]:
    """Return a view whose element i is the `size_bytes` bytes from byte i on."""
    element = np.dtype((np.void, size_bytes))
    return np.ndarray(len(memory) - size_bytes + 1, element, memory.data, strides=(1,))
