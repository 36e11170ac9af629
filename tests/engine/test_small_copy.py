"""A copy of a config: few layers of each kind, and what decides how attention works as it was."""

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
)

from tandem.engine.attention import AttentionNotServed, register
from tandem.engine.small_copy import make_copy


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


def test_every_weight_counts():
    for weight in copy_of(GptOssConfig(hidden_size=64, num_hidden_layers=2)).module.parameters():
        assert weight.isfinite().all()
        assert weight.std() > 0.01


def test_a_config_that_no_model_can_be_made_of_is_refused():
    config = LlamaConfig(hidden_act="no such function")
    with pytest.raises(AttentionNotServed, match="small copy of it cannot be made"):
        copy_of(config)


def test_two_copies_are_the_same():
    one, other = (copy_of(GptOssConfig(hidden_size=64)).module.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
