"""A config gives the model that it describes, or is refused by the key that no code reads."""

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from tandem.engine.config import EngineConfig
from tandem.engine.model.checkpoint import read_config
from tandem.wire.errors import ConfigInvalid

LONG = [1.0] * 48
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# Keys of published configs, apart from sizes that transformers' class has as defaults.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2 7B": {"model_type": "llama", "pretraining_tp": 1, "rope_scaling": None},
    "Llama 3.1 8B": {
        "model_type": "llama",
        "rope_scaling": LLAMA3,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
    },
    "Llama 3.2 1B of Unsloth": {
        "model_type": "llama",
        "rope_scaling": LLAMA3,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "unsloth_fixed": True,
        "unsloth_version": "2025.3",
    },
    "SmolLM2 1.7B": {
        "model_type": "llama",
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_theta": 130000,
        "transformers.js_config": {"dtype": "q4"},
    },
    "Mistral 7B": {"model_type": "mistral", "sliding_window": 4096},
    "Mistral Nemo": {"model_type": "mistral", "head_dim": 128, "sliding_window": None},
    "Mixtral 8x7B": {"model_type": "mixtral", "router_aux_loss_coef": 0.02},
    "Qwen 2.5 7B": {
        "model_type": "qwen2",
        "max_window_layers": 28,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "use_mrope": False,
    },
    "Qwen 2.5 72B with YaRN": {
        "model_type": "qwen2",
        "rope_scaling": {
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "type": "yarn",
        },
    },
    "Qwen 3 8B": {"model_type": "qwen3", "head_dim": 128, "max_window_layers": 36},
    "Qwen 3 30B A3B": {"model_type": "qwen3_moe", "head_dim": 128, "norm_topk_prob": True},
    "Phi 3 mini": {
        "model_type": "phi3",
        "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "original_max_position_embeddings": 4096,
        "sliding_window": 2047,
    },
    "Phi 4 mini": {
        "model_type": "phi3",
        "num_attention_heads": 24,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 131072,
        "rope_scaling": {"long_factor": LONG, "short_factor": LONG, "type": "longrope"},
        "sliding_window": 262144,
    },
    "Gemma 2 9B": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window_size": 4096,
    },
    "Gemma 3 1B": {
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window_pattern": 6,
    },
    "StableLM 2": {
        "model_type": "stablelm",
        "partial_rotary_factor": 0.25,
        "rope_pct": 0.25,
        "qk_layernorm": False,
        "use_qkv_bias": True,
    },
    "StarCoder 2 7B": {
        "model_type": "starcoder2",
        "attention_softmax_in_fp32": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "mlp_type": "default",
        "norm_type": "layer_norm",
        "rope_theta": 1000000,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "sliding_window": 4096,
    },
    "OLMo 2": {"model_type": "olmo2", "attention_bias": False, "rope_scaling": None},
    "Granite 3": {
        "model_type": "granite",
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
    },
    "DeepSeek V3": {
        "model_type": "deepseek_v3",
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
    },
    "Command R": {"model_type": "cohere", "logit_scale": 0.0625, "use_qk_norm": False},
    "GPT 2": {"model_type": "gpt2", "n_ctx": 1024, "summary_activation": None},
    "Pythia": {"model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25},
    "Phi 2": {"model_type": "phi", "partial_rotary_factor": 0.4, "qk_layernorm": False},
    "OPT": {"model_type": "opt", "_remove_final_layer_norm": False, "word_embed_proj_dim": 768},
    "SmolLM 3": {
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_hidden_layers": 36,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "swiglu_limit": 7.0,
    },
    "OLMoE": {"model_type": "olmoe", "clip_qkv": None, "norm_topk_prob": False},
    "Apertus 8B": {"model_type": "apertus", "post_norm": False, "qk_norm": True},
    "Hunyuan 7B": {
        "model_type": "hunyuan_v1_dense",
        "attention_head_dim": 128,
        "use_qk_norm": True,
    },
    "MiniMax M2": {
        "model_type": "minimax_m2",
        "qk_norm_type": "per_layer",
        "rotary_dim": 64,
        "use_qk_norm": True,
    },
    "dots.llm1": {"model_type": "dots1", "use_qk_norm": True},
    "Solar Open": {"model_type": "solar_open", "use_qk_norm": True},
}


def read(path, facts: dict[str, Any]) -> Any:
    (path / "config.json").write_text(json.dumps(facts))
    return read_config(EngineConfig(model_dir=str(path)))


def refusal(path, facts: dict[str, Any]) -> str:
    with pytest.raises(ConfigInvalid) as raised:
        read(path, facts)
    return raised.value.message


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_accepted(tmp_path, name):
    read(tmp_path, {"architectures": ["A"], "torch_dtype": "bfloat16", **PUBLISHED[name]})


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "attn_logit_softcapping", 50.0),
        ("llama", "sliding_window", 1024),
        ("llama", "logit_scale", 0.0625),
        ("llama", "residual_multiplier", 0.22),
        ("llama", "layer_types", ["sliding_attention"] * 32),
        ("llama", "no_rope_layers", [1, 0]),
        ("mistral", "query_pre_attn_scalar", 144),
        ("llama", "attention_multiplier", 1.0),
        ("llama", "no_rope_layer_interval", 4),
        ("llama", "rope_local_base_freq", 1000000),
        ("llama", "rotary_dim", 64),
        ("llama", "rotary_emb_base", 1000000),
        ("llama", "rotary_pct", 0.25),
        ("llama", "scale_depth", 1.0),
        ("phi", "rotary_dim", 64),
        ("gemma3_text", "rotary_emb_base", 10000),
        ("opt", "rope_theta", 10000.0),
        ("opt", "rotary_dim", 64),
        ("opt", "rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
        ("opt", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("gpt2", "clip_qkv", 8.0),
    ],
)
@pytest.mark.filterwarnings("ignore")  # transformers warns about rope_scaling
def test_key_that_would_change_the_logits_is_refused_by_name(tmp_path, kind, key, value):
    said = refusal(tmp_path, {"model_type": kind, key: value})
    assert f"{key} = {value!r}" in said
    assert "does not read" in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sliding_window", None),
        ("sliding_window", 4096),
        ("logit_scale", 1.0),
        ("head_dim", 128),
        ("clip_qkv", None),
        ("layer_types", ["full_attention"] * 32),
        ("layer_types", None),
        ("no_rope_layers", [1] * 32),
        ("query_pre_attn_scalar", None),
        ("query_pre_attn_scalar", 128),
        ("attention_multiplier", 128**-0.5),
        ("partial_rotary_factor", 1.0),
        ("rope_local_base_freq", 10000),
        ("rotary_dim", 128),
        ("rotary_emb_base", 10000),
        ("rotary_pct", 1.0),
        ("scale_depth", 32**0.5),
        ("scale_emb", 1),
    ],
)
def test_key_without_an_effect_is_accepted(tmp_path, key, value):
    read(tmp_path, {"model_type": "llama", key: value, "max_position_embeddings": 4096})


@pytest.mark.parametrize(
    "facts",
    [
        {"model_type": "llama", "rope_theta": 500000.0, "rotary_emb_base": 500000},
        {"model_type": "phi", "partial_rotary_factor": 0.5, "rotary_dim": 32},
        {"model_type": "stablelm", "partial_rotary_factor": 0.25, "rotary_pct": 0.25},
        {"model_type": "llama", "sliding_window": 64, "use_sliding_window": False},
        {"model_type": "llama", "sliding_window": 64, "max_window_layers": 32},
        {"model_type": "llama", "sliding_window": 64, "layer_types": ["full_attention"] * 32},
        {"model_type": "opt", "rope_scaling": None},
        {"model_type": "opt", "rope_scaling": {}},
        {"model_type": "opt", "rope_scaling": []},
        {"model_type": "opt", "rope_scaling": {"type": "default"}},
        {"model_type": "opt", "rope_scaling": {"rope_type": "default"}},
        {"model_type": "opt", "rope_scaling": {"type": "linear", "factor": 1.0}},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")  # transformers warns about rope_scaling
def test_key_equal_to_what_the_model_computes_is_accepted(tmp_path, facts):
    read(tmp_path, facts)


@pytest.mark.parametrize("layers", [0, 31, None])
def test_window_of_some_layers_is_refused(tmp_path, layers):
    facts = {"model_type": "llama", "sliding_window": 64, "max_window_layers": layers}
    assert "sliding_window = 64" in refusal(tmp_path, facts)


def test_other_unread_keys_are_logged(tmp_path):
    with capture_logs() as logs:
        others = {"rope_interleaved": False, "_name_or_path": "a", "unsloth_fixed": True}
        read(tmp_path, {"model_type": "llama", "is_llama_config": True, **others})
    (line,) = logs
    assert (line["event"], line["keys"]) == ("checkpoint.unread_config_keys", ["is_llama_config"])


@pytest.mark.parametrize(
    ("kind", "key"),
    [("llama", "hidden_act"), ("gemma2", "hidden_activation"), ("gpt2", "activation_function")],
)
def test_unknown_activation_is_refused_by_its_key(tmp_path, kind, key):
    assert f"has {key} = swoosh" in refusal(tmp_path, {"model_type": kind, key: "swoosh"})


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"num_key_value_heads": -1}, "num_key_value_heads = -1"),
        ({"rope_parameters": {"rope_type": "swoosh"}}, "rope_type = swoosh"),
        ({"rope_scaling": {"type": "swoosh", "factor": 2.0}}, "rope_type = swoosh"),
        ({"torch_dtype": "float31"}, "dtype = float31"),
        ({"dtype": "zeros"}, "dtype = zeros"),
        ({"model_type": 7}, "model_type = 7"),
        ({"model_type": None}, "no model_type"),
    ],
)
def test_impossible_value_is_refused_by_its_key(tmp_path, facts, says):
    assert f"config.json has {says}" in refusal(tmp_path, {"model_type": "llama", **facts})


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("llava", "'llava' are not supported: it is not a language model: it is made of"),
        ("qwen2_vl", "'qwen2_vl' are not supported: it is not a language model: it is made of"),
        ("clip", "'clip' are not supported"),
        ("vit", "'vit' are not supported"),
        ("bart", "it is an encoder-decoder model"),
        ("t5", "it is an encoder-decoder model"),
        ("whisper", "it is an encoder-decoder model"),
    ],
)
@pytest.mark.parametrize("says_so", [True, False])
def test_model_of_a_different_kind_is_refused_by_its_kind(tmp_path, kind, says, says_so):
    facts = {} if says_so or kind == "t5" else {"is_encoder_decoder": False}
    assert says in refusal(tmp_path, {"model_type": kind, **facts})
