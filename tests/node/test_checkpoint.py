import contextlib
import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.engine.config import EngineConfig
from tandem.engine.profile import Profile, Simulation
from tandem.node import checkpoint
from tandem.node.checkpoint import EMBEDDED_NAME, model_name, resolve_model, sampling_defaults
from tandem.wire.errors import ConfigInvalid
from tandem.wire.generation import SamplingDefaults
from tests.tiny_gguf import tensors, write_gguf

POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""


@pytest.fixture
def model_dir(tiny_model, tmp_path):
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


@pytest.fixture
def converts_here(monkeypatch):
    """Convert GGUF files in this process: one of its own imports transformers first, for seconds."""

    def run(command, **_how):
        with contextlib.redirect_stderr(io.StringIO()) as told:
            status = checkpoint.main(*command[-3:])
        return subprocess.CompletedProcess(command, status, stderr=told.getvalue())

    monkeypatch.setattr(checkpoint.subprocess, "run", run)


def refusal(path) -> str:
    with pytest.raises(ConfigInvalid) as raised:
        resolve_model(str(path), path.parent / "cache")
    assert "\n" not in raised.value.message
    return raised.value.message


def test_a_transformers_directory_is_taken_as_it_is(model_dir, tmp_path):
    assert resolve_model(str(model_dir), tmp_path / "cache") == model_dir


# ── what is wrong with a directory at first sight ────────────────────────────────────────────────


def test_a_directory_without_weights_is_refused_where_they_are_to_be_loaded(model_dir, tmp_path):
    (model_dir / "model.safetensors").unlink()
    assert "has no weights" in refusal(model_dir)
    random = EngineConfig(model_dir="", load_format="dummy")
    simulated = EngineConfig(model_dir="", simulation=Simulation(profile=Profile(), kv="real"))
    for settings in (random, simulated):
        assert resolve_model(str(model_dir), tmp_path, settings) == model_dir


@pytest.mark.parametrize("has_config", [True, False])
def test_a_lora_adapter_is_refused_as_one(model_dir, has_config):
    (model_dir / "adapter_config.json").write_text("{}")
    if not has_config:
        (model_dir / "config.json").unlink()
    said = refusal(model_dir)
    assert "LoRA adapter" in said
    assert "merge" in said


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_refused_with_what_fetches_the_file(model_dir, name):
    (model_dir / name).write_text(POINTER)
    said = refusal(model_dir)
    assert name in said
    assert "git lfs pull" in said


def test_pointers_to_files_that_are_not_needed_do_not_matter(model_dir, tmp_path):
    (model_dir / "pytorch_model.bin").write_text(POINTER)
    assert resolve_model(str(model_dir), tmp_path) == model_dir


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["[]", "7", "{", "", "\x00"])
def test_a_file_that_is_no_json_object_is_refused_by_its_name(model_dir, name, text):
    (model_dir / name).write_text(text)
    assert str(model_dir / name) in refusal(model_dir)


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, size=size: data[:size] for size in (0, 5, 100, 1000, -1)),
        *(
            lambda _, header=header: len(header).to_bytes(8, "little") + header
            for header in (b"[]", b"{}x", b'{"a": 1}', b'{"a": {"data_offsets": "0"}}')
        ),
    ],
)
def test_weights_that_were_not_copied_whole_are_refused(model_dir, damage):
    file = model_dir / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert str(file) in refusal(model_dir)
    assert "copy it again" in refusal(model_dir)


def in_two_shards(path, **weight_map):
    (path / "model.safetensors").rename(path / "a.safetensors")
    index = {"weight_map": {"lm_head.weight": "a.safetensors", **weight_map}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_an_index_that_names_a_shard_that_is_not_there_is_refused_with_its_name(model_dir):
    in_two_shards(model_dir, other="b.safetensors")
    said = refusal(model_dir)
    assert "lacks 1 of the 2 files" in said
    assert "b.safetensors" in said


def test_a_shard_that_was_not_copied_whole_is_refused(model_dir, tmp_path):
    in_two_shards(model_dir)
    assert resolve_model(str(model_dir), tmp_path) == model_dir
    (model_dir / "a.safetensors").write_bytes(b"")
    assert "a.safetensors" in refusal(model_dir)


@pytest.mark.parametrize("index", ["", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(model_dir, index):
    in_two_shards(model_dir)
    (model_dir / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal(model_dir)


# ── what is no directory ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "a name on the Hugging Face Hub"),
        ("an-owner/a-repository", "a name on the Hugging Face Hub"),
        ("empty", "config.json"),
        ("model.bin", ".gguf"),
    ],
)
def test_what_is_no_model_is_refused_with_what_to_give(tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(b"x")
    assert words in refusal(tmp_path / name)


@pytest.mark.parametrize("data", [b"", b"GG", b"not a model", POINTER.encode()])
def test_what_is_no_gguf_in_spite_of_its_name_is_refused_at_once(tmp_path, data):
    (tmp_path / "broken.gguf").write_bytes(data)
    assert "broken.gguf" in refusal(tmp_path / "broken.gguf")
    assert not (tmp_path / "cache").exists()


@pytest.mark.filterwarnings("ignore")  # of transformers, about the file
def test_a_broken_gguf_leaves_nothing_behind_that_would_be_taken_for_a_model(
    converts_here, tmp_path
):
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    for data in (b"GGUF but not really", whole[: len(whole) // 2]):
        (tmp_path / "broken.gguf").write_bytes(data)
        assert "may not have been copied whole" in refusal(tmp_path / "broken.gguf")
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_a_gguf_that_lacks_a_tensor_is_refused_by_its_name(tmp_path):
    lacking = write_gguf(tmp_path / "lacking.gguf", without="blk.1.ffn_down.weight")
    assert "model.layers.1.mlp.down_proj.weight" in refusal(lacking)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


@pytest.mark.filterwarnings("ignore")
def test_weights_of_a_gguf_are_rounded_to_no_smaller_type_than_was_asked_for(
    converts_here, tmp_path
):
    path = write_gguf(tmp_path / "model.gguf")
    exact = torch.from_numpy(tensors()["token_embd.weight"])

    def converted(dtype) -> tuple[Path, torch.Tensor]:
        settings = EngineConfig(model_dir="", dtype=dtype)
        directory = resolve_model(str(path), tmp_path / "cache", settings)
        return directory, load_file(directory / "model.safetensors")["model.embed_tokens.weight"]

    found = {dtype: converted(dtype) for dtype in ("auto", "bfloat16", "float16", "float32")}
    assert found["auto"][0] == found["bfloat16"][0]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = found[str(dtype).removeprefix("torch.")][1]
        assert weight.dtype == dtype
        assert torch.equal(weight, exact.to(dtype))


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
