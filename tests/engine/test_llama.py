"""The direct forward of Llama-like models compared with transformers' modelling code."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from tandem.engine.attention.paged import register
from tandem.engine.attention.torch import TorchAttention
from tandem.engine.config import EngineConfig
from tandem.engine.kernels.operators import TorchOperators
from tandem.engine.kernels.operators_cpu import CpuOperators
from tandem.engine.model.check import Sequences, difference, plain_logits, shape_of
from tandem.engine.model.llama import speed_up
from tandem.engine.model.loading import load_model
from tandem.engine.model.observation import observe
from tests.tiny_models import CONFIGS, SIZES

LLAMA_SHAPED = ("llama", "qwen2", "qwen3", "mistral")


def config(path, **settings) -> EngineConfig:
    return EngineConfig(model_dir=str(path), **{"dtype": "float32", **settings})


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_only_llama_like_models_use_the_direct_forward(tiny_model, kind):
    model, _ = load_model(config(tiny_model(kind)))
    assert (model.direct is not None) is (kind in LLAMA_SHAPED)


@pytest.mark.parametrize("settings", [{"is_compiled": True}, {"tp_size": 2}])
def test_compiled_and_sharded_models_keep_the_modelling_code(settings):
    assert not config("model", **settings).is_fused
    assert config("model", **settings, is_eager=True).is_fused is ("is_compiled" in settings)


def uneven(hf_config):
    """Return a model with random norms and biases."""
    torch.manual_seed(0)
    register()
    module = AutoModelForCausalLM.from_config(
        hf_config, dtype=torch.float32, attn_implementation="tandem_paged"
    ).eval()
    with torch.inference_mode():
        for name, each in module.named_parameters():
            if "norm" in name or "bias" in name:
                each.copy_(torch.rand_like(each) + 0.5)
    return module


def off(module, spoil=None) -> float:
    """Return the error of the direct forward's logits, in standard deviations."""
    text = module.config
    observed = observe(module, text)
    sequences = Sequences.of(text, 16)
    expected = plain_logits(module, sequences)
    shape = shape_of(observed, text.vocab_size)
    speed_up(observed)
    assert observed.model.direct is not None
    if spoil is not None:
        spoil(observed.model.direct)
    return float(difference(observed.model, shape, TorchAttention(), sequences, expected).max())


@pytest.mark.parametrize("kind", LLAMA_SHAPED)
def test_direct_forward_logits_match_transformers(kind):
    assert off(uneven(CONFIGS[kind]())) < 1e-4


def test_biases_and_longrope_match_transformers():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config = LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=rope)
    assert off(uneven(config)) < 1e-4


def test_single_kv_head_is_normalized_row_by_row():
    config = Qwen3Config(**{**SIZES, "num_key_value_heads": 1}, head_dim=32)
    assert off(uneven(config)) < 1e-4


class Reversed(TorchOperators):
    """Swaps gates and ups."""

    def gated(self, gate_up):
        return super().gated(gate_up.roll(gate_up.shape[1] // 2, dims=1))


class WithoutRotation(TorchOperators):
    """Leaves rotation to attention, as on GPUs."""

    rotate = None


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_attention_rotates_heads_that_are_not_rotated_yet(kind):
    def leave(direct) -> None:
        direct._operators = WithoutRotation()

    assert off(uneven(CONFIGS[kind]()), leave) < 1e-4


def test_wrong_operator_changes_the_logits():
    def spoil(direct) -> None:
        assert isinstance(direct._operators, CpuOperators)
        direct._operators = Reversed()

    assert off(uneven(CONFIGS["llama"]()), spoil) > 0.01


def test_other_activations_keep_the_modelling_code():
    module = uneven(LlamaConfig(**SIZES, hidden_act="gelu"))
    observed = observe(module, module.config)
    speed_up(observed)
    assert observed.model.direct is None


def test_each_layer_is_reported_after_its_attention(tiny_model):
    model, shape = load_model(config(tiny_model("llama")))
    events = []

    def attend(layer):
        events.append(("attends", layer.index))
        return torch.zeros_like(layer.query)

    ids = torch.arange(3)
    model.logits(
        ids, ids, ids[-1:], attend, on_layer_written=lambda index: events.append(("wrote", index))
    )
    assert events == [
        (what, index) for index in range(shape.num_layers) for what in ("attends", "wrote")
    ]
