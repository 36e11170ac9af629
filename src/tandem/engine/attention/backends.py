"""The attention backends: where each one runs, and how an engine chooses one.

| backend | runs on | file |
|---|---|---|
| `torch` | any device, type and feature; the reference | `torch.py` |
| `cpu` | float32 and bfloat16 on CPUs; decoding rows read the pages in place | `cpu.py` |
| `triton` | GPUs, any head dim and type; our own kernels | `triton.py` |
"""

from importlib.util import find_spec

import torch

from tandem.engine.attention.cpu import CpuAttention
from tandem.engine.attention.paged import AttentionBackend
from tandem.engine.attention.torch import TorchAttention
from tandem.engine.config import AttentionName, EngineOptions
from tandem.engine.shape import ModelShape
from tandem.wire.errors import ConfigInvalid


def choose_backend(config: EngineOptions, shape: ModelShape) -> AttentionBackend:
    """Return the requested backend; for `auto`, the fastest that supports the device and model.

    Raises:
        ConfigInvalid: The requested backend does not support the device or model. The message suggests an alternative.
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
            from tandem.engine.attention.triton import TritonAttention

            processors = torch.cuda.get_device_properties(config.device).multi_processor_count
            return TritonAttention(processors)
        case _:
            return TorchAttention()


def fastest(config: EngineOptions, shape: ModelShape) -> AttentionName:
    """Return the name of the fastest backend that supports the device and model."""
    names: tuple[AttentionName, ...] = ("cpu", "triton")
    return next((name for name in names if not _refusal(name, config, shape)), "torch")


def _refusal(name: AttentionName, config: EngineOptions, shape: ModelShape) -> str:
    """Return why a backend does not support the device or model and what to use instead; empty if it does."""
    if name == "cpu" and (
        config.device != "cpu" or not CpuAttention.supports(getattr(torch, shape.kv_dtype))
    ):
        return (
            "--attention-backend cpu supports float32 and bfloat16 KV on a CPU; "
            "use --attention-backend auto"
        )
    return _refusal_of_triton(config, shape) if name == "triton" else ""


def _refusal_of_triton(config: EngineOptions, shape: ModelShape) -> str:
    if config.device.split(":", maxsplit=1)[0] != "cuda":
        return (
            f"--attention-backend triton needs a GPU, and the device is {config.device}; "
            "use --device cuda or --attention-backend auto"
        )
    if find_spec("triton") is None:
        return (
            "--attention-backend triton needs triton: run pip install 'triton>=3.5', or use "
            "--attention-backend torch"
        )
    # Unsupported layers would fall back to torch, which CUDA graphs cannot record.
    if shape.attention & {"latents", "unequal"}:
        return (
            "--attention-backend triton needs layers whose K and V have the same size, unlike this "
            "model's: use --attention-backend torch"
        )
    return ""
