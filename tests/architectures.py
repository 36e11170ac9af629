"""A tiny seeded model of every architecture that transformers maps to a causal language model.

A case is one configuration: `CASES` has one for each `model_type` of transformers' own mapping, made small by
rules that hold for all (`SIZES`, `_layer_types`), with what an architecture needs beyond them in `SPECIAL`; and
`VARIANTS`, which are configurations of such an architecture that compute attention in another way.

Weights are drawn anew after transformers has made the model: its own are zeros, ones and noise so small that
logits are nearly equal, and a sink, a bias or a window that is lost would not be seen.
"""

import dataclasses
import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 320
CONTEXT_LENGTH = 512
NOTHING = VOCAB_SIZE - 1  # bos, eos and pad: eos is never reached, since its logit is not looked at

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Shorter than the prompts, so that they matter.
    "sliding_window": 24,
    "attention_chunk_size": 24,
    # Mixtures of experts.
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # Latent attention: v is as wide as neither half of q and k.
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    # Decoders of two parts, and encoders.
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "is_decoder": True,
    "is_encoder_decoder": False,
}

_INDEXED = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
_MAMBA = {"mamba_d_state": 16, "mamba_chunk_size": 16}
_DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_KDA = {"linear_head_dim": 16, "linear_num_heads": 4}
_GEMMA_MIX = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

# What an architecture needs beyond `SIZES`.
SPECIAL: dict[str, dict[str, Any]] = {
    "axk2": _INDEXED,
    "bailing_hybrid": _KDA | {"layer_group_size": 2},
    "bamba": _MAMBA | {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "blt": {},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "cpmant": {"dim_head": 16, "dim_ff": 96, "prompt_length": 8},
    "ctrl": {"dff": 96},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 4.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v32": _INDEXED,
    "deepseek_v4": {
        "layer_types": None,
        "mlp_layer_types": None,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_topk": 4,
        "index_head_dim": 16,
        "index_n_heads": 2,
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": _INDEXED,
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64, "mamba_n_heads": 8},
    "gemma3n_text": {
        "layer_types": _GEMMA_MIX,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "layer_types": _GEMMA_MIX,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
    },
    "glm_moe_dsa": _INDEXED,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 24},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": _MAMBA
    | {
        "mamba_n_heads": 8,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "shared_intermediate_size": 48,
    },
    "helium": {"head_dim": 16},
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "rel_extent": 32,
        "log_scaling_n_floor": 16,
    },
    "inkling2_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "rel_extent": 32,
        "log_scaling_n_floor": 16,
        "unpadded_vocab_size": VOCAB_SIZE,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4, "mamba_d_state": 8},
    "kimi_linear": _KDA,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 48,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "num_layers": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "minimax_m3_vl_text": {
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 48,
        "rotary_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "moshi": {"ffn_dim": 96},
    "nemotron_h": {},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "qwen4_exp_text": _DELTA
    | {
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "axial_pos_shape": (16, 32),
        "axial_pos_embds_dim": (16, 48),
        "attention_head_size": 16,
        "feed_forward_size": 96,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
        "pronunciation_vocab_size": 32,
        "shape_vocab_size": 32,
    },
    "xlnet": {"d_inner": 96, "n_head": 4, "d_model": 64, "d_head": 16},
    "xlstm": {"num_heads": 4, "num_blocks": 3},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"n_mamba_heads": 8, "mamba_d_state": 16, "chunk_size": 16, "adapter_rank": 8},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def causal_lm_types() -> list[str]:
    """Return every `model_type` that transformers maps to a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **more: Any) -> PreTrainedConfig:
    """Return the configuration of a tiny model."""
    return _shrunk(CONFIG_MAPPING[model_type], more)


def _shrunk(cls: type[PreTrainedConfig], more: Mapping[str, Any]) -> PreTrainedConfig:
    names = _settings(cls)
    default = _default(cls)
    settings = {name: value for name, value in SIZES.items() if name in names}
    if "kv_lora_rank" in names:  # latent attention has a K and a V of each head
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    elif "head_dim" in names:
        settings["head_dim"] = 32
    for name in cls.sub_configs:
        sub = getattr(default, name, None)
        if isinstance(sub, PreTrainedConfig):
            settings[name] = _shrunk(type(sub), {})
    kinds = {
        name: list(dict.fromkeys(getattr(default, name, None) or ()))
        for name in ("layer_types", "mlp_layer_types")
        if name in names and not isinstance(getattr(cls, cls.attribute_map.get(name, name), None), property)
    }
    if any(kinds.values()):
        settings["num_hidden_layers"] = 4
        settings |= {name: (each * 4)[:4] for name, each in kinds.items() if each}
    settings |= SPECIAL.get(cls.model_type, {})
    settings |= more
    return cls(**settings)


def _settings(cls: type[PreTrainedConfig]) -> set[str]:
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return fields | set(inspect.signature(cls.__init__).parameters) | set(cls.attribute_map)


def _default(cls: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    try:
        return cls()
    except Exception:
        return None


def tiny_model(config: PreTrainedConfig, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    redraw(model, seed)
    return model


def redraw(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.state_dict(keep_vars=True).items():
            if not p.is_floating_point() or not p.numel():
                continue
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() >= 2:
                p.copy_(noise * 0.3)
            else:
                p.add_(noise * 0.2)
