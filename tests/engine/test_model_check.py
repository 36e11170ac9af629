"""A model that computes anything else than transformers is refused at its start."""

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
)

from tandem.engine import model as loading
from tandem.engine.attention import AttentionNotServed, register
from tandem.engine.attention_torch import TorchAttention
from tandem.engine.config import EngineConfig
from tandem.engine.model import load_model, model_needs
from tandem.engine.model_check import Sequences, check_weights, make_copy, plain_logits
from tandem.wire.errors import ConfigInvalid


def config(path, **settings) -> EngineConfig:
    return EngineConfig(model_dir=str(path), **{"dtype": "float32", **settings})


def checks(path, **settings) -> list[str]:
    """Load a model; return what it was checked with."""
    with capture_logs() as lines:
        load_model(config(path, **settings))
    told = [line for line in lines if line["event"] == "engine.model_checked"]
    assert all(line["difference"] < line["tolerance"] for line in told)
    return [line["what"] for line in told]


def test_a_small_model_is_checked_with_its_own_weights(tiny_model):
    assert checks(tiny_model("llama")) == ["its own weights"]


def test_a_window_that_is_longer_than_the_prompt_is_checked_with_a_copy(tiny_model, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(tiny_model("mistral"), path)
    facts = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(facts | {"sliding_window": 200}))
    assert checks(path) == ["its own weights", "a small copy"]


def test_sixteen_bits_are_checked_with_a_float32_copy_too(tiny_model):
    assert "a small copy" in checks(tiny_model("llama"), dtype="bfloat16")


def test_a_large_model_is_checked_before_its_weights_are_read(tiny_model, monkeypatch):
    monkeypatch.setattr(loading, "_LARGE_BYTES", 0)
    monkeypatch.setattr("tandem.engine.model_check._AFFORDABLE", {"cpu": 0, "16-bit cpu": 0})
    assert checks(tiny_model("qwen3")) == ["a small copy"]


def test_the_check_can_be_left_out_with_a_warning(tiny_model):
    with capture_logs() as lines:
        load_model(config(tiny_model("llama"), skips_model_check=True))
    assert [line["log_level"] for line in lines if "unchecked" in line["event"]] == ["warning"]
    assert not [line for line in lines if line["event"] == "engine.model_checked"]


@pytest.mark.parametrize("change", [0.5, float("nan")])
def test_logits_that_differ_refuse_the_model_with_the_figure(tiny_model, change):
    model, shape = load_model(config(tiny_model("llama")))
    sequences = Sequences.of(shape.vocab_size, 16, None, None)
    module = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).eval()
    expected = plain_logits(module, sequences).clone()
    check_weights(model, shape, TorchAttention(), sequences, expected)
    expected[1, 20] += change
    with pytest.raises(AttentionNotServed, match="standard deviation"):
        check_weights(model, shape, TorchAttention(), sequences, expected)


def test_one_weight_that_fusing_gets_wrong_refuses_the_model(tiny_model, monkeypatch):
    def spoil(observed):
        observed.model.module.get_decoder().layers[1].self_attn.o_proj.weight[0] += 1

    monkeypatch.setattr(loading, "speed_up", spoil)
    with pytest.raises(ConfigInvalid, match="'llama' are not served: with its own weights"):
        load_model(config(tiny_model("llama")))


def test_what_a_model_takes_is_known_without_weights_and_refused_as_at_the_start(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "codegen"}))
    with pytest.raises(ConfigInvalid, match="attention interface"):
        model_needs(config(tmp_path))


def test_sequences_are_longer_than_a_page_and_a_short_window():
    assert Sequences.of(320, 16, None, None).num_tokens == 25
    assert Sequences.of(320, 16, 24, None).leave(24)
    assert not Sequences.of(320, 16, 4096, None).leave(4096)
    assert Sequences.of(320, 16, 24, 20).num_tokens == 20


# ── the small copy ───────────────────────────────────────────────────────────────────────────────


def copy_of(config):
    register()
    return make_copy(config, "cpu", trusts_code=False)


def test_each_kind_of_layer_has_one_in_the_copy():
    config = GptOssConfig()
    copy = copy_of(config)
    assert copy.text_config.layer_types == ["sliding_attention", "full_attention"]
    kinds = [copy.text_config.layer_types[index] for index in copy.of_kind]
    assert kinds == config.layer_types


def test_windows_are_short_and_heads_are_kept():
    config = GptOssConfig()
    copy = copy_of(config)
    assert copy.window == copy.text_config.sliding_window == 7
    assert copy.text_config.num_key_value_heads == config.num_key_value_heads
    assert copy.text_config.head_dim == config.head_dim


def test_a_model_of_hundreds_of_gigabytes_has_a_copy_of_few():
    copy = copy_of(DeepseekV3Config())
    assert copy.layers == (0, 3)  # a dense layer and one of experts
    assert copy.text_config.kv_lora_rank == 512
    assert sum(each.numel() for each in copy.module.parameters()) < 1e9


def test_sizes_that_a_config_has_by_layer_stay_with_their_layers():
    copy = copy_of(Gemma4TextConfig())
    full = copy.text_config.layer_types.index("full_attention")
    assert copy.text_config.per_layer_config[full].head_dim == 512
    assert copy.text_config.per_layer_config[1 - full].head_dim == 256
    assert set(copy_of(Gemma3nTextConfig()).text_config.intermediate_size) == {128}


def test_a_config_that_no_model_can_be_made_of_is_refused():
    config = LlamaConfig(hidden_act="no such function")
    with pytest.raises(AttentionNotServed, match="small copy of it cannot be made"):
        copy_of(config)


def test_two_copies_are_the_same():
    one, other = (copy_of(GptOssConfig(hidden_size=64)).module.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
