"""What is read of a model's directory beside its config."""

from types import SimpleNamespace

import pytest

from tandem.engine.shape import eos_token_ids, generation_config
from tandem.wire.errors import ConfigInvalid

CONFIG = SimpleNamespace(eos_token_id=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"eos_token_id": 7}', {7}),
        ('{"eos_token_id": [7, 8]}', {7, 8}),
        ('{"eos_token_id": null}', {2}),
        ("{}", {2}),
    ],
)
def test_an_answer_ends_at_the_ids_of_generation_config(tmp_path, text, expected):
    (tmp_path / "generation_config.json").write_text(text)
    assert eos_token_ids(tmp_path, CONFIG) == expected


def test_without_a_generation_config_those_of_the_model_count(tmp_path):
    assert eos_token_ids(tmp_path, CONFIG) == {2}
    assert eos_token_ids(tmp_path, SimpleNamespace(eos_token_id=[3, 4])) == {3, 4}
    assert eos_token_ids(tmp_path, SimpleNamespace()) == frozenset()
    assert generation_config(tmp_path) == {}


@pytest.mark.parametrize("ids", ['"2"', '["2"]', "2.5", '{"a": 2}', "true"])
def test_ids_that_are_none_are_refused(tmp_path, ids):
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    with pytest.raises(ConfigInvalid, match="eos_token_id"):
        eos_token_ids(tmp_path, CONFIG)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b""])
def test_a_generation_config_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "generation_config.json").write_bytes(text)
    with pytest.raises(ConfigInvalid, match=r"generation_config\.json"):
        generation_config(tmp_path)
