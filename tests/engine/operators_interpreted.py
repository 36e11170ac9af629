"""Runs the Triton operators on CPU tensors and writes a JSON object of errors.

This is a separate process, because triton decides at import whether it interprets.

    TRITON_INTERPRET=1 python -m tests.engine.operators_interpreted
"""

import json
import sys
from collections.abc import Iterator

import torch
from torch.nn import functional

from tandem.engine.kernels.operators_triton import TritonOperators

# Relative tolerance: one unit in the last place, because the interpreter truncates bfloat16 where a GPU rounds; in
# float32, the effect of a different order of summation.
DTYPES = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
# Number of rows and width of norms and gates.
SIZES = ((1, 1), (3, 7), (2, 64), (5, 300), (2, 2050), (0, 8))
EPS = 1e-3


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative error; infinity if shape or type differ, or a result is NaN."""
    if got.shape != expected.shape or got.dtype is not expected.dtype:
        return float("inf")
    difference = (got.double() - expected.double()).abs() / expected.double().abs().clamp(min=0.1)
    return max(difference.nan_to_num(torch.inf).flatten().tolist(), default=0.0)


def norm_errors(dtype: torch.dtype, num_rows: int, width: int) -> Iterator[tuple[str, float]]:
    """Yield the errors of sums and norms, with and without a delta."""
    rows, delta = torch.randn(2, num_rows, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    for added in (None, delta):
        sums = rows if added is None else (rows.float() + added.float()).to(dtype)
        own = rows.clone()
        got = TritonOperators().add_norm(own, added, weight, EPS)
        expected = functional.rms_norm(own.float(), (width,), weight.float(), EPS).to(dtype)
        name = "norm" if added is None else "norm of a sum"
        yield name, error(got, expected)
        yield f"{name}, in place", error(own, sums)


def gate_error(dtype: torch.dtype, num_rows: int, width: int) -> float:
    """Return the error of gates, including extreme ones."""
    rows = (torch.randn(num_rows, 2 * width) * 4).to(dtype)
    rows[:1, :1] = -1000.0
    gate, up = rows.float().chunk(2, dim=1)
    return error(TritonOperators().gated(rows), (functional.silu(gate) * up).to(dtype))


def errors_of(dtype: torch.dtype) -> dict[str, float]:
    """Return the errors of all operators and sizes, on torch's default device."""
    torch.manual_seed(0)
    found: dict[str, float] = {}
    for size in SIZES:
        found |= {f"{name} {size}": value for name, value in norm_errors(dtype, *size)}
        found[f"gate {size}"] = gate_error(dtype, *size)
    return found


def main() -> None:
    """Run all types."""
    sys.stdout.write(json.dumps({str(dtype): errors_of(dtype) for dtype in DTYPES}))


if __name__ == "__main__":
    main()
