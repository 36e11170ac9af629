import pytest

from node.checkpoint import EMBEDDED_NAME, model_name, resolve_model, sampling_defaults
from wire.errors import ConfigInvalid
from wire.generation import SamplingDefaults


def test_a_transformers_directory_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path), tmp_path / "cache") == tmp_path


@pytest.mark.parametrize("name", ["missing", "an-owner/a-repository"])
def test_a_path_that_is_not_there_is_refused_with_what_to_give(tmp_path, name):
    with pytest.raises(ConfigInvalid, match="models are not downloaded"):
        resolve_model(str(tmp_path / name), tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigInvalid, match=r"config\.json"):
        resolve_model(str(tmp_path), tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigInvalid, match=r"\.gguf"):
        resolve_model(str(tmp_path / "model.bin"), tmp_path)


def test_a_broken_gguf_leaves_nothing_behind_that_would_be_taken_for_a_model(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    cache = tmp_path / "cache"
    with pytest.raises(ConfigInvalid, match="cannot convert"):
        resolve_model(str(tmp_path / "broken.gguf"), cache)
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_a_conversion_is_done_once(embedded_model, tmp_path):
    kept = (embedded_model / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(None, embedded_model.parent) == embedded_model
    assert (embedded_model / "model.safetensors").stat().st_mtime_ns == kept


def test_a_model_is_named_after_its_path(tmp_path):
    assert model_name(None) == EMBEDDED_NAME
    assert model_name("/models/tiny-llama/") == "tiny-llama"
    assert model_name("/models/Some.Q4.gguf") == "Some.Q4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"temperature": 0.6, "top_k": 20, "top_p": 0.95}',
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ('{"min_p": 0.1, "repetition_penalty": 1.05}', {"min_p": 0.1, "repetition_penalty": 1.05}),
        ('{"temperature": 1, "top_p": null}', {"temperature": 1.0}),
        # As SGLang and vLLM: it is the temperature that says whether an answer is greedy.
        ('{"do_sample": false}', {}),
        ('{"do_sample": false, "temperature": 0.0}', {"temperature": 0.0}),
        # vLLM takes it for a default and a limit, SGLang does not.
        ('{"max_new_tokens": 5, "eos_token_id": 2}', {}),
    ],
)
def test_a_generation_config_gives_the_sampling_defaults(tmp_path, text, expected):
    (tmp_path / "generation_config.json").write_text(text)
    assert sampling_defaults(tmp_path) == SamplingDefaults(**expected)


def test_a_model_without_a_generation_config_has_the_defaults_of_the_api(tmp_path):
    assert sampling_defaults(tmp_path) == SamplingDefaults()


@pytest.mark.parametrize(
    "value",
    ['"0.7"', "true", "[0.7]", "-1", "NaN", "Infinity", '{"a": 1}', "1" + "0" * 400],
)
def test_a_sampling_default_that_cannot_be_is_named_with_what_to_do(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(f'{{"temperature": {value}}}')
    with pytest.raises(ConfigInvalid, match=r"temperature.*--generation-config none"):
        sampling_defaults(tmp_path)
