"""The operators between matrix products compared with plain torch."""

import pytest
import torch

from tandem.engine.kernels import cpu as cpu_kernels
from tandem.engine.kernels.operators import TorchOperators, operators_for
from tandem.engine.kernels.operators_cpu import CpuOperators

CPU = torch.device("cpu")
# One row, odd widths, and enough rows for all threads.
SIZES = [(1, 64), (7, 101), (300, 576)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=[1, 3])
def operators(dtype, request, torch_threads):
    torch_threads(request.param)
    found = operators_for(CPU, dtype)
    assert isinstance(found, CpuOperators)
    return found


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    # In bfloat16 a sum in a different order may round to the adjacent number.
    tolerance = 2e-5 if expected.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_add_norm_matches_torch(operators, dtype, num_rows, width, has_delta):
    torch.manual_seed(0)
    rows, weight = torch.randn(num_rows, width, dtype=dtype) * 3, torch.randn(width, dtype=dtype)
    delta = torch.randn(num_rows, width, dtype=dtype) if has_delta else None
    ours, theirs = rows.clone(), rows.clone()
    found = operators.add_norm(ours, delta, weight, 1e-3)
    check(found, TorchOperators().add_norm(theirs, delta, weight, 1e-3))
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    assert torch.equal(ours, rows) is not has_delta


@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_add_norm_uses_epsilon_for_small_rows(operators, dtype, num_rows, width):
    rows = torch.full((num_rows, width), 1e-3, dtype=dtype)
    found = operators.add_norm(rows, None, torch.ones(width, dtype=dtype), 3e-6)
    check(found, torch.full_like(found, 0.5))


@pytest.mark.parametrize(("num_rows", "num_heads", "dim"), [(1, 3, 64), (7, 2, 10), (200, 5, 64)])
def test_rotate_changes_only_the_given_heads(operators, dtype, num_rows, num_heads, dim):
    torch.manual_seed(0)
    ours = torch.randn(num_rows, num_heads + 2, dim, dtype=dtype)
    theirs = ours.clone()
    angles = torch.randn(num_rows, dim)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    operators.rotate(ours[:, :num_heads], cos, sin)
    rotated = theirs[:, :num_heads]
    TorchOperators().rotate(rotated, cos, sin)
    check(ours, theirs)


@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_gated_matches_torch(operators, dtype, num_rows, width):
    torch.manual_seed(0)
    gate_up = torch.randn(num_rows, 2 * width, dtype=dtype) * 6
    gate_up[0, 0], gate_up[0, 1] = 100.0, -100.0
    check(operators.gated(gate_up), TorchOperators().gated(gate_up))


def test_kernel_runs_on_one_thread_without_gnu_openmp(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "_library", lambda: None)
    gate_up = torch.randn(300, 512)
    check(CpuOperators(torch.float32).gated(gate_up), TorchOperators().gated(gate_up))


def test_types_without_a_kernel_use_torch_operators():
    assert isinstance(operators_for(CPU, torch.float16), TorchOperators)
