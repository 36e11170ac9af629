"""A model that computes anything else than transformers is refused at its start."""

import json

import pytest
import torch
from structlog.testing import capture_logs
from transformers import (
    DeepseekV3Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
)

from tandem.engine import model_check
from tandem.engine.config import EngineConfig
from tandem.engine.model import load_model, model_needs
from tandem.engine.model_check import make_copy, plain_logits
from tandem.wire.errors import ConfigInvalid


def config(path, **settings) -> EngineConfig:
    return EngineConfig(model_dir=str(path), **{"dtype": "float32", **settings})


@pytest.mark.parametrize(
    ("skips", "events"), [(False, ["engine.model_checked"]), (True, ["engine.model_unchecked"])]
)
def test_a_model_is_checked_at_each_start_unless_it_is_skipped_with_a_warning(
    tiny_model, skips, events
):
    with capture_logs() as lines:
        load_model(config(tiny_model("mistral"), dtype="bfloat16", skips_model_check=skips))
    assert [line["event"] for line in lines] == events


@pytest.mark.parametrize("change", [0.5, float("nan")])
def test_logits_that_differ_refuse_the_model_with_the_figure(tiny_model, monkeypatch, change):
    def other_logits(module, sequences):
        expected = plain_logits(module, sequences).clone()
        expected[1, 20] += change
        return expected

    monkeypatch.setattr(model_check, "plain_logits", other_logits)
    with pytest.raises(ConfigInvalid, match="standard deviation"):
        load_model(config(tiny_model("llama")))


def test_one_weight_that_fusing_gets_wrong_refuses_the_model(tiny_model, monkeypatch):
    def spoil(module, _called):
        module.get_decoder().layers[1].self_attn.o_proj.weight[0] += 1

    monkeypatch.setattr(model_check, "fuse", spoil)
    with pytest.raises(ConfigInvalid, match="'llama' are not served: with a small copy"):
        load_model(config(tiny_model("llama")))


def test_what_a_model_takes_is_known_without_weights_and_refused_as_at_the_start(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "codegen"}))
    with pytest.raises(ConfigInvalid, match="attention interface"):
        model_needs(config(tmp_path))


# ── the small copy ───────────────────────────────────────────────────────────────────────────────


def copy_of(config):
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
    assert copy.text_config.sliding_window == 7
    assert copy.text_config.num_key_value_heads == config.num_key_value_heads
    assert copy.text_config.head_dim == config.head_dim


def test_a_model_of_hundreds_of_gigabytes_has_a_copy_of_few():
    copy = copy_of(DeepseekV3Config())
    assert copy.of_kind == (0,) * 3 + (1,) * 58  # dense layers, and those of experts
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
    with pytest.raises(KeyError, match="no such function"):
        copy_of(config)


def test_two_copies_are_the_same():
    one, other = (copy_of(GptOssConfig(hidden_size=64)).module.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
