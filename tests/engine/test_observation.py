"""Observation of a model's attention, which is supported or refused by name at the start."""

import pytest
import torch
from torch import nn

from tandem.engine.attention.paged import (
    NAME,
    AttentionNotServed,
    PagedModel,
    paged_attention,
    register,
)
from tandem.engine.model.observation import observe
from tandem.wire.hand_off import LayerKV
from tests.architectures.configs import cases


def observed(name: str):
    from transformers import AutoModelForCausalLM

    register()
    (case,) = (case for case in cases() if case.name == name)
    config = case.config()
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=NAME)
    return observe(module.eval(), config.get_text_config())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("codegen", "does not go through transformers' attention interface"),
        ("diffllama", "attends twice"),
        ("doge", "its own attention mask"),
        ("roberta", "not causal"),
        ("deepseek_v32", "layers of kind 'indexed_attention'"),
        ("qwen3_next", "layers of kind 'linear_attention'"),
    ],
)
def test_unsupported_attention_is_refused_with_the_reason(name, reason):
    with pytest.raises(AttentionNotServed, match=reason):
        observed(name)


def test_equal_layers_keep_their_heads():
    found = observed("llama")
    assert set(found.layers) == {LayerKV(2, 32, 32)}
    assert not found.features
    assert not found.sources


def test_latent_attention_stores_one_row_for_all_heads():
    found = observed("deepseek_v3")
    assert set(found.layers) == {LayerKV(1, 16 + 8, 0)}
    assert found.features == {"latents"}


def test_layers_of_two_sizes_and_shared_layers_are_distinguished():
    found = observed("gemma4_text, shared KV")
    assert found.layers[:2] == (LayerKV(2, 32, 32), LayerKV(2, 48, 48))
    assert found.layers[2:] == (LayerKV(0, 0, 0),) * 2
    assert found.sources == ((2, 0), (3, 1))


def test_sinks_and_chunks_are_reported_as_features():
    assert observed("gpt_oss").features == {"sinks"}
    assert observed("llama4_text").features == {"chunks"}


class Attention(nn.Module):
    """An attention layer that passes an additional argument."""

    layer_idx = 0

    def __init__(self, **brings) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._brings = brings

    def forward(self, **_inputs):
        rows = torch.ones(1, 2, 3, 8)
        return paged_attention(self, rows, rows, rows, None, **self._brings)


@pytest.mark.parametrize(
    "brings",
    [{"position_bias": torch.ones(1)}, {"indices": torch.ones(1)}, {"is_causal": False}],
    ids=str,
)
def test_unsupported_argument_is_refused(brings):
    attention = Attention(**brings)
    PagedModel(attention)
    with pytest.raises(AttentionNotServed):
        attention()
