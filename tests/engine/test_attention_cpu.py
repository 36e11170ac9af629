"""The CPU's kernel: its answers, on one of torch's threads and on several."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def test_without_torchs_library_one_thread_does_it_all(torch_threads, monkeypatch):
    torch_threads(4)
    monkeypatch.setattr(attention_cpu, "_library", lambda: None)
    assert attention_cpu.num_threads() == 1
    assert error(CASES["decodes of group 3"], CpuAttention()) <= 2e-5


# ── kept on disk ─────────────────────────────────────────────────────────────────────────────────

COMPILE = """
from tandem.engine.attention_cpu import Geometry, kernel_for
for is_bfloat16 in (False, True):
    print(kernel_for(Geometry(1, 1, 8, 4, is_bfloat16)).cache_hits)
"""


def hits_of_a_process(cache: Path) -> list[int]:
    """Compile two kernels in a process of its own; return which it found on disk."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)},
        check=True,
        capture_output=True,
        text=True,
    )
    return [int(line) for line in done.stdout.split() if line.isdigit()]


def test_a_second_process_does_not_compile_again(tmp_path):
    assert hits_of_a_process(tmp_path) == [0, 0]
    indexes = {path.name.split("-")[0] for path in tmp_path.rglob("*.nbi")}
    assert len(indexes) == 2, "kernels that share an index may be taken for each other"
    assert hits_of_a_process(tmp_path) == [1, 1]
    for path in tmp_path.rglob("*.nbi"):
        path.write_bytes(path.read_bytes()[:9])
    assert hits_of_a_process(tmp_path) == [0, 0], "what is broken is compiled anew"
