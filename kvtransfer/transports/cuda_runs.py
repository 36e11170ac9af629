"""Copies many short runs of GPU memory with one kernel, where the driver's work for each would cost more than the bytes.

The kernel has not run on a GPU: tests interpret it, and compile it for GPUs.

Importing this module needs torch and triton.
"""

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from triton import language as tl

# Words of 4 bytes that a program copies at a time: four loads of 16 bytes for each thread.
BLOCK_WORDS = 2048


# The number of runs varies with every write and must not trigger a recompilation.
@triton.jit(do_not_specialize=["num_runs"])
def copy_runs(runs, num_runs, block: tl.constexpr):
    """Copy one run. Grid (num_runs,); see `start`."""
    run = runs + tl.program_id(0)
    source = tl.multiple_of(tl.load(run).to(tl.pointer_type(tl.int32)), 16)
    destination = tl.multiple_of(tl.load(run + num_runs).to(tl.pointer_type(tl.int32)), 16)
    num_words = tl.multiple_of(tl.load(run + 2 * num_runs) // 4, 4)
    for first in range(0, num_words, block):
        words = first + tl.arange(0, block)
        is_inside = words < num_words
        tl.store(destination + words, tl.load(source + words, mask=is_inside), mask=is_inside)


def start(runs: NDArray[np.int64], stream: int, device: str) -> None:
    """Queue the copies on a stream of a device.

    Args:
        runs: Addresses of sources, addresses of destinations, and sizes in bytes; all multiples of 16. Shape
            (3, num_runs).
    """
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
        on_device = torch.from_numpy(runs).pin_memory().to(device, non_blocking=True)
        num_runs = runs.shape[1]
        copy_runs[num_runs,](on_device, num_runs, block=BLOCK_WORDS)
