"""Norms and gates of Llama-shaped models, as Triton kernels in `triton_kernels.py`.

Each operator is one pass over memory. Grids depend only on shapes, so CUDA graphs can record them. The kernels have
not run on a GPU: tests interpret them, and compile them for GPUs.

Importing this module needs triton, which torch's CUDA wheels include.
"""

import torch
import triton

from tandem.engine import triton_kernels

# Columns of a gate of one program: two loads of 16 bytes for each thread of four warps.
_BLOCK_COLUMNS = 1024


class TritonOperators:
    """See `Operators`. Rows are 16-bit or float32."""

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
    """Return how many warps normalize a row of `block` elements: 16 elements for each thread, where possible."""
    return min(16, max(1, block // 512))
