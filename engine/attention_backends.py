"""Which attention backend an engine uses."""

from importlib.util import find_spec

import torch

from tandem.engine.attention import AttentionBackend
from tandem.engine.attention_cpu import CpuAttention
from tandem.engine.attention_torch import TorchAttention
from tandem.engine.config import AttentionName, EngineConfig
from tandem.engine.shape import ModelShape
from tandem.wire.errors import ConfigInvalid


def choose_backend(config: EngineConfig, shape: ModelShape) -> AttentionBackend:
    """Return the backend that was asked for, or the fastest that runs here.

    Raises:
        ConfigInvalid: The one asked for does not run here; the sentence says why, and what does.
    """
    name = config.attention_backend
    if name == "auto":
        name = fastest(config, shape)
    match name:
        case "cpu":
            return _cpu(config, shape)
        case "triton":
            return _triton(config, shape)
        case "flashinfer":
            return _flashinfer(config, shape)
        case _:
            return TorchAttention()


def fastest(config: EngineConfig, shape: ModelShape) -> AttentionName:
    """Name the backend that is fastest among those that run on the device with this model."""
    if config.device == "cpu":
        return "cpu" if CpuAttention.supports(getattr(torch, shape.kv_dtype)) else "torch"
    if not _is_gpu(config) or find_spec("triton") is None:
        return "torch"
    if find_spec("flashinfer") is not None:
        from tandem.engine.attention_flashinfer import FlashInferAttention

        if FlashInferAttention.supports(shape):
            return "flashinfer"
    from tandem.engine.attention_triton import TritonAttention

    return "triton" if TritonAttention.supports(shape) else "torch"


def _cpu(config: EngineConfig, shape: ModelShape) -> AttentionBackend:
    if config.device != "cpu" or not CpuAttention.supports(getattr(torch, shape.kv_dtype)):
        raise ConfigInvalid(
            "--attention-backend cpu reads float32 and bfloat16 KV on a CPU; "
            "give --attention-backend auto"
        )
    return CpuAttention()


def _triton(config: EngineConfig, shape: ModelShape) -> AttentionBackend:
    _check_gpu(config)
    _check_installed("triton", "triton>=3.5")
    from tandem.engine.attention_triton import TritonAttention

    if not TritonAttention.supports(shape):
        raise ConfigInvalid(
            "--attention-backend triton needs K and V of one size, which this model's layers do not "
            "have: give --attention-backend torch"
        )

    processors = torch.cuda.get_device_properties(config.device).multi_processor_count
    return TritonAttention(processors)


def _flashinfer(config: EngineConfig, shape: ModelShape) -> AttentionBackend:
    _check_gpu(config)
    _check_installed("flashinfer", "tandem-serve[flashinfer]")
    _check_installed("triton", "triton>=3.5")
    from tandem.engine.attention_flashinfer import FlashInferAttention
    from tandem.engine.attention_triton import write

    if not FlashInferAttention.supports(shape):
        has = ", ".join(sorted({str(layer.key_dim) for layer in shape.kv_layers} | shape.attention))
        raise ConfigInvalid(
            f"--attention-backend flashinfer knows 16-bit types and head dims 64, 128 and 256; this "
            f"model has {shape.dtype} and {has}: give --attention-backend triton"
        )
    return FlashInferAttention(config.device, write)


def _is_gpu(config: EngineConfig) -> bool:
    return config.device.split(":", maxsplit=1)[0] == "cuda"


def _check_gpu(config: EngineConfig) -> None:
    if not _is_gpu(config):
        raise ConfigInvalid(
            f"--attention-backend {config.attention_backend} runs on GPUs and the device is "
            f"{config.device}; give --device cuda, or --attention-backend auto"
        )


def _check_installed(module: str, requirement: str) -> None:
    if find_spec(module) is None:
        raise ConfigInvalid(
            f"this attention backend needs {module}: run pip install '{requirement}', or give "
            "--attention-backend torch"
        )
