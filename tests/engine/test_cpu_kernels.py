"""CPU kernels when OpenMP starts fewer threads than requested."""

import pytest
import torch
from torch.nn import functional

from tandem.engine.attention.cpu import CpuAttention
from tandem.engine.kernels import cpu as cpu_kernels
from tandem.engine.kernels.narrow_product import NarrowProduct
from tandem.engine.kernels.operators import TorchOperators
from tandem.engine.kernels.operators_cpu import CpuOperators
from tests.attention_cases import CASES, error


@pytest.fixture
def _one_of_three_threads(torch_threads):
    """Request three threads, of which one starts, as with OMP_THREAD_LIMIT or OMP_DYNAMIC."""
    library = cpu_kernels._library()
    if library is None:
        pytest.skip("torch's threads are not those of GNU OpenMP")
    torch_threads(3)
    before = library.omp_get_max_active_levels()
    library.omp_set_max_active_levels(0)
    yield
    library.omp_set_max_active_levels(before)


def operators_off() -> float:
    """Return the error of rotated heads and gated rows."""
    heads, gate_up, angles = torch.randn(300, 4, 64), torch.randn(300, 512), torch.randn(300, 64)
    ours, theirs = CpuOperators(torch.float32), TorchOperators()
    rotated, expected = heads.clone(), heads.clone()
    ours.rotate(rotated, angles.cos(), angles.sin())
    theirs.rotate(expected, angles.cos(), angles.sin())
    gated = ours.gated(gate_up) - theirs.gated(gate_up)
    return max(float((rotated - expected).abs().max()), float(gated.abs().max()))


def product_off() -> float:
    """Return the error of a product of few rows."""
    rows, weight = torch.randn(2, 64), torch.randn(101, 64).bfloat16().float()
    off = NarrowProduct(weight, None)(rows) - functional.linear(rows, weight)
    return float(off.abs().max())


def attention_off() -> float:
    """Return the error of attention of decoding rows."""
    return error(CASES["decodes of group 3"], CpuAttention())


@pytest.mark.usefixtures("_one_of_three_threads")
@pytest.mark.parametrize("off", [operators_off, product_off, attention_off])
def test_kernel_is_complete_if_openmp_starts_fewer_threads(off):
    torch.manual_seed(0)
    assert off() <= 1e-4
