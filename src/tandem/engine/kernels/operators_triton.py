"""Norms and gates of Llama-like models on GPUs, with the Triton kernels of `kernels/triton.py`.

Each operator makes one pass over memory. Grids depend only on shapes, so CUDA graphs can record them. The kernels
have not run on a GPU: tests interpret them and compile them for GPUs.

This module imports triton, which torch's CUDA wheels include.
"""

import torch
import triton

from tandem.engine.kernels import triton as triton_kernels

# Columns per program of `gated`: two loads of 16 bytes for each thread of four warps.
_BLOCK_COLUMNS = 1024


class TritonOperators:
    """Triton kernels that implement `Operators`. Rows are float32 or a 16-bit type."""

    rotate = None

    def add_norm(
        self, rows: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add and normalize."""
        num_rows, width = rows.shape
        out = torch.empty_like(rows)
        block = triton.next_power_of_2(width)
        triton_kernels.add_norm[num_rows,](
            rows,
            rows if delta is None else delta,
            weight,
            out,
            eps,
            width=width,
            has_delta=delta is not None,
            block=block,
            num_warps=norm_warps(block),
        )
        return out

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((num_rows, width))
        triton_kernels.gated[num_rows, triton.cdiv(width, _BLOCK_COLUMNS)](
            gate_up, out, width=width, block=_BLOCK_COLUMNS
        )
        return out


def norm_warps(block: int) -> int:
    """Return the number of warps that normalize a row of `block` elements: 16 elements per thread if possible."""
    return min(16, max(1, block // 512))
