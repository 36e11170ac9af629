"""The operators between the matrix products of a Llama-like layer. Each makes one pass over its rows.

| operators | runs on | file |
|---|---|---|
| `TorchOperators` | any device and type; the reference | this file |
| `CpuOperators` | float32 and bfloat16 on CPUs | `operators_cpu.py` |
| `TritonOperators` | GPUs | `operators_triton.py` |
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import torch
from torch.nn import functional

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Applies rotary position embedding in place, pairing elements like transformers' `rotate_half`.

Arguments: heads, shape (num_rows, num_heads, head_dim), contiguous except for the stride of rows; cosines and sines,
shape (num_rows, head_dim), contiguous.
"""


class Operators(Protocol):
    """Operators that compute in float32 and round once. All tensors of a call have the same type and device."""

    def add_norm(
        self, rows: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta` to `rows` in place, then return the RMS norm of the rounded sum times `weight`.

        Args:
            rows: Contiguous. Shape (num_rows, width).
            delta: Same layout; None adds nothing.
            weight: Shape (width,).
            eps: Added to the mean square.

        Returns:
            Shape (num_rows, width).
        """

    @property
    def rotate(self) -> Rotate | None:
        """Function that rotates heads. None: the attention backend rotates them when it writes K and V."""

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up.

        Args:
            gate_up: Gates, then ups. Contiguous. Shape (num_rows, 2 * width).

        Returns:
            Shape (num_rows, width).
        """


class TorchOperators:
    """Plain torch operators; the reference for the others."""

    def add_norm(
        self, rows: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add and normalize."""
        if delta is not None:
            rows += delta
        wide = rows.float()
        factor = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (wide * factor * weight.float()).to(rows.dtype)

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate in place."""
        wide = heads.float()
        left, right = wide.chunk(2, dim=-1)
        rotated = torch.cat([-right, left], dim=-1)
        heads.copy_(wide * cos.float().unsqueeze(1) + rotated * sin.float().unsqueeze(1))

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(gate_up.dtype)


def operators_for(device: torch.device, dtype: torch.dtype) -> Operators:
    """Return the fastest operators for a device and type."""
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        from tandem.engine.kernels.operators_cpu import CpuOperators  # imports numba

        return CpuOperators(dtype)
    if device.type == "cuda" and find_spec("triton") is not None:
        from tandem.engine.kernels.operators_triton import TritonOperators

        return TritonOperators()
    return TorchOperators()
