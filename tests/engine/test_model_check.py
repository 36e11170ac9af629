"""A model whose logits differ from transformers is refused at the start."""

import json
import shutil

import pytest
import torch
from structlog.testing import capture_logs
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
)

from tandem.engine.attention.paged import AttentionNotServed, register
from tandem.engine.attention.torch import TorchAttention
from tandem.engine.config import EngineConfig
from tandem.engine.model import loading
from tandem.engine.model.check import Sequences, check_weights, make_copy, plain_logits
from tandem.engine.model.loading import load_model
from tandem.wire.errors import ConfigInvalid


def config(path, **settings) -> EngineConfig:
    return EngineConfig(model_dir=str(path), **{"dtype": "float32", **settings})


def checks(path, **settings) -> list[str]:
    """Load a model, and return how it was checked."""
    with capture_logs() as lines:
        load_model(config(path, **settings))
    told = [line for line in lines if line["event"] == "engine.model_checked"]
    assert all(line["difference"] < line["tolerance"] for line in told)
    return [line["what"] for line in told]


def test_small_model_is_checked_with_its_own_weights(tiny_model):
    assert checks(tiny_model("llama")) == ["its own weights"]


def test_long_window_is_checked_with_a_small_copy(tiny_model, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(tiny_model("mistral"), path)
    facts = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(facts | {"sliding_window": 200}))
    assert checks(path) == ["its own weights", "a small copy"]


def test_16_bit_model_is_also_checked_with_a_float32_copy(tiny_model):
    assert "a small copy" in checks(tiny_model("llama"), dtype="bfloat16")


def test_large_model_is_checked_before_its_weights_are_read(tiny_model, monkeypatch):
    monkeypatch.setattr(loading, "_LARGE_BYTES", 0)
    monkeypatch.setattr("tandem.engine.model.check._AFFORDABLE", {"cpu": 0, "16-bit cpu": 0})
    assert checks(tiny_model("qwen3")) == ["a small copy"]


def test_check_can_be_skipped_with_a_warning(tiny_model):
    with capture_logs() as lines:
        load_model(config(tiny_model("llama"), skips_model_check=True))
    assert [line["log_level"] for line in lines if "unchecked" in line["event"]] == ["warning"]
    assert not [line for line in lines if line["event"] == "engine.model_checked"]


@pytest.mark.parametrize("change", [0.5, float("nan")])
def test_different_logits_are_refused_with_the_difference(tiny_model, change):
    model, shape = load_model(config(tiny_model("llama")))
    module = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).eval()
    sequences = Sequences.of(module.config, 16)
    expected = plain_logits(module, sequences).clone()
    check_weights(model, shape, TorchAttention(), sequences, expected)
    expected[1, 20] += change
    with pytest.raises(AttentionNotServed, match="standard deviation"):
        check_weights(model, shape, TorchAttention(), sequences, expected)


def test_one_wrongly_fused_weight_is_refused(tiny_model, monkeypatch):
    def spoil(observed):
        observed.model.module.get_decoder().layers[1].self_attn.o_proj.weight[0] += 1

    monkeypatch.setattr(loading, "speed_up", spoil)
    with pytest.raises(ConfigInvalid, match="'llama' are not supported: with its own weights"):
        load_model(config(tiny_model("llama")))


def test_check_sequences_exceed_a_page_and_a_short_window():
    assert Sequences.of(LlamaConfig(), 16).num_tokens == 25
    assert Sequences.of(MistralConfig(sliding_window=24), 16).num_tokens == 33
    assert Sequences.of(MistralConfig(sliding_window=24), 16).exceed_windows
    assert not Sequences.of(MistralConfig(sliding_window=4096), 16).exceed_windows
    assert Sequences.of(LlamaConfig(max_position_embeddings=20), 16).num_tokens == 20


# ── the small copy ───────────────────────────────────────────────────────────────────────────────


def copy_of(config):
    register()
    return make_copy(config, "cpu", trusts_code=False)


def test_copy_has_a_layer_of_each_kind():
    config = GptOssConfig()
    copy = copy_of(config)
    assert copy.text_config.layer_types == ["sliding_attention", "full_attention"]
    assert set(config.layer_types) == set(copy.text_config.layer_types)


def test_copy_has_short_windows_and_the_same_heads():
    config = GptOssConfig()
    copy = copy_of(config)
    assert copy.text_config.sliding_window == 7
    assert copy.text_config.num_key_value_heads == config.num_key_value_heads
    assert copy.text_config.head_dim == config.head_dim


def test_copy_of_a_huge_model_is_small():
    copy = copy_of(DeepseekV3Config())
    text = copy.text_config  # a dense layer and one with experts
    assert (text.num_hidden_layers, text.first_k_dense_replace) == (2, 1)
    assert copy.text_config.kv_lora_rank == 512
    assert sum(each.numel() for each in copy.module.parameters()) < 1e9


def test_copy_keeps_sizes_by_layer():
    copy = copy_of(Gemma4TextConfig())
    full = copy.text_config.layer_types.index("full_attention")
    assert copy.text_config.per_layer_config[full].head_dim == 512
    assert copy.text_config.per_layer_config[1 - full].head_dim == 256
    assert set(copy_of(Gemma3nTextConfig()).text_config.intermediate_size) == {128}


def test_config_without_a_model_is_refused():
    config = LlamaConfig(hidden_act="no such function")
    with pytest.raises(AttentionNotServed, match="small copy of it cannot be created"):
        copy_of(config)


def test_copies_are_deterministic():
    one, other = (copy_of(GptOssConfig(hidden_size=64)).module.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
