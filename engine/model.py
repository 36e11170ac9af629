"""A model as the engine runs it, and what the rest needs to know of it."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch

from engine.checkpoint import fingerprint, load_checkpoint, outline
from engine.config import EngineConfig
from engine.fusion import fuse
from engine.shape import KV_DTYPES, ModelShape, context_length, eos_token_ids, head_dim, kv_heads
from wire.errors import ConfigInvalid

# Whose output is keys, under the names that transformers' tensor parallel plans have for it.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a model takes; the weights are those of all ranks together."""

    shape: ModelShape
    weight_bytes: int


def load_model(config: EngineConfig) -> tuple[torch.nn.Module, ModelShape]:
    """Load weights, or make seeded random ones, with attention routed to the paged pool.

    With `tp_size` over 1 every rank calls this, after `tensor_parallel.join`, and gets its shard.

    Raises:
        ConfigInvalid: The directory holds no model we can serve; the sentence says why.
    """
    model, hf_config = load_checkpoint(config)
    shape = _shape(config, model, hf_config)
    if config.is_compiled and not config.is_eager:
        compile_layers(model, config.device)  # which cannot look into packed weights
    elif config.tp_size == 1:
        fuse(model)
    return model, shape


def model_needs(config: EngineConfig) -> ModelNeeds:
    """Return what a model takes: of its files the headers are read, and no weight is made.

    Raises:
        ConfigInvalid: The directory holds no model we can serve; the sentence says why.
    """
    outlined = outline(config)
    shape = _shape(config, outlined.model, outlined.hf_config)
    return ModelNeeds(shape, outlined.weight_bytes)


def compile_layers(model: torch.nn.Module, device: str) -> None:
    """Have torch.compile replace the model's decoder layers, at their first forward.

    They are where the time goes, and all alike: one compilation serves every layer, and, with its sizes
    symbolic, every batch. Attention stays outside; see `attention.register`.

    Raises:
        ConfigInvalid: The machine lacks what torch.compile makes code with.
    """
    compiler = "triton" if device != "cpu" else "a C++ compiler"
    is_there = find_spec("triton") if device != "cpu" else which("g++") or which("clang++")
    if not is_there:
        raise ConfigInvalid(
            f"--enable-torch-compile needs {compiler} on {device}: install one, or leave the flag out"
        )
    get_decoder: Any = getattr(model, "get_decoder", lambda: model)
    layers = getattr(get_decoder(), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ConfigInvalid(
            f"--enable-torch-compile does not know the layers of {type(model).__name__}; leave it out"
        )
    for layer in layers:
        layer.compile(dynamic=True)


def _shape(config: EngineConfig, model: torch.nn.Module, hf_config: object) -> ModelShape:
    text = hf_config.get_text_config()  # type: ignore[attr-defined]
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, dtype)
    return ModelShape(
        num_layers=text.num_hidden_layers,
        num_kv_heads=_own_kv_heads(config, model, text),
        model_kv_heads=kv_heads(text),
        head_dim=head_dim(text),
        vocab_size=text.vocab_size,
        context_length=context_length(config.context_length, text),
        eos_token_ids=eos_token_ids(Path(config.model_dir), text),
        dtype=dtype,
        kv_dtype=kv_dtype,
        fingerprint=fingerprint(config, text, dtype, kv_dtype),
    )


def _own_kv_heads(config: EngineConfig, model: Any, text_config: Any) -> int:
    """Return how many KV heads are this rank's: all of them where the plan does not split heads."""
    num_heads, num_kv_heads = text_config.num_attention_heads, kv_heads(text_config)
    is_split = config.tp_size > 1 and any(
        name.rpartition(".")[2] in _KEY_PROJECTIONS and style == "colwise"
        for name, style in model.tp_plan.items()
    )
    if not is_split:
        return num_kv_heads
    if num_kv_heads % config.tp_size or num_heads % config.tp_size:
        raise ConfigInvalid(
            f"--tp {config.tp_size} cannot share {num_heads} attention heads with {num_kv_heads} KV "
            "heads evenly: give a number that divides both"
        )
    return num_kv_heads // config.tp_size
