"""Tiny random models as GGUF files with the keys and tensors that llama.cpp's converter writes."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NUM_LAYERS, HIDDEN, FEED_FORWARD, VOCAB_SIZE = 2, 64, 96, 300
# Architectures that differ from the model_type.
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
KEYS = {
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.value_length": ("head_dim",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "expert_count": ("num_experts",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_used_count": ("num_experts_per_tok",),
    "feed_forward_length": ("intermediate_size",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
# Kinds whose sliding windows the converter writes.
WINDOWS = ("gemma2", "gemma3_text", "phi3")


def tensors() -> dict[str, np.ndarray]:
    """Return the tensors of `write_gguf`. Their float32 values have no exact smaller type."""
    random = np.random.default_rng(0)
    square, wide, tall = (HIDDEN, HIDDEN), (FEED_FORWARD, HIDDEN), (HIDDEN, FEED_FORWARD)
    layer = {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), square),
        **dict.fromkeys(("ffn_gate", "ffn_up"), wide),
        "ffn_down": tall,
        **dict.fromkeys(("attn_norm", "ffn_norm"), (HIDDEN,)),
    }
    shapes = {f"blk.{i}.{name}": shape for i in range(NUM_LAYERS) for name, shape in layer.items()}
    shapes |= {
        "token_embd": (VOCAB_SIZE, HIDDEN),
        "output": (VOCAB_SIZE, HIDDEN),
        "output_norm": (HIDDEN,),
    }
    return {
        f"{name}.weight": random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(path: Path, without: str = "", keys: dict[str, Any] | None = None) -> Path:
    """Write a Llama without the tensor `without`, and with other keys, None for none; return the path."""
    own = {
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": NUM_LAYERS,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": VOCAB_SIZE,
    }
    kept = {name: tensor for name, tensor in tensors().items() if name != without}
    return _write(path, "llama", own | vocabulary(VOCAB_SIZE) | (keys or {}), kept)


def export_gguf(
    path: Path,
    model: Any,
    keys: dict[str, Any] | None = None,
    arrays: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a transformers model, with additional keys and tensors; return the path."""
    config = model.config
    kind = config.model_type
    architecture = ARCHITECTURES.get(kind, kind)
    own = {
        key: value
        for key, names in KEYS.items()
        for name in names
        if (value := getattr(config, name, None)) is not None
    }
    if kind == "gpt2":
        own["feed_forward_length"] = 4 * config.n_embd
    else:
        own |= _rope_keys(config)
    if kind == "nemotron":
        own["attention.layer_norm_epsilon"] = config.norm_eps
        own["attention.layer_norm_rms_epsilon"] = config.norm_eps
    if kind == "stablelm":
        own["use_parallel_residual"] = True
    if kind in WINDOWS:
        has_none = {*getattr(config, "layer_types", [])} == {"full_attention"}
        own["attention.sliding_window"] = 0 if has_none else config.sliding_window or 0
    prefixed = {f"{architecture}.{key}": value for key, value in own.items()}
    found = dict(_tensors(model, architecture)) | dict(_rope_tensors(config)) | (arrays or {})
    all_keys = prefixed | vocabulary(config.vocab_size) | (keys or {})
    return _write(path, architecture, all_keys, found)


def vocabulary(size: int) -> dict[str, Any]:
    """Return the keys of a byte-level tokenizer."""
    letters = [chr(0x100 + i) for i in range(size - 1)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*letters, letters[0] + letters[1]],
        "tokenizer.ggml.token_type": [int(gguf.TokenType.NORMAL)] * size,
        "tokenizer.ggml.merges": [f"{letters[0]} {letters[1]}"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _write(
    path: Path, architecture: str, keys: dict[str, Any], arrays: dict[str, np.ndarray]
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        if value is not None:
            kinds[type(value)](key, value)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rope_keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = {
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(rope.get("partial_rotary_factor", 1) * head),
    }
    original = rope.get("original_max_position_embeddings")
    match rope["rope_type"]:
        case "linear" | "yarn" as kind:
            keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
            if original:
                keys["rope.scaling.original_context_length"] = original
        case "longrope":
            scale = config.max_position_embeddings / original
            factor = math.sqrt(1 + math.log(scale) / math.log(original))
            keys["rope.scaling.attn_factor"] = factor
            keys["rope.scaling.original_context_length"] = original
    local = config.rope_parameters.get("sliding_attention")
    return keys | ({"rope.freq_base_swa": float(local["rope_theta"])} if local else {})


def _rope_tensors(config: Any) -> Iterator[tuple[str, np.ndarray]]:
    rope = getattr(config, "rope_parameters", None) or {}
    for size in ("long", "short"):
        if factors := rope.get(f"{size}_factor"):
            yield f"rope_factors_{size}.weight", np.array(factors, np.float32)
    if rope.get("rope_type") == "llama3":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        waves = [2 * math.pi * rope["rope_theta"] ** (i / size) for i in range(0, size, 2)]
        yield (
            "rope_freqs.weight",
            np.array([_divisor(wave, rope) for wave in waves], np.float32),
        )


def _divisor(wave: float, rope: dict[str, Any]) -> float:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / wave
    part = min(max((turns - low) / (high - low), 0), 1)
    return 1 / ((1 - part) / rope["factor"] + part)


def _tensors(model: Any, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    config = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, tensor in state.items():
        array = tensor.float().numpy()
        if name.endswith("gate_up_proj") and array.ndim == 3:
            base = name.removesuffix("gate_up_proj")
            for part, half in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
                yield names.get_name(f"{base}{part}_proj") + ".weight", half
            continue
        whole = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        found = names.get_name(whole, try_suffixes=(".weight", ".bias"))
        assert found, name
        yield found, _changed(array, name, config, architecture)


def _changed(array: np.ndarray, name: str, config: Any, architecture: str) -> np.ndarray:
    if architecture in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return array + 1
    if architecture == "gpt2" and name.endswith(("attn.weight", "proj.weight", "fc.weight")):
        return array.T
    if name.endswith("shared_expert_gate.weight"):
        return array[0]
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = array.reshape(heads, 2, -1, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)
    return array
