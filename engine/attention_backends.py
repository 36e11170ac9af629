"""The attention backends: where each one runs, and which one an engine uses.

| backend | for | file |
|---|---|---|
| `torch` | any device, type and feature; the reference | `attention_torch.py` |
| `cpu` | float32 and bfloat16 on CPUs; decoding rows read the pages in place | `attention_cpu.py` |
| `flashinfer` | GPUs, 16-bit types; FlashInfer's kernels, if installed | `attention_flashinfer.py` |
| `triton` | GPUs, any head dim and type; our own kernels, if FlashInfer's do not apply | `attention_triton.py` |
"""

from importlib.util import find_spec

import torch

from tandem.engine.attention import AttentionBackend
from tandem.engine.attention_cpu import CpuAttention
from tandem.engine.attention_torch import TorchAttention
from tandem.engine.config import AttentionName, EngineConfig
from tandem.engine.shape import ModelShape
from tandem.wire.errors import ConfigInvalid

# Modules that a backend needs, and the requirement that installs each.
_LIBRARIES = {
    "triton": {"triton": "triton>=3.5"},
    "flashinfer": {"flashinfer": "tandem-serve[flashinfer]", "triton": "triton>=3.5"},
}


def choose_backend(config: EngineConfig, shape: ModelShape) -> AttentionBackend:
    """Return the requested backend, or for `auto` the fastest that runs here.

    Raises:
        ConfigInvalid: The requested backend does not run here; the message suggests another.
    """
    name = config.attention_backend
    if name == "auto":
        name = fastest(config, shape)
    elif refusal := _refusal(name, config, shape):
        raise ConfigInvalid(refusal)
    match name:
        case "cpu":
            return CpuAttention()
        case "triton":
            from tandem.engine.attention_triton import TritonAttention

            processors = torch.cuda.get_device_properties(config.device).multi_processor_count
            return TritonAttention(processors)
        case "flashinfer":
            from tandem.engine.attention_flashinfer import FlashInferAttention
            from tandem.engine.attention_triton import write

            return FlashInferAttention(config.device, write)
        case _:
            return TorchAttention()


def fastest(config: EngineConfig, shape: ModelShape) -> AttentionName:
    """Return the name of the fastest backend that runs on the device with this model."""
    names: tuple[AttentionName, ...] = ("cpu", "flashinfer", "triton")
    return next((name for name in names if not _refusal(name, config, shape)), "torch")


def _refusal(name: AttentionName, config: EngineConfig, shape: ModelShape) -> str:
    """Return why a backend does not run here with this model, and what to use instead; empty if it runs."""
    if name == "cpu" and (
        config.device != "cpu" or not CpuAttention.supports(getattr(torch, shape.kv_dtype))
    ):
        return (
            "--attention-backend cpu reads float32 and bfloat16 KV on a CPU; "
            "give --attention-backend auto"
        )
    return _refusal_of_gpu(name, config, shape) if name in _LIBRARIES else ""


def _refusal_of_gpu(name: AttentionName, config: EngineConfig, shape: ModelShape) -> str:
    if config.device.split(":", maxsplit=1)[0] != "cuda":
        return (
            f"--attention-backend {name} runs on GPUs and the device is {config.device}; "
            "give --device cuda, or --attention-backend auto"
        )
    for module, requirement in _LIBRARIES[name].items():
        if find_spec(module) is None:
            return (
                f"this attention backend needs {module}: run pip install '{requirement}', or give "
                "--attention-backend torch"
            )
    if name == "flashinfer" and not _flashinfer_supports(shape):
        has = ", ".join(sorted({str(layer.key_dim) for layer in shape.kv_layers} | shape.attention))
        return (
            "--attention-backend flashinfer knows 16-bit types and head dims 64, 128 and 256; this "
            f"model has {shape.dtype} and {has}: give --attention-backend triton"
        )
    # Layers that our kernels do not support would fall back to torch, which no graph can record.
    if name == "triton" and shape.attention & {"latents", "unequal"}:
        return (
            "--attention-backend triton needs K and V of one size, which this model's layers do not "
            "have: give --attention-backend torch"
        )
    return ""


def _flashinfer_supports(shape: ModelShape) -> bool:
    has_sizes = all(layer.key_dim in (0, 64, 128, 256) for layer in shape.kv_layers)
    return shape.dtype in ("bfloat16", "float16") and has_sizes and not shape.attention
