"""Resolution of `--device auto`, `--chunked-prefill-size 0` and `--dtype auto` on various machines."""

import json
import os
import subprocess
import sys

import pytest

from tandem.engine.config import EngineConfig, EngineOptions
from tandem.engine.profile import Simulation
from tandem.node import machine
from tandem.node.machine import (
    DtypeChoice,
    cpu_flags,
    dtype_from_flags,
    num_cores,
    num_gpus,
    with_dtype,
    with_machine_defaults,
)

AVX2 = {"fpu", "sse2", "avx", "avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}
ARM = {"fp", "asimd", "fphp", "asimdhp", "sve"}


@pytest.mark.parametrize(
    ("flags", "dtype", "reason"),
    [
        (AVX2, "float32", "the CPU has no instructions for bfloat16"),
        (AVX512, "float32", "the CPU has no instructions for bfloat16"),
        (AVX512 | {"avx512_bf16"}, "bfloat16", "the CPU has AVX-512 with bfloat16"),
        (AVX512 | {"avx512_bf16", "amx_bf16", "amx_tile"}, "bfloat16", "the CPU has AMX"),
        (ARM, "float32", "the CPU has no instructions for bfloat16"),
        (ARM | {"bf16"}, "bfloat16", "the CPU has Arm's bfloat16 instructions"),
        ((), "float32", "the CPU has no instructions for bfloat16"),
    ],
    ids=["AVX2", "AVX-512", "AVX-512 bfloat16", "AMX", "Arm", "Arm bfloat16", "unknown"],
)
def test_cpu_flags_select_the_dtype(flags, dtype, reason):
    assert dtype_from_flags(frozenset(flags)) == DtypeChoice(dtype, reason)


@pytest.mark.parametrize(
    ("limit", "has_bfloat16"),
    [
        ("", True),
        ("AVX2", False),
        ("AVX512_CORE", False),
        ("AVX512_CORE_BF16", True),
        ("ALL", True),
    ],
)
def test_onednn_isa_limit_hides_bfloat16_flags(tmp_path, limit, has_bfloat16):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("flags\t\t: fpu avx2 avx512_bf16\n")
    environment = {"ONEDNN_MAX_CPU_ISA": limit} if limit else {}
    flags = {"fpu", "avx2"} | ({"avx512_bf16"} if has_bfloat16 else set())
    assert cpu_flags(tmp_path, environment) == flags


@pytest.mark.parametrize(
    ("line", "flags"),
    [("flags\t\t: fpu avx2\n", {"fpu", "avx2"}), ("Features\t: fp bf16\n", {"fp", "bf16"})],
)
def test_cpu_flags_are_read_from_proc(tmp_path, line, flags):
    assert cpu_flags(tmp_path, {}) == frozenset()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\n{line}\nprocessor\t: 1\n{line}")
    assert cpu_flags(tmp_path, {}) == flags


# ── which models it is chosen for ────────────────────────────────────────────────────────────────


def chosen(tmp_path, monkeypatch, facts, **settings) -> str:
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset(AVX2))
    (tmp_path / "config.json").write_text(json.dumps(facts))
    return with_dtype(EngineConfig(model_dir=str(tmp_path), **settings)).dtype


@pytest.mark.parametrize(
    "facts",
    [
        {"dtype": "bfloat16"},
        {"torch_dtype": "float16"},
        {"text_config": {"dtype": "bfloat16"}},
    ],
)
def test_16_bit_checkpoint_is_computed_in_the_faster_dtype(tmp_path, monkeypatch, facts):
    assert chosen(tmp_path, monkeypatch, facts) == "float32"


@pytest.mark.parametrize(
    ("facts", "settings"),
    [
        ({"dtype": "float32"}, {}),
        ({}, {}),
        ({"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}, {}),
        ({"dtype": "bfloat16"}, {"device": "cuda:0"}),
        ({"dtype": "bfloat16"}, {"simulation": Simulation()}),
    ],
)
def test_other_checkpoints_keep_their_dtype(tmp_path, monkeypatch, facts, settings):
    assert chosen(tmp_path, monkeypatch, facts, **settings) == "auto"


def test_dtype_flag_takes_precedence(tmp_path, monkeypatch):
    facts = {"dtype": "bfloat16"}
    assert chosen(tmp_path, monkeypatch, facts, dtype="bfloat16") == "bfloat16"


# ── the device ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "gpus", "device", "chunk"),
    [
        ({}, 0, "cpu", 512),
        ({}, 2, "cuda:0", 8192),
        ({"tp_size": 2}, 2, "cuda", 8192),
        ({"tp_size": 2}, 0, "cpu", 512),
        ({"simulation": Simulation()}, 2, "cpu", 512),
        ({"device": "cpu"}, 2, "cpu", 512),
        ({"device": "cuda:1", "chunked_prefill_size": 64}, 2, "cuda:1", 64),
    ],
)
def test_node_uses_a_gpu_if_there_is_one_unless_flags_override(
    monkeypatch, settings, gpus, device, chunk
):
    monkeypatch.setattr(machine, "is_cpu_build", lambda: False)
    config = with_machine_defaults(
        EngineOptions(**{"device": "auto", "chunked_prefill_size": 0, **settings}), gpus
    )
    assert (config.device, config.chunked_prefill_size) == (device, chunk)


def test_cpu_build_of_torch_uses_no_gpu(monkeypatch):
    monkeypatch.setattr(machine, "is_cpu_build", lambda: True)
    assert with_machine_defaults(EngineOptions(device="auto"), 4).device == "cpu"


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2,MIG-3,MIG-4"}, 3),
    ],
)
def test_gpus_are_counted_by_device_files_and_visibility(tmp_path, environment, count):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert num_gpus(tmp_path, environment) == count


@pytest.mark.parametrize(
    ("limit", "count"),
    [(None, 4), ("max 100000", 4), ("800000 100000", 4), ("250000 100000", 2), ("50000 100000", 1)],
)
def test_cores_are_those_of_the_affinity_within_the_limit_of_the_cgroup(
    tmp_path, monkeypatch, limit, count
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 5, 6})
    if limit is not None:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{limit}\n")
    assert num_cores(tmp_path) == count


def test_machine_module_does_not_import_torch():
    code = "import sys, tandem.node.machine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
