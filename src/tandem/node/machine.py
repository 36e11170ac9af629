"""Resolves `auto` for this machine: the device, the chunk size, and the type of weights on a CPU. Counts its cores.

Nothing here imports torch.
"""

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from tandem.engine.config import EngineConfig, EngineOptions
from tandem.engine.weight_files import read_object
from tandem.telemetry.log import get_logger

log = get_logger(__name__)

# Defaults of flags that `with_machine_defaults` resolves.
DEFAULTS = {"engine.device": "auto", "engine.chunked_prefill_size": 0}
# Tokens per chunk. A CPU takes about half a second for such a chunk of the embedded model.
CPU_CHUNK, GPU_CHUNK = 512, 8192
GPU_FILES = "nvidia[0-9]*"
# CPU flags of instructions that multiply bfloat16, as in /proc/cpuinfo; the first match is logged.
FAST_BFLOAT16 = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 with bfloat16",
    "bf16": "Arm's bfloat16 instructions",
}

CpuDtype = Literal["bfloat16", "float32"]


class DtypeChoice(NamedTuple):
    """A type of weights and the reason for it, a clause that starts with `the CPU`."""

    dtype: CpuDtype
    reason: str


# ── the device ───────────────────────────────────────────────────────────────────────────────────


def num_gpus(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of NVIDIA GPUs that this process can use, from device files and CUDA_VISIBLE_DEVICES."""
    num_files = len(list((root / "dev").glob(GPU_FILES)))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_files
    named = [name for name in visible.split(",") if name.strip()]
    return min(num_files, len(named)) if "-1" not in named else 0


def num_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use: those of its affinity, within its cgroup's CPU limit."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no limit: the quota is `max`, or there is no file
        quota, period = map(int, (root / "sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, quota // period)
    return max(1, cores)


def with_machine_defaults(config: EngineOptions, gpus: int | None = None) -> EngineOptions:
    """Return the options with `auto` and 0 replaced by this machine's device and chunk size.

    Args:
        gpus: Number of GPUs; None: `num_gpus()`.
    """
    device = config.device
    if device == "auto":
        gpus = num_gpus() if gpus is None else gpus
        is_usable = gpus > 0 and config.simulation is None and not is_cpu_build()
        device = ("cuda" if config.tp_size > 1 else "cuda:0") if is_usable else "cpu"
    chunk = config.chunked_prefill_size or (CPU_CHUNK if device == "cpu" else GPU_CHUNK)
    return msgspec.structs.replace(config, device=device, chunked_prefill_size=chunk)


def warn_of_unused_gpus(config: EngineOptions) -> None:
    """Log a warning if this machine has GPUs that the installed torch cannot use."""
    if config.device == "cpu" and config.simulation is None and num_gpus() and is_cpu_build():
        advice = "pip install 'tandem-serve[cuda]', or set --device cpu"
        log.warning("gpus.unused", reason="torch is a build for CPUs", advice=advice)


def is_cpu_build() -> bool:
    """Whether the installed torch is a build without CUDA."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


# Packages of the extra `node`, and torch, by their import names; a plain install suffices for the router and its clients.
NODE_PACKAGES = (
    *("torch", "transformers", "accelerate", "gguf", "huggingface_hub", "numba", "numpy"),
    *("safetensors", "xgrammar"),
)


def require_packages() -> None:
    """Raise `ModuleNotFoundError` if a package of nodes is not installed. Imports none of them."""
    for name in NODE_PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


# ── the type of weights on a CPU ─────────────────────────────────────────────────────────────────


def cpu_flags(
    root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> frozenset[str]:
    """Return the instruction sets of this CPU; empty if they cannot be read.

    Excludes bfloat16 instructions if `ONEDNN_MAX_CPU_ISA` forbids them to oneDNN, which computes the products.
    """
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    listed = (line.partition(":") for line in lines)
    flags = frozenset(
        word
        for name, _, words in listed
        if name.strip() in ("flags", "Features")
        for word in words.split()
    )
    limit = environment.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    has_bfloat16 = limit in ("ALL", "DEFAULT") or any(name in limit for name in ("BF16", "AMX"))
    return flags if has_bfloat16 else flags - FAST_BFLOAT16.keys()


def dtype_from_flags(flags: frozenset[str]) -> DtypeChoice:
    """Return the type that a CPU with these flags multiplies faster; float32 if its flags are not known."""
    for flag, name in FAST_BFLOAT16.items():
        if flag in flags:
            return DtypeChoice("bfloat16", f"the CPU has {name}")
    return DtypeChoice("float32", "the CPU has no instructions for bfloat16")


def with_dtype(config: EngineConfig) -> EngineConfig:
    """Return the config with `--dtype auto` replaced by the faster type on a CPU.

    Applies to 16-bit checkpoints. For float32 and quantized checkpoints and on GPUs `auto` stays, which means the
    type of the checkpoint.

    Raises:
        ConfigInvalid: The model's config.json cannot be read.
    """
    if config.dtype != "auto" or config.device != "cpu" or config.simulation is not None:
        return config
    facts = read_object(Path(config.model_dir) / "config.json")
    text = facts.get("text_config")
    layers = [facts, text] if isinstance(text, dict) else [facts]
    own = next(
        (x for each in layers for x in (each.get("dtype"), each.get("torch_dtype")) if x), None
    )
    if own not in ("bfloat16", "float16") or "quantization_config" in facts:
        return config
    choice = dtype_from_flags(cpu_flags())
    log.info("dtype.chosen", dtype=choice.dtype, checkpoint=own, reason=choice.reason)
    return msgspec.structs.replace(config, dtype=choice.dtype)
