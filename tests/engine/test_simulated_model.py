"""What a simulation reads of a model, against what loading it finds."""

import json
import shutil
from dataclasses import replace

import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.model import load_model
from tandem.engine.simulated_model import read_model
from tandem.wire.errors import ConfigInvalid
from tests.tiny_models import CONFIGS, CONTEXT_LENGTH


def config(path, **settings) -> EngineConfig:
    return EngineConfig(model_dir=str(path), **settings)


def write_config(directory, **facts):
    (directory / "config.json").write_text(json.dumps(facts))
    return directory


@pytest.mark.parametrize("kind", sorted(CONFIGS))
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_the_shape_is_the_models_without_its_weights(tiny_model, tmp_path, kind, kv_cache_dtype):
    for file in tiny_model(kind).glob("*.json"):
        shutil.copy(file, tmp_path)
    settings = {"kv_cache_dtype": kv_cache_dtype, "context_length": 100}
    loaded = load_model(config(tiny_model(kind), **settings))[1]
    shape, _ = read_model(config(tmp_path, **settings), "real")
    assert replace(shape, fingerprint="") == replace(loaded, fingerprint="", model_kv_heads=0)


def test_where_the_config_is_silent_its_architecture_speaks(tmp_path):
    write_config(tmp_path, model_type="gpt2", n_layer=3, n_head=4, n_embd=64, n_positions=128)
    shape, _ = read_model(config(tmp_path), "real")
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (3, 4, 16)
    assert shape.context_length == 128


def test_without_kv_a_token_has_two_bytes_and_all_else_is_the_models(tiny_model):
    path = tiny_model("llama")
    real, ordinary = read_model(config(path), "real")
    none, same = read_model(config(path), "none")
    assert none.kv_bytes_per_token == 2
    assert (none.vocab_size, none.context_length) == (real.vocab_size, CONTEXT_LENGTH)
    assert ordinary.tolist() == same.tolist()
    assert none.fingerprint != real.fingerprint, "their pages cannot be pushed into each other"


def test_answers_are_made_of_what_the_tokenizer_calls_words(embedded_model):
    facts = json.loads((embedded_model / "tokenizer.json").read_text())
    marks = {token["id"] for token in facts["added_tokens"]}
    shape, ordinary = read_model(config(embedded_model), "real")
    assert set(ordinary.tolist()) == set(range(shape.vocab_size)) - marks
    assert shape.eos_token_ids <= marks


def test_without_a_tokenizer_all_but_the_end_is_a_word(tiny_model):
    shape, ordinary = read_model(config(tiny_model("llama")), "real")
    assert set(ordinary.tolist()) == set(range(shape.vocab_size)) - {2}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"model_type": "unheard-of"}, "cannot tell the shape"),
        ({"torch_dtype": "int3"}, "dtype int3"),
        ({"max_position_embeddings": 50}, "--context-length 64"),
    ],
)
def test_a_config_that_cannot_work_is_refused_with_what_to_do(tmp_path, facts, words):
    whole = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "vocab_size": 9,
        "max_position_embeddings": 64,
    }
    write_config(tmp_path, **(facts if "model_type" in facts else whole | facts))
    with pytest.raises(ConfigInvalid, match=words):
        read_model(config(tmp_path, context_length=64), "real")
