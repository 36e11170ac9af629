"""Kernels on torch's threads, where OpenMP starts fewer than it is asked for."""

import pytest
import torch
from torch.nn import functional

from tandem.engine import cpu_kernels
from tandem.engine.attention_cpu import CpuAttention
from tandem.engine.narrow_product import NarrowProduct
from tandem.engine.operators import TorchOperators
from tandem.engine.operators_cpu import CpuOperators
from tests.attention_cases import CASES, error


@pytest.fixture
def _one_of_three_threads(torch_threads):
    """Ask for three threads, of which one starts, as under OMP_THREAD_LIMIT or OMP_DYNAMIC."""
    library = cpu_kernels._library()
    if library is None:
        pytest.skip("torch's threads are not those of GNU OpenMP")
    torch_threads(3)
    before = library.omp_get_max_active_levels()
    library.omp_set_max_active_levels(0)
    yield
    library.omp_set_max_active_levels(before)


def operators_off() -> float:
    """Return by how much rotated heads and gated rows are off plain torch's."""
    heads, gate_up, angles = torch.randn(300, 4, 64), torch.randn(300, 512), torch.randn(300, 64)
    ours, theirs = CpuOperators(torch.float32), TorchOperators()
    rotated, expected = heads.clone(), heads.clone()
    ours.rotate(rotated, angles.cos(), angles.sin())
    theirs.rotate(expected, angles.cos(), angles.sin())
    gated = ours.gated(gate_up) - theirs.gated(gate_up)
    return max(float((rotated - expected).abs().max()), float(gated.abs().max()))


def product_off() -> float:
    """Return by how much a product of few rows is off plain torch's."""
    rows, weight = torch.randn(2, 64), torch.randn(101, 64).bfloat16().float()
    off = NarrowProduct(weight, None)(rows) - functional.linear(rows, weight)
    return float(off.abs().max())


def attention_off() -> float:
    """Return by how much decoding rows are off the reference's."""
    return error(CASES["decodes of group 3"], CpuAttention())


@pytest.mark.usefixtures("_one_of_three_threads")
@pytest.mark.parametrize("off", [operators_off, product_off, attention_off])
def test_what_a_thread_that_did_not_start_would_compute_is_computed(off):
    torch.manual_seed(0)
    assert off() <= 1e-4
