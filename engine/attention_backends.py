"""Which attention backend an engine uses."""

import torch

from engine.attention import AttentionBackend
from engine.attention_cpu import CpuAttention
from engine.attention_torch import TorchAttention
from engine.config import AttentionName, EngineConfig
from engine.model import ModelShape
from wire.errors import ConfigInvalid


def choose_backend(config: EngineConfig, shape: ModelShape) -> AttentionBackend:
    """Return the backend that was asked for, or the fastest that runs here.

    Raises:
        ConfigInvalid: The one asked for does not run here; the sentence says why.
    """
    name = config.attention_backend
    if name == "auto":
        name = _fastest(config, shape)
    if name == "cpu":
        if config.device != "cpu" or not CpuAttention.supports(shape.kv_dtype):
            raise ConfigInvalid(
                "--attention-backend cpu reads float32 and bfloat16 KV on a CPU; "
                "give --attention-backend auto"
            )
        return CpuAttention(torch.get_num_threads())
    if name == "torch":
        return TorchAttention()
    raise ConfigInvalid(f"--attention-backend {name} is not in this build; give auto")


def _fastest(config: EngineConfig, shape: ModelShape) -> AttentionName:
    is_cpu = config.device == "cpu" and CpuAttention.supports(shape.kv_dtype)
    return "cpu" if is_cpu else "torch"
