"""Loads a model through transformers and determines its shape."""

from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch

from tandem.engine.attention.paged import PagedModel, refusing, text_config_of
from tandem.engine.config import EngineConfig
from tandem.engine.model.check import ModelCheck
from tandem.engine.model.checkpoint import (
    fingerprint,
    in_one_sentence,
    load_checkpoint,
    read_config,
)
from tandem.engine.model.llama import speed_up
from tandem.engine.model.observation import Observed, observe
from tandem.engine.shape import KV_DTYPES, ModelShape, context_length, eos_token_ids, kv_heads
from tandem.engine.weight_files import weight_files
from tandem.wire.errors import ConfigInvalid

# Loading more weights than this takes longer than checking a small copy of the model.
_LARGE_BYTES = 1 << 30

# Names of key projections in transformers' tensor parallel plans.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


def load_model(config: EngineConfig) -> tuple[PagedModel, ModelShape]:
    """Load a model, or create one with seeded random weights, and route its attention to the paged pool.

    With `tp_size` over 1 every rank must call this after `tensor_parallel.join`, and gets its shard.

    Raises:
        ConfigInvalid: The directory has no supported model. The message gives the reason.
    """
    hf_config = read_config(config)
    text = text_config_of(hf_config)
    check = ModelCheck(config, hf_config)
    if _stored_bytes(config) > _LARGE_BYTES:
        with in_one_sentence(f"cannot check the model in {config.model_dir}"), refusing(hf_config):
            check.check_copy()  # before minutes of loading
    module = load_checkpoint(config, hf_config)
    _check_heads(config, module, text)
    with in_one_sentence(f"cannot check the model in {config.model_dir}"), refusing(hf_config):
        observed = observe(module, text)
        shape = _shape(config, module, text, observed)
        check.record_expected(module)
        if config.is_compiled and not config.is_eager:
            compile_layers(module, config.device)  # packed weights cannot be compiled
        elif config.is_fused:
            speed_up(observed)
        check.compare(observed.model, shape)
    if config.device != "cpu":
        torch.cuda.empty_cache()  # frees replaced weights, because the pool takes all free memory
    return observed.model, shape


def _stored_bytes(config: EngineConfig) -> int:
    if config.load_format == "dummy":
        return 0
    return sum(file.stat().st_size for file in weight_files(Path(config.model_dir)))


def compile_layers(model: torch.nn.Module, device: str) -> None:
    """Let torch.compile compile the decoder layers of a model in their first forward.

    Decoder layers take most of the time and are alike, so all layers share one compilation, and with symbolic sizes
    all batches do too. Attention is not compiled; see `paged.register`.

    Raises:
        ConfigInvalid: The compiler that torch.compile needs is not installed, or the model's layers are not found.
    """
    compiler = "triton" if device != "cpu" else "a C++ compiler"
    is_there = find_spec("triton") if device != "cpu" else which("g++") or which("clang++")
    if not is_there:
        raise ConfigInvalid(
            f"--enable-torch-compile needs {compiler} on {device}: install it or omit the flag"
        )
    get_decoder: Any = getattr(model, "get_decoder", lambda: model)
    layers = getattr(get_decoder(), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ConfigInvalid(
            f"--enable-torch-compile does not support {type(model).__name__}: omit the flag"
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
            f"--tp {config.tp_size} cannot split the KV of this model, whose layers, or K and V, differ in "
            "size: omit --tp"
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


def _check_heads(config: EngineConfig, model: Any, text: Any) -> None:
    """Raise ConfigInvalid if ranks split the attention heads but cannot do so evenly."""
    if config.tp_size == 1:
        return
    num_heads = getattr(text, "num_attention_heads", 0)
    num_kv_heads = kv_heads(text) if num_heads else 0
    is_split = any(
        name.rpartition(".")[2] in _KEY_PROJECTIONS and style == "colwise"
        for name, style in model.tp_plan.items()
    )
    if is_split and (num_kv_heads % config.tp_size or num_heads % config.tp_size):
        raise ConfigInvalid(
            f"--tp {config.tp_size} cannot split {num_heads} attention heads and {num_kv_heads} KV "
            "heads evenly: set a number that divides both"
        )
