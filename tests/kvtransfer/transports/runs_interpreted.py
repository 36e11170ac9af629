"""Copies runs of CPU memory with the Triton kernel; prints whether exactly these bytes arrived.

TRITON_INTERPRET=1 python -m tests.kvtransfer.transports.runs_interpreted
"""

import sys

import numpy as np
import torch

from tandem.kvtransfer.transports.cuda_runs import BLOCK_WORDS, copy_runs

BLOCK_BYTES = 4 * BLOCK_WORDS
# Sizes within a block, of a block, and of several with a rest.
SIZES = (16, 48, BLOCK_BYTES, BLOCK_BYTES + 16, 3 * BLOCK_BYTES - 16)


def main() -> None:
    """Copy the runs in another order, with gaps between them."""
    sizes = np.array(SIZES)
    source = torch.randint(1, 256, (sizes.sum(),), dtype=torch.uint8)
    destination, expected = torch.zeros(2, sizes.sum() + 64 * len(sizes), dtype=torch.uint8)
    begins, ends = np.cumsum(sizes) - sizes, np.cumsum(sizes[::-1] + 64)[::-1]
    for begin, end, size in zip(begins, ends, sizes, strict=True):
        expected[end - size : end] = source[begin : begin + size]
    runs = np.stack([source.data_ptr() + begins, destination.data_ptr() + ends - sizes, sizes])
    copy_runs[len(sizes),](torch.from_numpy(runs), len(sizes), block=BLOCK_WORDS)
    sys.stdout.write("true" if torch.equal(destination, expected) else "false")


if __name__ == "__main__":
    main()
