"""The operators between the products of a Llama-shaped layer, each one pass over its rows.

| operators | for | file |
|---|---|---|
| `TorchOperators` | any device and type; the reference | this one |
| `CpuOperators` | float32 and bfloat16 on CPUs | `operators_cpu.py` |
| `TritonOperators` | GPUs | `operators_triton.py` |
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import torch
from torch.nn import functional

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Applies rotary position embedding in place, to halves as transformers' `rotate_half`. It takes heads, cosines and sines.

Heads have shape (num_rows, num_heads, head_dim); rows may have any stride, the rest is contiguous. Cosines and sines are
contiguous, (num_rows, head_dim).
"""


class Operators(Protocol):
    """Computes in float32 and rounds once. All tensors of a call have one type and one device."""

    def add_norm(
        self, rows: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta` to `rows` in place, if given; return the RMS norm of the sum times `weight`.

        The sum is rounded before it is normalized.

        Args:
            rows, delta: Contiguous. Shape (num_rows, width).
            weight: Shape (width,).
            eps: Added to the mean square.

        Returns:
            Shape (num_rows, width).
        """

    @property
    def rotate(self) -> Rotate | None:
        """Rotates heads; None: the attention backend does so as it writes K and V (`LayerInputs.rotary`)."""

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up.

        Args:
            gate_up: Gates first. Contiguous. Shape (num_rows, 2 * width).

        Returns:
            Shape (num_rows, width).
        """


class TorchOperators:
    """Plain torch."""

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
        turned = torch.cat([-right, left], dim=-1)
        heads.copy_(wide * cos.float().unsqueeze(1) + turned * sin.float().unsqueeze(1))

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(gate_up.dtype)


def operators_for(device: torch.device, dtype: torch.dtype) -> Operators:
    """Return the fastest operators on a device."""
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        from tandem.engine.operators_cpu import CpuOperators  # compiles

        return CpuOperators(dtype)
    if device.type == "cuda" and find_spec("triton") is not None:
        from tandem.engine.operators_triton import TritonOperators

        return TritonOperators()
    return TorchOperators()
