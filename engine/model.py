"""Loads a model through transformers, and determines its shape."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch

from tandem.engine.attention import PagedModel, refusing, text_config_of
from tandem.engine.checkpoint import (
    fingerprint,
    in_one_sentence,
    load_checkpoint,
    outline,
    read_config,
)
from tandem.engine.config import EngineConfig
from tandem.engine.llama import speed_up
from tandem.engine.model_check import ModelCheck
from tandem.engine.observation import Observed, observe
from tandem.engine.shape import KV_DTYPES, ModelShape, context_length, eos_token_ids, kv_heads
from tandem.engine.weight_files import weight_files
from tandem.wire.errors import ConfigInvalid

# Weights of more than this take longer to load than a small copy takes to check.
_LARGE_BYTES = 1 << 30

# Names of key projections in transformers' tensor parallel plans.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Memory needs of a model: its shape on one rank, and the bytes of its weights over all ranks."""

    shape: ModelShape
    weight_bytes: int


def load_model(config: EngineConfig) -> tuple[PagedModel, ModelShape]:
    """Load weights, or create seeded random ones, with attention routed to the paged pool.

    With `tp_size` over 1 every rank calls this, after `tensor_parallel.join`, and gets its shard.

    Raises:
        ConfigInvalid: The directory has no supported model; the message gives the reason.
    """
    hf_config = read_config(config)
    text = text_config_of(hf_config)
    check = ModelCheck(config, hf_config)
    if _stored_bytes(config) > _LARGE_BYTES:
        with in_one_sentence(f"cannot check the model in {config.model_dir}"), refusing(hf_config):
            check.copy()  # before minutes of loading
    module = load_checkpoint(config, hf_config)
    _head_shares(config, module, text)
    with in_one_sentence(f"cannot check the model in {config.model_dir}"), refusing(hf_config):
        observed = observe(module, text)
        shape = _shape(config, module, text, observed)
        check.before(module)
        if config.is_compiled and not config.is_eager:
            compile_layers(module, config.device)  # it cannot compile packed weights
        elif config.is_fused:
            speed_up(observed)
        check.after(observed.model, shape)
    if config.device != "cpu":
        torch.cuda.empty_cache()  # frees replaced weights, because the pool takes all free memory
    return observed.model, shape


def model_needs(config: EngineConfig) -> ModelNeeds:
    """Return a model's memory needs. It reads only the headers of the files, and loads no weights.

    Raises:
        ConfigInvalid: The directory has no supported model; the message gives the reason.
    """
    hf_config = read_config(config)
    text = text_config_of(hf_config)
    model, weight_bytes = outline(config, hf_config)
    shares = _head_shares(config, model, text)
    with in_one_sentence(f"cannot check the model in {config.model_dir}"), refusing(hf_config):
        observed = ModelCheck(config, hf_config).copy().cut(shares)
        shape = _shape(config, model, text, observed)
    return ModelNeeds(shape, weight_bytes)


def _stored_bytes(config: EngineConfig) -> int:
    if config.load_format == "dummy":
        return 0
    return sum(file.stat().st_size for file in weight_files(Path(config.model_dir)))


def compile_layers(model: torch.nn.Module, device: str) -> None:
    """Make torch.compile compile the model's decoder layers at their first forward.

    Decoder layers take most of the time and are all alike, so one compilation serves every layer. With
    symbolic sizes it serves every batch, too. Attention is not compiled; see `attention.register`.

    Raises:
        ConfigInvalid: The compiler that torch.compile needs is not installed.
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


def _shape(
    config: EngineConfig, model: torch.nn.Module, text: Any, observed: Observed
) -> ModelShape:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, dtype)
    layers = observed.layers
    is_alike = len({*layers}) == 1 and layers[0].key_dim == layers[0].value_dim
    if config.tp_size > 1 and not is_alike:
        raise ConfigInvalid(
            f"--tp {config.tp_size} cannot share the KV of a model whose layers differ, or whose K and V "
            "do: leave --tp out"
        )
    elements = sum(each.num_kv_heads * (each.key_dim + each.value_dim) for each in layers)
    return ModelShape(
        num_layers=len(layers),
        num_kv_heads=layers[0].num_kv_heads if is_alike else 1,
        model_kv_heads=kv_heads(text) if is_alike else 1,
        head_dim=layers[0].key_dim if is_alike else elements,
        vocab_size=text.vocab_size,
        context_length=context_length(config.context_length, text),
        eos_token_ids=eos_token_ids(Path(config.model_dir), text),
        dtype=dtype,
        kv_dtype=kv_dtype,
        fingerprint=fingerprint(config, text, dtype, kv_dtype),
        layers=() if is_alike else layers,
        sources=observed.sources,
        attention=observed.features,
    )


def _head_shares(config: EngineConfig, model: Any, text: Any) -> int:
    """Return the number of shares that ranks split the KV heads into; 1 if each rank has all of them.

    Raises:
        ConfigInvalid: The heads cannot be split evenly.
    """
    if config.tp_size == 1:
        return 1
    num_heads = getattr(text, "num_attention_heads", 0)
    num_kv_heads = kv_heads(text) if num_heads else 0
    is_split = any(
        name.rpartition(".")[2] in _KEY_PROJECTIONS and style == "colwise"
        for name, style in model.tp_plan.items()
    )
    if is_split and (num_kv_heads % config.tp_size or num_heads % config.tp_size):
        raise ConfigInvalid(
            f"--tp {config.tp_size} cannot share {num_heads} attention heads with {num_kv_heads} KV "
            "heads evenly: give a number that divides both"
        )
    return config.tp_size if is_split else 1
