"""A tiny seeded model of every architecture that transformers maps to a causal language model.

`cases()` has one case for each `model_type` of transformers' own mapping, made small by rules that hold for all
(`SIZES`, `_shrunk`), with what an architecture needs beyond them in `SPECIAL`; then come `VARIANTS`, configurations
that compute attention in another way than the first of their type.

Weights are drawn anew after transformers has made a model: its own are zeros, ones and noise so small that logits
are nearly equal, and a sink, a bias or a router that is lost would not be seen.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 320
CONTEXT_LENGTH = 512

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
    # Tied, the scaled embeddings of some outweigh their layers: each token would predict itself.
    "tie_word_embeddings": False,
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
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # Latent attention: V is as wide as neither part of Q and K, nor as both together.
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    # Encoders with decoders.
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
}

_INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
_MAMBA = {"mamba_d_state": 16, "mamba_chunk_size": 16, "mamba_n_heads": 8}
_DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_KDA = {"linear_head_dim": 16, "linear_num_heads": 4}
_CONVOLUTIONS = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_INKLING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "rel_extent": 32,
    "log_scaling_n_floor": 16,
}
_GEMMA4 = {"layer_types": _WINDOWS, "global_head_dim": 48}
_GEMMA4_INPUTS = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8}
_ASSISTANT = {
    "backbone_hidden_size": 64,
    "text_config": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "global_head_dim": 48,
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": 0,
        "hidden_size_per_layer_input": 0,
    },
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# What an architecture, or a part of one, needs beyond `SIZES`.
SPECIAL: dict[str, dict[str, Any]] = {
    "axk2": _INDEXER,
    "bailing_hybrid": _KDA | {"layer_group_size": 2},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 100, "encoder_hash_byte_group_size": [3, 4]},
    "blt_global_transformer": {"hidden_size": 128},
    "blt_local_decoder": {"hidden_size_global": 128},
    "blt_local_encoder": {"hidden_size_global": 128},
    "codegen": {"rotary_dim": 8},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "cohere2_moe": {"logit_scale": 1.0},
    "cohere_compass_text": {
        "num_hidden_layers": 4,
        "layer_types": _WINDOWS,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": None},
    },
    "cpmant": {"dim_head": 16, "dim_ff": 96, "prompt_length": 8},
    "ctrl": {"dff": 96},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 4.0},
        "ffn_config": {
            "hidden_size": 64,
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "deepseek_v32": _INDEXER,
    "deepseek_v4": _INDEXER
    | {
        "layer_types": None,
        "mlp_layer_types": None,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
    },
    "dots1": {"n_shared_experts": 1, "layer_types": _WINDOWS},
    "dots3_note_text": _INDEXER
    | {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 24,
        "swa_v_head_dim": 20,
        "shared_experts_intermediate_size": 48,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "doge": {"keep_window_size": 16},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "gemma3n_text": _GEMMA4_INPUTS
    | {
        "layer_types": _WINDOWS,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": _GEMMA4 | _GEMMA4_INPUTS,
    "gemma4_unified_text": _GEMMA4,
    "glm_moe_dsa": _INDEXER,
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "gpt_neo": {
        "attention_types": [[["global", "local"], 2]],
        "num_hidden_layers": 4,
        "window_size": 24,
    },
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": _MAMBA
    | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 48},
    "helium": {"head_dim": 16},
    "hy_v4": _INDEXER,
    "inkling2_text": _INKLING | {"unpadded_vocab_size": VOCAB_SIZE},
    "inkling_text": _INKLING,
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_hidden_layers": 4,
        "mamba_d_state": 8,
    },
    "kimi_linear": _KDA,
    "laguna": {"layer_types": _WINDOWS},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS | {"num_dense_layers": 1},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2, "head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "mellum": {"layer_types": _WINDOWS},
    "minimax_m3_vl_text": _INDEXER
    | {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 48,
        "rotary_dim": 8,
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "mllama_text_model": {"cross_attention_layers": [1]},
    "modernbert-decoder": {"local_attention": 48},
    "moshi": {"ffn_dim": 96},
    "nemotron_h": {"ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16},
    "phi4_multimodal_audio": {
        "num_blocks": 1,
        "ext_pw_out_channel": 64,
        "depthwise_separable_out_channel": 64,
        "nemo_conv_channels": 16,
    },
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "qwen4_exp_text": _DELTA
    | {
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "is_decoder": True,
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
    "xlnet": {"d_inner": 96, "n_head": 4, "d_head": 16},
    "xlstm": {"num_heads": 4, "num_blocks": 3, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"n_mamba_heads": 8, "mamba_d_state": 16, "chunk_size": 16, "adapter_rank": 8},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


# Whose first seed makes a model with two logits that nearly tie.
SEEDS: dict[str, int] = {}

# Of which transformers makes no model from the configuration alone: they are tried without weights.
CONFIG_ONLY = {
    "gemma3n": "its image tower needs timm and Pillow",
    "gemma4_assistant": "it drafts for another model",
    "gemma4_unified_assistant": "it drafts for another model",
    "musicgen": "transformers maps it to the decoder, and gives that the configuration of the whole",
    "musicgen_melody": "transformers maps it to the decoder, and gives that the configuration of the whole",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration.

    Attributes:
        name: The `model_type`, and in a variant what is different.
        settings: Of the configuration, beyond `SIZES` and `SPECIAL`.
    """

    model_type: str
    variant: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tests and documentation call it."""
        return f"{self.model_type}, {self.variant}" if self.variant else self.model_type

    def config(self) -> PreTrainedConfig:
        """Return the configuration of the tiny model."""
        return _shrunk(CONFIG_MAPPING[self.model_type], self.settings)


_ORIGINALLY = {"original_max_position_embeddings": 48}  # fewer than the longest prompt has
_BEFORE_LONG = {"original_max_position_embeddings": 96}  # where a context of LongRoPE ends here


def _scaled_rope(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": _ROPE | {"rope_type": rope_type, "factor": 4.0} | more}


def _long_rope(rotary_dim: int) -> dict[str, Any]:
    factors = [1.0 + index / 4 for index in range(rotary_dim // 2)]
    short = [1.0] * len(factors)
    scaled = _scaled_rope("longrope", **_BEFORE_LONG, short_factor=short, long_factor=factors)
    return scaled | _BEFORE_LONG


VARIANTS = (
    Case("bert", "as a decoder", {"is_decoder": True}),
    Case("bloom", "slow but exact", {"slow_but_exact": True, "pretraining_tp": 1}),
    Case("cohere", "query-key norm", {"use_qk_norm": True}),
    Case("deepseek_v2", "plain queries", {"q_lora_rank": None}),
    Case("deepseek_v3", "values as wide as keys", {"v_head_dim": 24}),
    Case(
        "deepseek_v3",
        "YaRN",
        _scaled_rope("yarn", **_ORIGINALLY, mscale=1.0, mscale_all_dim=0.8),
    ),
    Case("exaone4", "no window", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    Case("falcon", "ALiBi", {"alibi": True}),
    Case("falcon", "several KV heads", {"new_decoder_architecture": True}),
    Case("gemma2", "soft cap of 5", {"attn_logit_softcapping": 5.0}),
    Case("gemma3_text", "both directions", {"use_bidirectional_attention": True}),
    Case("gemma3n_text", "no shared KV", {"num_kv_shared_layers": 0}),
    Case("gemma4_text", "shared KV", {"num_kv_shared_layers": 2}),
    Case(
        "gemma4_text",
        "keys as values",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    Case(
        "gemma4_text",
        "experts",
        {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0},
    ),
    Case("gpt2", "scores by layer", {"scale_attn_by_inverse_layer_idx": True}),
    Case("gpt_bigcode", "several KV heads", {"multi_query": False}),
    Case("gpt_oss", "full attention only", {"layer_types": ["full_attention"] * 4}),
    Case(
        "granitemoehybrid",
        "attention only",
        {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"},
    ),
    Case("laguna", "heads by layer", {"num_attention_heads_per_layer": [4, 8, 4, 8]}),
    Case(
        "llama",
        "biases",
        {"attention_bias": True, "mlp_bias": True},
    ),
    Case("llama", "linear RoPE scaling", _scaled_rope("linear")),
    Case("llama", "dynamic RoPE", _scaled_rope("dynamic")),
    Case("llama", "YaRN", _scaled_rope("yarn", **_ORIGINALLY)),
    Case(
        "llama",
        "Llama 3 RoPE",
        _scaled_rope("llama3", **_ORIGINALLY, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    Case("llama", "long RoPE", _long_rope(32)),
    Case(
        "llama4_text",
        "temperature tuning",
        {"attn_temperature_tuning": True, "floor_scale": 8, "no_rope_layers": [1, 0, 1, 0]},
    ),
    Case("mistral", "no window", {"sliding_window": None}),
    Case("mpt", "no ALiBi", {"attn_config": {"alibi": False}}),
    Case("olmo", "clipped", {"clip_qkv": 1.0}),
    Case("phi", "query-key norm", {"qk_layernorm": True}),
    Case("phi3", "long RoPE", _long_rope(16)),
    Case("phi3", "no window", {"sliding_window": None}),
    Case("phi3", "partial RoPE", {"partial_rotary_factor": 0.5}),
    Case("qwen2", "windows in later layers", {"use_sliding_window": True, "layer_types": _WINDOWS}),
    Case("qwen2_moe", "windows", {"use_sliding_window": True, "layer_types": _WINDOWS}),
    Case("qwen3", "windows", {"use_sliding_window": True, "layer_types": _WINDOWS}),
    Case("smollm3", "windows", {"use_sliding_window": True, "layer_types": _WINDOWS}),
    Case("smollm3", "layers without RoPE", {"no_rope_layers": [1, 0, 1, 0]}),
    Case("zaya", "windows", {"layer_types": ["hybrid", "hybrid_sliding"] * 2}),
    Case(
        "stablelm",
        "parallel, query-key norm",
        {"use_parallel_residual": True, "qk_layernorm": True},
    ),
)


def cases() -> list[Case]:
    """Return a case for every causal language model that transformers maps, and the variants."""
    own = [Case(model_type) for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    return sorted([*own, *VARIANTS], key=lambda case: case.name)


def _shrunk(cls: type[PreTrainedConfig], settings: Mapping[str, Any]) -> PreTrainedConfig:
    names, default = _settings_of(cls), _default(cls)
    small = {name: value for name, value in SIZES.items() if name in names}
    if "kv_lora_rank" in names:  # latent attention has a K and a V of each head
        small["num_key_value_heads"] = small["num_attention_heads"]
    elif "head_dim" in names:
        small["head_dim"] = 32  # which is not hidden_size / num_attention_heads
    for name in cls.sub_configs:
        if isinstance(sub := getattr(default, name, None), PreTrainedConfig):
            small[name] = _shrunk(type(sub), {})
    return cls(**small | _layer_kinds(cls, default) | SPECIAL.get(cls.model_type, {}) | settings)


def _layer_kinds(cls: type[PreTrainedConfig], default: PreTrainedConfig | None) -> dict[str, Any]:
    """Return four layers of every kind that the default configuration has, in turn."""
    found: dict[str, Any] = {}
    for name in ("layer_types", "mlp_layer_types"):
        own = cls.attribute_map.get(name, name)
        kinds = list(dict.fromkeys(getattr(default, own, None) or ()))
        if kinds and own in _settings_of(cls) and not isinstance(getattr(cls, own, None), property):
            found |= {"num_hidden_layers": 4, own: (kinds * 4)[:4]}
    return found


def _settings_of(cls: type[PreTrainedConfig]) -> set[str]:
    fields = (
        {each.name for each in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    )
    return fields | set(inspect.signature(cls.__init__).parameters) | set(cls.attribute_map)


def _default(cls: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    try:
        return cls()
    except (ValueError, StrictDataclassError):  # some have defaults that they refuse
        return None


def make_model(case: Case, directory: Path) -> torch.nn.Module:
    """Return a float32 model with seeded weights, which are also written to the directory."""
    model = AutoModelForCausalLM.from_config(
        case.config(), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    _redraw(model, SEEDS.get(case.name, 0))
    model.save_pretrained(directory)
    # As checkpoints have it: the whole of a multimodal model, and without what a decoder alone changes.
    case.config().save_pretrained(directory)
    return model


@torch.no_grad()
def _redraw(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point() and tensor.numel():
            noise = torch.randn(tensor.shape, generator=generator)
            # Matrices: a spread at which logits differ. Norms, biases, sinks: about what they are.
            tensor.copy_(noise * 0.3 if tensor.dim() > 1 else tensor + noise * 0.2)
