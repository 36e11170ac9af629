"""The CPU's kernel: its answers, on one of torch's threads and on several."""

import numba
import numpy as np
import pytest
import torch
from numba import types

from tandem.engine import attention_cpu
from tandem.engine.attention_cpu import CpuAttention
from tests.attention_cases import CASES, error, tolerance

READABLE = [
    name for name, case in CASES.items() if CpuAttention.supports(case.kv_dtype or case.dtype)
]


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("name", READABLE)
def test_the_kernel_answers_as_the_reference_does(torch_threads, name, num_threads):
    torch_threads(num_threads)
    assert error(CASES[name], CpuAttention()) <= tolerance(CASES[name])


def test_every_number_of_threads_gives_the_same_bits(torch_threads):
    torch_threads(2)
    expected = error(CASES["decodes of group 3"], CpuAttention())
    torch_threads(1)
    assert error(CASES["decodes of group 3"], CpuAttention()) == expected


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_code_runs_once_on_each_of_torchs_threads(torch_threads, num_threads):
    torch_threads(num_threads)
    number, most = attention_cpu._thread_number(), 8

    @numba.cfunc(types.void(types.CPointer(types.int64)))
    def count(pointer):
        numba.carray(pointer, most)[number()] += 1

    counts = np.zeros(most, np.int64)
    attention_cpu._run(count.address, counts.ctypes.data)
    assert attention_cpu._num_threads() == num_threads
    assert counts.tolist() == [1] * num_threads + [0] * (most - num_threads)


def test_without_torchs_library_one_thread_does_it_all(torch_threads, monkeypatch):
    torch_threads(4)
    monkeypatch.setattr(attention_cpu, "_library", lambda: None)
    assert attention_cpu._num_threads() == 1
    assert error(CASES["decodes of group 3"], CpuAttention()) <= 2e-5
