"""What a user calls a node, and what comes of it."""

import itertools
import json
from pathlib import Path

import msgspec
import pytest

from tandem.engine.profile import NodeFigures, PrefillTimes, Profile
from tandem.plan.cards import CARDS, SIZES, estimate
from tandem.plan.kinds import kind_of, read_profile_of
from tandem.plan.models import KNOWN, read_model
from tandem.wire.errors import ConfigInvalid

SHIPPED = Path(__file__).parents[3] / "docs/profiles/llama-70b-8xh100.json"


def config(tmp_path, **fields):
    shape = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(shape | fields))
    return str(tmp_path)


def test_a_known_model_is_as_large_as_its_makers_say():
    # 8.03, 70.6 and 32.8 billion parameters of two bytes.
    for name, billions in (("llama-8b", 8.03), ("llama-70b", 70.6), ("qwen3-32b", 32.8)):
        assert KNOWN[name].total_bytes == pytest.approx(2e9 * billions, rel=0.01)
    assert KNOWN["llama-70b"].kv_bytes_per_token == 327_680
    assert KNOWN["llama-8b"].kv_bytes_per_token == 131_072


def test_a_directory_says_the_same_as_a_known_name(tmp_path):
    found = read_model(config(tmp_path))
    assert msgspec.to_builtins(found) | {"name": ""} == msgspec.to_builtins(KNOWN["llama-8b"]) | {
        "name": ""
    }


def test_experts_are_all_read_and_few_computed(tmp_path):
    # Mixtral 8x7B: 46.7 billion parameters, 12.9 of them for a token.
    mixtral = read_model(
        config(tmp_path, num_local_experts=8, num_experts_per_tok=2, vocab_size=32000)
    )
    assert mixtral.total_bytes == pytest.approx(2 * 46.7e9, rel=0.01)
    assert mixtral.active_in_layers + 2 * mixtral.in_head == pytest.approx(12.9e9, rel=0.01)


def test_weights_are_as_large_as_their_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert read_model(config(tmp_path)).total_bytes == 1000


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_lora_rank": 512}, "compressed KV"),
        ({"torch_dtype": "int3"}, "int3"),
        ({"hidden_size": None}, "config.json does not tell"),
    ],
)
def test_a_model_that_cannot_be_estimated_is_to_be_measured(tmp_path, fields, said):
    with pytest.raises(ConfigInvalid, match=said) as raised:
        read_model(config(tmp_path, **fields))
    assert "tandem profile" in raised.value.message


def test_a_model_that_is_not_there_names_those_that_are_known():
    with pytest.raises(ConfigInvalid, match="llama-70b"):
        read_model("/nowhere")


@pytest.mark.parametrize("card", CARDS)
def test_more_cards_are_faster_and_hold_more(card):
    profiles = [estimate(card, tp, KNOWN["llama-8b"]) for tp in SIZES]
    for one, other in itertools.pairwise(profiles):
        assert other.prefill.forward_s(4096, 4096) < one.prefill.forward_s(4096, 4096)
        assert other.decode.forward_s(64, 64 * 2000) < one.decode.forward_s(64, 64 * 2000)
        assert other.node.num_tokens > one.node.num_tokens
        # Never as much faster as there are more: links, launches.
        assert other.prefill.forward_s(4096, 0) > one.prefill.forward_s(4096, 0) / 2
    assert all(p.node.is_estimated and "Worked out, not measured" in p.origin for p in profiles)


def test_the_formula_is_what_its_page_says():
    # 8.03e9 parameters less both embeddings through 989e12 * 0.5; 16.06e9 bytes at 3.35e12 * 0.7.
    profile = estimate("h100", 1, KNOWN["llama-8b"])
    assert profile.prefill.per_token_ms == pytest.approx(2 * 6.98e9 / (989e9 * 0.5), rel=0.001)
    assert profile.decode.base_ms == pytest.approx(0.5 + 16.06e9 / (3.35e9 * 0.7), rel=0.001)
    assert profile.decode.per_context_token_ms == pytest.approx(131072 / (3.35e9 * 0.7), rel=0.001)
    assert profile.node.num_tokens == pytest.approx((80e9 * 0.85 - 16.06e9) / 131072, rel=0.001)


def test_the_estimate_of_a_node_agrees_with_the_profile_of_it_that_comes_along():
    shipped = read_profile_of(str(SHIPPED), None)
    made = estimate("h100", 8, KNOWN["llama-70b"])
    assert made.decode.forward_s(64, 128_000) == pytest.approx(
        shipped.decode.forward_s(64, 128_000), rel=0.25
    )
    assert made.node.num_tokens == pytest.approx(shipped.node.num_tokens, rel=0.02)
    assert shipped.node.is_estimated


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("h100-tp1", "no room for KV beside them: give a larger tp"),
        ("h100-tp3", "cannot share evenly"),
        ("h100-tp0", "cannot share evenly"),
        ("b200", "neither a profile nor a card"),
        ("/nowhere.json", "neither a profile nor a card"),
    ],
)
def test_a_node_that_cannot_be_says_why(node, said):
    with pytest.raises(ConfigInvalid, match=said):
        read_profile_of(node, KNOWN["llama-70b"])


def test_a_card_wants_to_know_the_model():
    with pytest.raises(ConfigInvalid, match="give --model"):
        read_profile_of("h100", None)


def test_a_profile_that_says_nothing_of_its_node_is_refused(tmp_path):
    file = tmp_path / "times.json"
    file.write_text('{"decode": {"base_ms": 12.5}}')
    with pytest.raises(ConfigInvalid, match="nothing of the node's pool"):
        read_profile_of(str(file), None)


def test_a_measured_profile_becomes_a_kind(tmp_path):
    figures = NodeFigures(
        num_tokens=5000, kv_bytes_per_token=23040, num_devices=2, host_step_ms=2.0
    )
    profile = Profile(prefill=PrefillTimes(base_ms=3), node=figures)
    file = tmp_path / "mine.json"
    file.write_bytes(msgspec.json.encode(profile))
    assert read_profile_of(str(file), None) == profile
    with pytest.raises(ConfigInvalid, match="--link-gbit"):
        kind_of(str(file), profile, cost=None, link_bytes_per_s=0.0)
    kind = kind_of(str(file), profile, cost=None, link_bytes_per_s=1e9)
    assert (kind.name, kind.cost, kind.tp) == ("mine", 2.0, 2)
    assert (kind.num_tokens, kind.host_step_s, kind.link_bytes_per_s) == (5000, 0.002, 1e9)
    assert kind_of(str(file), profile, cost=7.5, link_bytes_per_s=1e9).cost == 7.5
