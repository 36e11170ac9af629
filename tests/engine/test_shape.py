"""Values read from a model's directory in addition to its config."""

import json
from types import SimpleNamespace

import pytest

from tandem.engine.shape import eos_token_ids, generation_config
from tandem.wire.errors import ConfigInvalid

CONFIG = SimpleNamespace(eos_token_id=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"eos_token_id": 7}', {7}),
        ('{"eos_token_id": 0}', {0}),
        ('{"eos_token_id": []}', set()),
        ('{"eos_token_id": [7, 8]}', {7, 8}),
        ('{"eos_token_id": null}', {2}),
        ("{}", {2}),
    ],
)
def test_eos_ids_come_from_generation_config(tmp_path, text, expected):
    (tmp_path / "generation_config.json").write_text(text)
    assert eos_token_ids(tmp_path, CONFIG) == expected


def test_eos_ids_default_to_the_model_config(tmp_path):
    assert eos_token_ids(tmp_path, CONFIG) == {2}
    assert eos_token_ids(tmp_path, SimpleNamespace(eos_token_id=[3, 4])) == {3, 4}
    assert eos_token_ids(tmp_path, SimpleNamespace()) == frozenset()
    assert generation_config(tmp_path) == {}


TOKENIZER = {
    "model": {"vocab": {"a": 0, "</s>": 3}, "merges": []},
    "added_tokens": [{"id": 5, "content": "<|im_end|>", "special": True}],
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token": "<|im_end|>"}, {2, 5}),
        ({"eos_token": {"content": "<|im_end|>"}}, {2, 5}),
        ({"eos_token": "</s>"}, {2, 3}),
        ({"eos_token": "a"}, {0, 2}),
        ({"eos_token": "<end>", "added_tokens_decoder": {"6": {"content": "<end>"}}}, {2, 6}),
        ({"eos_token": "missing"}, {2}),
        ({"eos_token": None}, {2}),
        ({}, {2}),
    ],
)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_end_of_the_tokenizer_is_an_end_too(tmp_path, file, config, expected):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / file).write_text(json.dumps(config))
    assert eos_token_ids(tmp_path, CONFIG) == expected


def test_end_of_a_unigram_tokenizer_is_its_position(tmp_path):
    unigram = {"model": {"vocab": [["<unk>", 0.0], ["</s>", -1.0]]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert eos_token_ids(tmp_path, CONFIG) == {1, 2}


def test_end_of_the_tokenizer_may_be_in_added_tokens(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (tmp_path / "added_tokens.json").write_text('{"<end>": 6}')
    assert eos_token_ids(tmp_path, CONFIG) == {2, 6}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"6": {"special": True}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"6": {"content": 6}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"6": ["<end>"]}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"six": {"content": "<end>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": [{"content": "<end>"}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": []}),
        ("special_tokens_map.json", {"added_tokens_decoder": {"6": {}}}),
        ("added_tokens.json", {"<end>": "6"}),
        ("added_tokens.json", {"<end>": None}),
    ],
)
def test_invalid_added_tokens_are_refused_by_their_file(tmp_path, file, content):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    end = {} if file == "added_tokens.json" else {"eos_token": "<end>"}
    if not end:
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (tmp_path / file).write_text(json.dumps(end | content))
    with pytest.raises(ConfigInvalid, match=f"{file} cannot be read"):
        eos_token_ids(tmp_path, CONFIG)


def test_end_of_a_tokenizer_without_tokenizer_json_is_ignored(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert eos_token_ids(tmp_path, CONFIG) == {2}


@pytest.mark.parametrize("ids", ['"2"', '["2"]', "2.5", '{"a": 2}', "true"])
def test_invalid_eos_ids_are_refused(tmp_path, ids):
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    with pytest.raises(ConfigInvalid, match="eos_token_id"):
        eos_token_ids(tmp_path, CONFIG)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b""])
def test_generation_config_that_is_not_a_json_object_is_refused(tmp_path, text):
    (tmp_path / "generation_config.json").write_bytes(text)
    with pytest.raises(ConfigInvalid, match=r"generation_config\.json"):
        generation_config(tmp_path)
