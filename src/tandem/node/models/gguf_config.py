"""Reads the config of a GGUF file completely, or rejects the file by the name of what cannot be read.

transformers' own reader drops metadata and tensors that it does not know without an error. This module reads what
changes the logits: sizes, norms, windows, soft caps and RoPE. Each remaining key of the architecture, and each tensor
without a place in the model, is an error. The tables below follow llama.cpp, which defines the format.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tandem.engine.shape import head_dim
from tandem.engine.weight_files import some
from tandem.wire.errors import ConfigInvalid

# Architectures whose logits are tested against transformers with the original config (tests/node/test_gguf.py).
ARCHITECTURES = (
    "gemma2",
    "gemma3",
    "gpt2",
    "llama",
    "nemotron",
    "phi3",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "stablelm",
    "starcoder2",
)

# Attributes of configs by the key of the same meaning. A config has at most one of several.
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_epsilon": (
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_epsilon",
        "norm_eps",
    ),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attention.value_length": ("head_dim",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "expert_count": ("num_experts",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "vocab_size": ("vocab_size",),
}
# Keys without which a class would fill in the value of a different model.
_REQUIRED = ("attention.head_count", "block_count", "context_length", "embedding_length")
# Attributes that modelling code reads although the class of the config does not declare them.
_UNDECLARED = {"qwen3_moe": ("head_dim",)}
# Keys of RoPE that `_rope` reads.
_ROPE = (
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
# Each is read if it is there: into long RoPE, or into the RoPE of Llama 3.
_ROPE_TENSORS = ("rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight")
# Keys that change nothing, or nothing if they have this value. Tensors decide about parallel residuals, as in
# llama.cpp: converters write True for models whose config has no such key.
_HARMLESS = (
    "pooling_type",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "use_parallel_residual",
)
_NEUTRAL = {
    "attention.causal": True,
    "expert_gating_func": 1,  # softmax
    "expert_weights_scale": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}
# Number of layers of the models whose queries are scaled by the mean width of a head; see llama.cpp's gemma2.cpp.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
# RoPE of Llama 3.1 to 3.3. Their files contain the divisor of each frequency instead of these numbers.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_INSTEAD = "pass the model's directory with config.json and safetensors"


class GgufTensor(Protocol):
    """Part of `gguf.ReaderTensor`."""

    name: str
    data: NDArray[Any]


def read_config(path: Path, metadata: Mapping[str, Any], tensors: list[GgufTensor]) -> Any:
    """Return transformers' config of the model in a GGUF file.

    Args:
        path: The file.
        metadata: All keys and values of the file.
        tensors: All tensors of the file.

    Raises:
        ConfigInvalid: The file has a key or a tensor that neither transformers nor this module can read.
    """
    architecture = metadata["general.architecture"]
    _check_kind(path, metadata)
    facts, _ = PreTrainedConfig.get_config_dict(path.parent, gguf_file=path.name)
    keys = _Keys(path, architecture, metadata)
    small = {name: each for each in tensors if (name := each.name) in _ROPE_TENSORS}
    config = _config(keys, facts, {name: each.data.tolist() for name, each in small.items()})
    keys.refuse_unread()
    _check_values(keys, config)
    _check_model(keys, config, [each.name for each in tensors])
    return config


def _check_kind(path: Path, metadata: Mapping[str, Any]) -> None:
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ConfigInvalid(
            f"{path} is not a model but of general.type {kind}: pass the GGUF file of the language model"
        )
    if (count := metadata.get("split.count", 1)) > 1:
        raise ConfigInvalid(
            f"{path} is one of {count} parts of a model (split.count): join them with llama-gguf-split --merge, and "
            "pass the result"
        )
    architecture = metadata["general.architecture"]
    if architecture not in ARCHITECTURES:
        raise ConfigInvalid(
            f"{path} has general.architecture {architecture}, which is not read from GGUF files "
            f"({', '.join(ARCHITECTURES)} are): {_INSTEAD}"
        )
    if architecture == "llama" and (experts := metadata.get("llama.expert_count", 0)) > 0:
        raise ConfigInvalid(
            f"{path} is a Mixtral model (llama.expert_count = {experts}), which is not read from GGUF files: {_INSTEAD}"
        )
    # Without the last, transformers does not restore the order of rows in the projections of Llama.
    required = (*_REQUIRED, *(["attention.head_count_kv"] if architecture == "llama" else []))
    if absent := [key for key in required if f"{architecture}.{key}" not in metadata]:
        raise ConfigInvalid(f"{path} has no {architecture}.{absent[0]}: {_INSTEAD}")


class _Keys:
    """The keys of a file's architecture. Each must be read, else `refuse_unread` raises."""

    def __init__(self, path: Path, architecture: str, metadata: Mapping[str, Any]) -> None:
        prefix = f"{architecture}."
        self.path, self.architecture = path, architecture
        self.values = {
            key.removeprefix(prefix): _scalar(value)
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
        self.is_read = {*_HARMLESS}

    def get(self, key: str, default: Any = None) -> Any:
        self.is_read.add(key)
        return self.values.get(key, default)

    def refusal(self, key: str, why: str = "") -> ConfigInvalid:
        name, value = f"{self.architecture}.{key}", self.values[key]
        # Files have numbers of 32 bits.
        shown = f"{value:.6g}" if isinstance(value, float) else value
        return ConfigInvalid(
            f"{self.path} has {name} = {shown}, which cannot be read{why}: {_INSTEAD}"
        )

    def refuse_unread(self) -> None:
        for key, value in self.values.items():
            # llama.cpp writes and reads 0 for features that a model does not have.
            is_absent = value == 0 and key not in _NEUTRAL
            if key not in self.is_read and not is_absent and value != _NEUTRAL.get(key):
                raise self.refusal(key)


def _scalar(value: Any) -> Any:
    """Return the value of a key; the common value if it has one for each layer."""
    return value[0] if isinstance(value, list) and len({*value}) == 1 else value


def _config(keys: _Keys, facts: dict[str, Any], rope_tensors: Mapping[str, list[float]]) -> Any:
    """Return the config: transformers' reading of the file in `facts`, and what this module reads in addition."""
    kind = facts["model_type"]
    blank = AutoConfig.for_model(kind)
    names = {each.name for each in fields(type(blank))} | {*_UNDECLARED.get(kind, ())}
    names |= blank.attribute_map.keys()
    # A class may have ids of its own model as defaults.
    ids = [f"{name}_token_id" for name in ("bos", "eos", "pad")]
    read: dict[str, Any] = {name: facts.get(name) for name in ids}
    for key in _ATTRIBUTES.keys() & keys.values.keys():
        own = [name for name in _ATTRIBUTES[key] if name in names]
        if isinstance(keys.values[key], list):
            raise keys.refusal(key, " because layers differ")
        if own:
            read[own[0]] = keys.get(key)
    if "head_dim" in names and "head_dim" not in read:
        # transformers takes `rope.dimension_count` for it.
        read["head_dim"] = read["hidden_size"] // read["num_attention_heads"]
    if "num_key_value_heads" in names:
        read.setdefault("num_key_value_heads", read["num_attention_heads"])
    read |= _window(keys, names, kind)
    shape = AutoConfig.for_model(**facts | read)
    if hasattr(blank, "rope_parameters"):
        read |= _rope(keys, shape, rope_tensors)
    if keys.architecture in _GEMMA_27B_LAYERS:
        is_27b = shape.num_hidden_layers == _GEMMA_27B_LAYERS[keys.architecture]
        width = shape.hidden_size // shape.num_attention_heads if is_27b else shape.head_dim
        read["query_pre_attn_scalar"] = width
    return AutoConfig.for_model(**facts | read)


def _window(keys: _Keys, names: set[str], kind: str) -> dict[str, Any]:
    """Return the window of attention. A window of 0, or at least as long as the context, means no window."""
    window = keys.get("attention.sliding_window", 0)
    if window >= keys.get("context_length"):
        window = keys.values["attention.sliding_window"] = 0
    if window and "sliding_window" not in names:
        raise keys.refusal("attention.sliding_window")
    if kind == "gemma3_text" and not window:
        return {"layer_types": ["full_attention"] * keys.get("block_count")}
    return {"sliding_window": window or None} if "sliding_window" in names else {}


def _check_values(keys: _Keys, config: Any) -> None:
    """Raise ConfigInvalid if the config does not have the values of the file."""
    for key in _ATTRIBUTES.keys() & keys.values.keys():
        expected = keys.values[key]
        names = [name for name in _ATTRIBUTES[key] if hasattr(config, name)]
        found: Any = getattr(config, names[0]) if names else None
        if key in ("attention.key_length", "attention.value_length"):
            found = head_dim(config)
        elif key == "attention.head_count_kv":
            found = getattr(config, "num_key_value_heads", config.num_attention_heads)
        if expected not in (0, found):
            raise keys.refusal(key, f" ({type(config).__name__} has {found})")


# ── RoPE ─────────────────────────────────────────────────────────────────────────────────────────


def _rope(keys: _Keys, config: Any, tensors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return `rope_parameters`, and what belongs to them, of a model with the sizes of `config`."""
    for key in _ROPE:
        keys.get(key)
    own: dict[str, Any] = config.rope_parameters
    is_nested = "full_attention" in own
    rope: dict[str, Any] = {"rope_theta": keys.get("rope.freq_base", 10_000.0)}
    rope |= _scaling(keys, tensors)
    default = own["full_attention"] if is_nested else own
    part = keys.get("rope.dimension_count", head_dim(config)) / head_dim(config)
    if part != default.get("partial_rotary_factor", 1.0):
        rope["partial_rotary_factor"] = part
    if divisors := tensors.get("rope_freqs.weight"):
        rope |= _llama3(keys, config, rope, divisors)
    read: dict[str, Any] = {"rope_parameters": rope}
    local_theta = keys.get("rope.freq_base_swa", 10_000.0)
    if is_nested:
        local = {"rope_type": "default", "rope_theta": local_theta}
        read["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    elif keys.values.get("rope.freq_base_swa", rope["rope_theta"]) != rope["rope_theta"]:
        raise keys.refusal("rope.freq_base_swa")
    if "original_max_position_embeddings" in rope and hasattr(
        config, "original_max_position_embeddings"
    ):
        read["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return read


def _scaling(keys: _Keys, tensors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the parameters that scale RoPE: linear, YaRN or LongRoPE."""
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    original = keys.get("rope.scaling.original_context_length")
    attention = keys.get("rope.scaling.attn_factor", 1.0)
    # Files without a type mean linear scaling.
    kind = keys.get("rope.scaling.type", "linear")
    short, long = (tensors.get(f"rope_factors_{size}.weight") for size in ("short", "long"))
    if short and long and original:
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
            "attention_factor": attention,
        }
    if short or long:
        raise ConfigInvalid(
            f"{keys.path} has only some of rope_factors_long.weight, rope_factors_short.weight and "
            f"{keys.architecture}.rope.scaling.original_context_length: {_INSTEAD}"
        )
    if kind not in ("none", "linear", "yarn"):
        raise keys.refusal("rope.scaling.type")
    if attention != 1.0:
        raise keys.refusal("rope.scaling.attn_factor")
    if kind == "yarn":
        optional = {
            "attention_factor": keys.get("rope.scaling.yarn_attn_factor"),
            "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
        }
        if not original:
            raise keys.refusal("rope.scaling.type", " without rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            **{name: value for name, value in optional.items() if value is not None},
        }
    is_linear = kind == "linear" and factor != 1.0
    return {"rope_type": "linear", "factor": factor} if is_linear else {"rope_type": "default"}


def _llama3(
    keys: _Keys, config: Any, rope: dict[str, Any], divisors: list[float]
) -> dict[str, Any]:
    """Return the parameters of Llama 3's RoPE that give these divisors of the frequencies."""
    scaled = {**rope, **_LLAMA3, "factor": max(divisors)}
    config = AutoConfig.for_model(**config.to_dict() | {"rope_parameters": scaled})
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(len(divisors)) / len(divisors))
    if len(frequencies) != len(divisors) or not torch.allclose(
        plain / frequencies, torch.tensor(divisors), rtol=1e-4
    ):
        raise ConfigInvalid(
            f"{keys.path} has rope_freqs.weight with divisors other than those of Llama 3, which cannot be read: "
            f"{_INSTEAD}"
        )
    return scaled


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────


def _check_model(keys: _Keys, config: Any, names: list[str]) -> None:
    """Raise ConfigInvalid if the model has no place for a tensor, or applies RoPE to a different number of dimensions."""
    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(config)
    kind = type(skeleton).__name__
    processor = TENSOR_PROCESSORS.get(keys.architecture, TensorProcessor)(config=config.to_dict())
    known = {*get_gguf_hf_weights_map(skeleton, processor), *_ROPE_TENSORS}
    # Experts are single tensors of the model, whose names have no `.weight`.
    if unread := [name for name in names if not known & {name, name.removesuffix(".weight")}]:
        raise ConfigInvalid(
            f"{keys.path} has tensors that {kind} does not have ({some(unread)}): {_INSTEAD}"
        )
    for name, frequencies in skeleton.named_buffers():
        found = 2 * frequencies.numel()
        if name.endswith("inv_freq") and found != keys.values.get("rope.dimension_count", found):
            raise keys.refusal("rope.dimension_count", f" ({kind} has {found})")
