"""What a user calls a node and a model, and what comes of it."""

import itertools
import json
from pathlib import Path

import msgspec
import pytest

from tandem.engine.profile import NodeFigures, PrefillTimes, Profile
from tandem.plan.models import read_model
from tandem.plan.nodes import CARDS, SIZES, estimate, node_kind
from tandem.wire.errors import ConfigInvalid

SHIPPED = Path(__file__).parents[3] / "docs/profiles/llama-70b-8xh100.json"
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
# DeepSeek-V2-Lite's sizes.
LATENTS = {
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 1408,
    "intermediate_size": 10944,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
}


def read(tmp_path, fields, tp=1):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return read_model(str(tmp_path), tp)


def kind(node, model="", cost=None, link_bytes_per_s=0.0):
    return node_kind(str(node), model, cost=cost, link_bytes_per_s=link_bytes_per_s)


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-8b", 8.03), ("llama-70b", 70.6), ("qwen3-32b", 32.8)]
)
def test_a_known_model_is_as_large_as_its_makers_say(name, billions):
    assert read_model(name, 1).weight_bytes == pytest.approx(2e9 * billions, rel=0.01)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_directory_tells_the_same_as_a_known_name(tmp_path, tp):
    found = msgspec.to_builtins(read(tmp_path, LLAMA_8B, tp))
    known = msgspec.to_builtins(read_model("llama-8b", tp))
    # Norms are left out of the table.
    for name in ("weight_bytes", "layer_params"):
        assert found.pop(name) == pytest.approx(known.pop(name), rel=1e-4)
    assert {**found, "name": ""} == {**known, "name": ""}


def test_all_experts_are_read_and_few_are_computed(tmp_path):
    # Mixtral 8x7B: 46.7 billion parameters, 12.9 of them for a token.
    experts = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    mixtral = read(tmp_path, LLAMA_8B | experts | {"vocab_size": 32000})
    assert mixtral.weight_bytes == pytest.approx(2 * 46.7e9, rel=0.01)
    assert mixtral.layer_params + 2 * mixtral.head_params == pytest.approx(12.9e9, rel=0.01)


def test_compressed_latents_count_as_what_a_page_keeps_of_them(tmp_path):
    found = read(tmp_path, LATENTS)
    assert found.kv_bytes == 27 * (512 + 64) * 2
    # 15.7 billion parameters, 2.4 of them for a token, its embedding left out.
    assert found.weight_bytes == pytest.approx(2 * 15.7e9, rel=0.01)
    assert found.layer_params + found.head_params == pytest.approx(2.4e9, rel=0.1)


@pytest.mark.parametrize("card", CARDS)
def test_more_cards_are_faster_and_hold_more(card):
    profiles = [estimate(CARDS[card], tp, read_model("llama-8b", tp)) for tp in SIZES]
    for one, other in itertools.pairwise(profiles):
        assert other.prefill.forward_s(4096, 4096) < one.prefill.forward_s(4096, 4096)
        assert other.decode.forward_s(64, 64 * 2000) < one.decode.forward_s(64, 64 * 2000)
        assert other.node.num_tokens > one.node.num_tokens
        # Links and launches cost something.
        assert other.prefill.forward_s(4096, 0) > one.prefill.forward_s(4096, 0) / 2


def test_an_estimate_follows_from_the_figures_of_the_card():
    # 6.98e9 parameters in layers through 989e12 * 0.5; 16.06e9 bytes at 3.35e12 * 0.7.
    profile = estimate(CARDS["h100"], 1, read_model("llama-8b", 1))
    assert profile.prefill.per_token_ms == pytest.approx(2 * 6.98e9 / (989e9 * 0.5), rel=0.001)
    assert profile.decode.base_ms == pytest.approx(0.5 + 16.06e9 / (3.35e9 * 0.7), rel=0.001)
    assert profile.decode.per_context_token_ms == pytest.approx(131072 / (3.35e9 * 0.7), rel=0.001)
    assert profile.node.num_tokens == pytest.approx((80e9 * 0.85 - 16.06e9) / 131072, rel=0.001)


@pytest.mark.parametrize(
    ("node", "model", "message"),
    [
        ("h100-tp1", "llama-70b", "no room for KV on 1 x H100"),
        ("h100-tp3", "llama-70b", "cannot share 8 KV heads"),
        ("h100-tp0", "llama-70b", "cannot share 8 KV heads"),
        ("h100", "/nowhere", "a name on the Hugging Face Hub .* one of llama-8b"),
        ("h100", "", "give --model"),
        ("b200", "llama-70b", "neither a file nor a card"),
        ("/nowhere.json", "", "neither a file nor a card"),
    ],
)
def test_a_node_that_cannot_be_is_refused_with_the_reason(node, model, message):
    with pytest.raises(ConfigInvalid, match=message):
        kind(node, model)


def test_what_the_engine_refuses_a_plan_refuses(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LATENTS))
    with pytest.raises(ConfigInvalid, match="--node h200-tp2: --tp 2 cannot share the KV"):
        kind("h200-tp2", str(tmp_path))


def test_a_config_without_what_an_estimate_needs_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(ConfigInvalid, match="cannot"):
        read(tmp_path, {"model_type": "llama", "hidden_size": "wide"})


def test_a_measured_profile_becomes_a_kind(tmp_path):
    figures = NodeFigures(num_tokens=5000, kv_bytes_per_token=23040, num_devices=2)
    profile = Profile(prefill=PrefillTimes(base_ms=3), node=figures)
    file = tmp_path / "mine.json"
    file.write_bytes(msgspec.json.encode(profile))
    with pytest.raises(ConfigInvalid, match="--link-gbit"):
        kind(file)
    found = kind(file, link_bytes_per_s=1e9)
    assert (found.name, found.cost, found.profile) == ("mine", 2.0, profile)
    assert kind(file, cost=7.5, link_bytes_per_s=1e9).cost == 7.5
    file.write_text('{"decode": {"base_ms": 12.5}}')
    with pytest.raises(ConfigInvalid, match="no pool and no link"):
        kind(file)
