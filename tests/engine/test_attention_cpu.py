"""The CPU attention kernel, on one and several of torch's threads."""

import subprocess
import sys
from pathlib import Path

import numba
import pytest

from tandem.engine.attention.cpu import CpuAttention, Geometry, kernel_for
from tandem.engine.kernels import cpu as cpu_kernels
from tests.attention_cases import CASES, error, tolerance

READABLE = [
    name for name, case in CASES.items() if CpuAttention.supports(case.kv_dtype or case.dtype)
]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("name", READABLE)
def test_cpu_kernel_matches_the_reference(torch_threads, name, num_threads):
    torch_threads(num_threads)
    assert error(CASES[name], CpuAttention()) <= tolerance(CASES[name])


def test_kernel_runs_on_one_thread_without_gnu_openmp(torch_threads, monkeypatch):
    torch_threads(4)
    monkeypatch.setattr(cpu_kernels, "_library", lambda: None)
    assert cpu_kernels.num_threads() == 1
    assert error(CASES["decodes of group 3"], CpuAttention()) <= 2e-5


# ── kept on disk ─────────────────────────────────────────────────────────────────────────────────

GEOMETRIES = [Geometry(1, 1, 8, 4, is_bfloat16) for is_bfloat16 in (False, True)]
ROOT = Path(__file__).parents[2]
READ = """
from tests.engine.test_attention_cpu import GEOMETRIES, hits
print(hits(GEOMETRIES))
"""


def hits(geometries: list[Geometry]) -> list[int]:
    """Compile kernels or load them from disk. Return which were on disk."""
    return [kernel_for.__wrapped__(each).cache_hits for each in geometries]


@pytest.mark.thorough
def test_second_process_loads_the_compiled_kernel_from_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert hits(GEOMETRIES) == [0, 0]
    indexes = {path.name.split("-")[0]: path for path in tmp_path.rglob("*.nbi")}
    assert len(indexes) == 2, "kernels with the same index were confused"
    command = [sys.executable, "-W", "ignore", "-c", READ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[1, 1]"
    broken, _ = indexes.values()
    broken.write_bytes(broken.read_bytes()[:9])
    assert sum(hits(GEOMETRIES)) == 1, "a corrupt cache file must be recompiled"
