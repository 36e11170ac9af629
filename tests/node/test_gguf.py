"""A GGUF file gives the logits of the model that it was made from, or is rejected by the key that cannot be read."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)

from tandem.engine.shape import eos_token_ids
from tandem.frontend.text.tokenizer import Tokenizer
from tandem.frontend.text.tokenizer_files import combine
from tandem.node.models.checkpoint import sampling_defaults
from tandem.node.models.conversion import convert_gguf
from tandem.wire.errors import ConfigInvalid
from tandem.wire.generation import SamplingDefaults
from tests.sample import sampled
from tests.tiny_gguf import export_gguf, write_gguf
from tests.tiny_models import SIZES

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about the files

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama, Llama 3 RoPE": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama, Llama 3.2 RoPE": lambda: LlamaConfig(
        **SIZES, rope_parameters=LLAMA3 | {"factor": 32.0}, tie_word_embeddings=True
    ),
    "llama, linear RoPE": lambda: LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "llama, wide heads": lambda: LlamaConfig(**SIZES, head_dim=32),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2, YaRN": lambda: Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen2_moe": lambda: Qwen2MoeConfig(**SIZES, **MOE, shared_expert_intermediate_size=48),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **MOE, head_dim=32, norm_topk_prob=True),
    "phi3": lambda: Phi3Config(**SIZES, sliding_window=24),
    "phi3, long RoPE": lambda: Phi3Config(
        **SIZES, rope_parameters=LONG, original_max_position_embeddings=64
    ),
    "phi3, partial RoPE": lambda: Phi3Config(**SIZES, rope_parameters=PARTIAL),
    "gemma2": lambda: Gemma2Config(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=24,
        attn_logit_softcapping=5.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 7}, head_dim=16, query_pre_attn_scalar=16, sliding_window=24
    ),
    "gemma3, linear RoPE": lambda: Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 7},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=24,
        rope_parameters={
            "full_attention": LINEAR | {"rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "stablelm": lambda: StableLmConfig(**SIZES, use_qkv_bias=True),
    "stablelm, half of RoPE": lambda: StableLmConfig(
        **SIZES, rope_parameters=PARTIAL, use_parallel_residual=True
    ),
    "gemma3, no window": lambda: Gemma3TextConfig(
        **SIZES, head_dim=16, query_pre_attn_scalar=16, layer_types=["full_attention"] * 3
    ),
    "starcoder2": lambda: Starcoder2Config(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 999999.0}
    ),
    "nemotron": lambda: NemotronConfig(**SIZES),
    "gpt2": lambda: GPT2Config(
        vocab_size=320, n_positions=512, n_embd=64, n_layer=3, n_head=4, initializer_range=0.3
    ),
}


def random_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, each in model.named_parameters():
        if each.dim() == 1:  # norms and biases are ones and zeros, which show no mistake
            torch.nn.init.normal_(each, mean=float("norm" in name), std=0.3)
    return model


def logits(model: Any) -> torch.Tensor:
    # Longer than the windows, and within the original length of long RoPE.
    ids = torch.randint(10, 300, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.parametrize(
    "kind",
    sampled(CONFIGS, *(kind for kind in CONFIGS if "," in kind or kind in ("gemma3", "qwen2_moe"))),
)
def test_gguf_file_gives_the_logits_of_its_original(kind, tmp_path):
    model = random_model(CONFIGS[kind]())
    convert_gguf(export_gguf(tmp_path / "tiny.gguf", model), tmp_path / "out", "float32")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(found), logits(model), rtol=1e-3, atol=1e-3)


def refusal(path) -> str:
    with pytest.raises(ConfigInvalid) as raised:
        convert_gguf(path, path.parent / "out", "float32")
    assert "\n" not in raised.value.message
    assert not (path.parent / "out").exists()
    return raised.value.message


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("attention.head_count_kv", [4, 2]),
        ("attention.scale", 0.5),
        ("attention.sliding_window", 64),
        ("attn_logit_softcapping", 50.0),
        ("expert_gating_func", 2),
        ("logit_scale", 0.0625),
        ("residual_scale", 0.22),
        ("rope.dimension_count", 8),
        ("rope.dimension_sections", [2, 3, 3, 0]),
        ("rope.scaling.attn_factor", 1.19),
        ("rope.scaling.type", "dynamic"),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("something_new", 3),
        ("something_new", "text"),
    ],
)
def test_key_that_is_not_read_is_refused_by_name(tmp_path, key, value):
    path = write_gguf(tmp_path / "tiny.gguf", keys={f"llama.{key}": value})
    shown = f"{value:.6g}" if isinstance(value, float) else value
    assert f"llama.{key} = {shown}" in refusal(path)


def test_window_that_the_class_does_not_take_is_refused_by_name(tmp_path):
    model = random_model(Qwen2Config(**SIZES))
    path = export_gguf(tmp_path / "tiny.gguf", model, {"qwen2.attention.sliding_window": 64})
    assert "qwen2.attention.sliding_window = 64" in refusal(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", True),
        ("attention.key_length", 16),
        ("attention.sliding_window", 128),
        ("attention.sliding_window", 0),
        ("expert_count", 0),
        ("logit_scale", 0.0),
        ("pooling_type", 3),
        ("rope.scaling.finetuned", True),
        ("rope.scaling.type", "none"),
        ("tensor_data_layout", "Meta AI original pth"),
    ],
)
def test_key_without_an_effect_is_accepted(tmp_path, key, value):
    path = write_gguf(tmp_path / "tiny.gguf", keys={f"llama.{key}": value})
    convert_gguf(path, tmp_path / "out", "float32")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"general.architecture": "t5"}, "general.architecture t5"),
        ({"general.architecture": "gemma4"}, "general.architecture gemma4"),
        ({"llama.expert_count": 8}, "is a Mixtral model (llama.expert_count = 8)"),
        ({"llama.expert_count": 1}, "is a Mixtral model (llama.expert_count = 1)"),
        ({"general.type": "adapter"}, "general.type adapter"),
        ({"general.type": "mmproj"}, "general.type mmproj"),
        ({"llama.attention.head_count_kv": None}, "no llama.attention.head_count_kv"),
        ({"llama.context_length": None}, "no llama.context_length"),
        ({"llama.block_count": None}, "no llama.block_count"),
        ({"split.count": 3}, "llama-gguf-split --merge"),
        ({"tokenizer.ggml.pre": "no-such"}, "tokenizer.ggml.pre = no-such"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre = default"),
    ],
)
def test_file_of_a_different_kind_is_refused_by_its_key(tmp_path, keys, says):
    assert says in refusal(write_gguf(tmp_path / "tiny.gguf", keys=keys))


def test_heads_of_a_different_width_than_the_tensors_are_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", keys={"llama.attention.key_length": 32})
    assert "k_proj.weight has shape [64, 64]" in refusal(path)


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "blk.3.attn_q.weight", "rope_new.weight"],
)
def test_tensor_that_is_not_read_is_refused_by_name(tmp_path, name):
    array = np.ones(64, np.float32)
    path = export_gguf(
        tmp_path / "tiny.gguf", random_model(LlamaConfig(**SIZES)), arrays={name: array}
    )
    assert f"({name})" in refusal(path)


@pytest.mark.parametrize(
    ("name", "size"),
    [("rope_freqs.weight", 8), ("rope_freqs.weight", 7), ("rope_factors_long.weight", 8)],
)
def test_rope_factors_of_an_unknown_kind_are_refused_by_name(tmp_path, name, size):
    array = np.linspace(1, 3, size, dtype=np.float32)
    path = export_gguf(
        tmp_path / "tiny.gguf", random_model(LlamaConfig(**SIZES)), arrays={name: array}
    )
    assert name in refusal(path)


# ── the tokenizer ────────────────────────────────────────────────────────────────────────────────

BYTES = {
    "tokenizer.ggml.tokens": [
        *("<pad>", "<s>", "</s>", "a", "1", "2", "12", "\u0120", "aa"),
        *(f"<{i}>" for i in range(291)),
    ],
    "tokenizer.ggml.merges": ["1 2"],
}
PIECES = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "</s>",
        "\u2581",
        "h",
        *(f"<{i}>" for i in range(295)),
    ],
    "tokenizer.ggml.scores": [0.0] * 300,
    "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 297],
    "tokenizer.ggml.merges": None,
}


def tokenizer(tmp_path, keys: dict[str, Any]) -> Tokenizer:
    """Return our tokenizer of a file with these keys."""
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", keys=keys), tmp_path / "out", "float32")
    return Tokenizer.from_files(combine(tmp_path / "out", trusts_code=False))


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", [6, 7, 3]),
        ("olmo", [6, 7, 3]),
        ("smollm", [4, 5, 7, 3]),
        ("starcoder", [4, 5, 7, 3]),
        ("qwen2", [4, 5, 7, 3]),
        ("stablelm2", [4, 5, 7, 3]),
        ("llama-bpe", [1, 6, 7, 3]),
        ("tekken", [1, 4, 5, 7, 3]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path, pre, expected):
    found = tokenizer(tmp_path, BYTES | {"tokenizer.ggml.pre": pre})
    assert found.encode("12 a") == expected


def test_token_of_the_vocabulary_needs_no_merge_in_llama_3(tmp_path):
    unmerged = {**BYTES, "tokenizer.ggml.merges": ["a a"], "tokenizer.ggml.pre": "llama-bpe"}
    assert tokenizer(tmp_path, unmerged).encode("12") == [1, 6]


@pytest.mark.parametrize(
    ("base", "adds", "expected"),
    [
        (BYTES, {}, [3]),
        (BYTES, {"add_bos_token": True}, [1, 3]),
        (BYTES, {"add_bos_token": True, "add_eos_token": True}, [1, 3, 2]),
        (BYTES | {"tokenizer.ggml.pre": "llama-bpe"}, {"add_bos_token": False}, [3]),
        (PIECES, {}, [1, 3, 4]),
        (PIECES, {"add_bos_token": False}, [3, 4]),
        (PIECES, {"add_eos_token": True}, [1, 3, 4, 2]),
        (PIECES, {"add_space_prefix": False}, [1, 4]),
    ],
)
def test_tokens_are_added_as_the_file_says(tmp_path, base, adds, expected):
    keys = {f"tokenizer.ggml.{name}": value for name, value in adds.items()}
    found = tokenizer(tmp_path, base | keys)
    text = "a" if "tokenizer.ggml.model" not in base else "h"
    assert found.encode(text) == expected
    assert found.decode(expected) == text


def test_all_chat_templates_are_kept_by_name(tmp_path):
    keys = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": ["tool_use"],
    }
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", keys=keys), tmp_path / "out", "float32")
    found = AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert found == {"default": "a", "tool_use": "b"}


def test_answers_end_at_every_end_of_the_file(tmp_path):
    keys = {
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 8,
        "general.sampling.temp": 0.5,
        "general.sampling.penalty_repeat": 1.25,
    }
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", keys=keys), tmp_path / "out", "float32")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert eos_token_ids(tmp_path / "out", config) == {2, 7, 8}
    expected = SamplingDefaults(temperature=0.5, repetition_penalty=1.25)
    assert sampling_defaults(tmp_path / "out") == expected
