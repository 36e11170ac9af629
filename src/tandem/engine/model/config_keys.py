"""Checks what config.json says against the code that reads it.

transformers keeps keys that no code reads, and computes without them. This module rejects such a key if it would
change the logits, and reports, by key, values that transformers rejects with an error that names none.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tandem.engine.attention.paged import not_served, text_config_of
from tandem.engine.shape import head_dim
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid

log = get_logger(__name__)

# Keys that change the logits of models that have them. Keys of biases and of norms are not here: models that always have
# them do not read such keys, and a tensor without a place in the model is rejected by `check_complete`.
_CHANGING = re.compile(
    r"alibi|use_alibi|attention_chunk_size|attention_multiplier|attn_temperature_tuning|clip_qkv|embedding_multiplier"
    r"|\w*softcap\w*|head_dim|layer_types|logit_scale|logits_scaling|lm_head_multiplier|no_rope_\w+|parallel_attn"
    r"|partial_rotary_factor|query_pre_attn_scalar|residual_multiplier|rope_local_base_freq|rope_parameters|rope_ratio"
    r"|rope_scaling|rope_theta|rotary_(dim|emb_base|pct)|scale_(depth|emb)|sliding_window|sliding_window_pattern"
    r"|use_parallel_residual"
)
# Keys that describe files, training and generation.
_HARMLESS = re.compile(
    r"_\w*|architectures|auto_map|torch_dtype|dtype|transformers\W\w+|transformers_\w+|unsloth_\w+|quantization\w*"
    r"|\w*token(_id|izer\w*|s)?|\w*(dropout|pdrop|coef|loss\w*|init\w*)|use_cache|output_\w+|tie_\w+|task_specific_params"
)
_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def check_values(path: Path, facts: Mapping[str, Any]) -> None:
    """Raise ConfigInvalid if config.json has a value for which transformers raises an error without its key."""
    kind, dtype = facts.get("model_type"), facts.get("dtype", facts.get("torch_dtype"))
    wrong = [
        f"{name} = {facts[name]}, which must be at least 1"
        for name in _SIZES
        if type(facts.get(name)) is int and facts[name] < 1
    ]
    if not isinstance(kind, str):
        wrong.append("no model_type" if kind is None else f"model_type = {kind!r}")
    if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
        wrong.append(f"dtype = {dtype}, which torch does not have")
    _refuse(path, wrong)


def _refuse(path: Path, wrong: Sequence[str]) -> None:
    if wrong:
        raise ConfigInvalid(
            f"cannot load the model in {path}: config.json has {wrong[0]}: correct it, or use a different model"
        )


def check_config(path: Path, facts: Mapping[str, Any], hf_config: Any) -> None:
    """Raise ConfigInvalid if a config is of a kind, or has a value or a key, that is not computed.

    Args:
        facts: The content of config.json.
        hf_config: What transformers made of it.
    """
    text = text_config_of(hf_config)
    if not type(hf_config).__module__.startswith("transformers."):
        return  # a class of the model's own code, which is not searched
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        parts = ", ".join(name for name in hf_config.sub_configs if getattr(hf_config, name, None))
        made_of = f": it is made of {parts}" if parts else ""
        raise not_served(hf_config.model_type, f"it is not a language model{made_of}")
    _refuse(path, [*_unknown_names(text)])
    own = facts.get("text_config")
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    unread = _unread(facts, hf_config, model)
    unread |= _unread(own, text, model) if isinstance(own, dict) else {}
    for name, value in unread.items():
        if _CHANGING.fullmatch(name) and _is_active(name, value, unread, text):
            raise ConfigInvalid(
                f"cannot load the model in {path}: config.json has {name} = {value!r}, which the code of "
                f"{text.model_type} does not read: set the model_type that the model was made for"
            )
    others = sorted(
        name
        for name, value in unread.items()
        if value not in (None, False) and not _HARMLESS.fullmatch(name)
    )
    if others:
        log.warning(
            "checkpoint.unread_config_keys", path=str(path), keys=others, effect="has no effect"
        )


def _unknown_names(text: Any) -> Iterator[str]:
    """Yield the keys whose values are names that transformers does not have."""
    for name in _ACTIVATIONS:
        value = getattr(text, name, None)
        if isinstance(value, str) and value not in ACT2FN:
            yield f"{name} = {value}, which transformers does not have"
    rope = getattr(text, "rope_parameters", None) or {}
    known = {"default", "axial", *ROPE_INIT_FUNCTIONS}
    for each in (rope, *rope.values()):
        kind = each.get("rope_type") if isinstance(each, dict) else None
        if isinstance(kind, str) and kind not in known:
            yield f"rope_type = {kind}, which transformers does not have"


def _unread(facts: Mapping[str, Any], config: Any, model: type) -> dict[str, Any]:
    """Return the keys that neither the class of the config nor the code of the model mentions."""
    declared = {each.name for each in fields(type(config))} | config.attribute_map.keys()
    modules = {each.__module__ for each in (*type(config).__mro__, model)}
    sources = (
        inspect.getsource(sys.modules[name])
        for name in modules
        if name.startswith("transformers.models.")
    )
    read = declared | {*re.findall(r"\w+", "".join(sources))}
    # transformers sets the attribute if config.json has `rope_scaling`, even for models without RoPE.
    if hasattr(config, "rope_parameters") and "rope_parameters" in read:
        read |= {"rope_scaling", "rope_theta"}
    return {name: facts[name] for name in facts.keys() - read}


def _is_active(name: str, value: Any, others: Mapping[str, Any], text: Any) -> bool:
    """Return whether the value of a key that is not read changes the logits."""
    if not value:
        return False
    if isinstance(value, list):
        return not _is_alike(value)
    if isinstance(value, dict):
        return "rope_theta" in value or not _is_unscaled(value)
    if name == "sliding_window":
        longest = getattr(text, "max_position_embeddings", 0)
        return isinstance(value, int) and 0 < value < longest and not _is_unwindowed(others, text)
    return value is True or any(value != each for each in _neutral(name, text))


def _is_alike(layers: Sequence[Any]) -> bool:
    """Return whether each layer of `layer_types` has full attention, or each of `no_rope_layers` has RoPE."""
    return all(each in ("full_attention", 1) for each in layers)


def _is_unscaled(rope: Mapping[str, Any]) -> bool:
    kind = rope.get("rope_type") or rope.get("type")
    return kind == "default" or (kind == "linear" and rope.get("factor") == 1)


def _is_unwindowed(others: Mapping[str, Any], text: Any) -> bool:
    """Return whether other keys switch off `sliding_window` in all layers."""
    first = others.get("max_window_layers")
    layers = others.get("layer_types")
    return (
        others.get("use_sliding_window") is False
        or (isinstance(first, int) and first >= text.num_hidden_layers)
        or (isinstance(layers, list) and _is_alike(layers))
    )


def _neutral(name: str, text: Any) -> list[Any]:
    """Return the value of a key with which its model computes as `text` does; one for each kind of RoPE."""
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [each for each in (rope, *rope.values()) if isinstance(each, dict)]
    ropes = [each for each in ropes if "rope_theta" in each]
    parts = [each.get("partial_rotary_factor", 1.0) for each in ropes]
    neutral: list[Any]
    match name:
        case "attention_multiplier":
            neutral = [head_dim(text) ** -0.5]
        case "head_dim" | "query_pre_attn_scalar":
            neutral = [head_dim(text)]
        case "rope_local_base_freq" | "rope_theta" | "rotary_emb_base":
            neutral = [each["rope_theta"] for each in ropes] or [None]
        case "rotary_dim":
            neutral = [part * head_dim(text) for part in parts] or [None]
        case "rotary_pct":
            neutral = parts or [1.0]
        case "scale_depth":
            neutral = [text.num_hidden_layers**0.5]
        case _:
            neutral = [1]
    return neutral
