import contextlib
import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.engine.config import EngineConfig, EngineOptions
from tandem.engine.profile import Profile, Simulation
from tandem.node import machine
from tandem.node.models import checkpoint, conversion
from tandem.node.models.checkpoint import (
    EMBEDDED_NAME,
    model_name,
    resolve_model,
    sampling_defaults,
)
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
    """Convert GGUF files in this process, which saves seconds of imports per conversion."""

    def run(command, **_how):
        with contextlib.redirect_stderr(io.StringIO()) as told:
            status = conversion.main(*command[-3:])
        return subprocess.CompletedProcess(command, status, stderr=told.getvalue())

    monkeypatch.setattr(checkpoint.subprocess, "run", run)


def refusal(path) -> str:
    with pytest.raises(ConfigInvalid) as raised:
        resolve_model(str(path), path.parent / "cache")
    assert "\n" not in raised.value.message
    return raised.value.message


def test_transformers_directory_is_used_unchanged(model_dir, tmp_path):
    assert resolve_model(str(model_dir), tmp_path / "cache") == model_dir


# ── faults of a directory ────────────────────────────────────────────────────────────────────────


def test_directory_without_weights_is_rejected_if_they_are_needed(model_dir, tmp_path):
    (model_dir / "model.safetensors").unlink()
    assert "has no weights" in refusal(model_dir)
    random = EngineOptions(load_format="dummy")
    simulated = EngineOptions(simulation=Simulation(profile=Profile(), kv="real"))
    for settings in (random, simulated):
        assert resolve_model(str(model_dir), tmp_path, settings) == model_dir


@pytest.mark.parametrize("has_config", [True, False])
def test_lora_adapter_is_rejected(model_dir, has_config):
    (model_dir / "adapter_config.json").write_text("{}")
    if not has_config:
        (model_dir / "config.json").unlink()
    said = refusal(model_dir)
    assert "LoRA adapter" in said
    assert "merge" in said


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_git_lfs_pointer_is_rejected_with_the_command_to_fetch_it(model_dir, name):
    (model_dir / name).write_text(POINTER)
    said = refusal(model_dir)
    assert name in said
    assert "git lfs pull" in said


def test_pointers_of_unneeded_files_are_ignored(model_dir, tmp_path):
    (model_dir / "pytorch_model.bin").write_text(POINTER)
    assert resolve_model(str(model_dir), tmp_path) == model_dir


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["[]", "7", "{", "", "\x00"])
def test_file_that_is_not_a_json_object_is_rejected_by_name(model_dir, name, text):
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
def test_truncated_weights_are_rejected(model_dir, damage):
    file = model_dir / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert str(file) in refusal(model_dir)
    assert "copy it again" in refusal(model_dir)


def in_two_shards(path, **weight_map):
    (path / "model.safetensors").rename(path / "a.safetensors")
    index = {"weight_map": {"lm_head.weight": "a.safetensors", **weight_map}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_index_with_a_missing_shard_is_rejected_by_name(model_dir):
    in_two_shards(model_dir, other="b.safetensors")
    said = refusal(model_dir)
    assert "lacks 1 of the 2 weight files" in said
    assert "b.safetensors" in said


def test_truncated_shard_is_rejected(model_dir, tmp_path):
    in_two_shards(model_dir)
    assert resolve_model(str(model_dir), tmp_path) == model_dir
    (model_dir / "a.safetensors").write_bytes(b"")
    assert "a.safetensors" in refusal(model_dir)


@pytest.mark.parametrize("index", ["", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_invalid_index_is_rejected(model_dir, index):
    in_two_shards(model_dir)
    (model_dir / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal(model_dir)


# ── other paths ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "a name on the Hugging Face Hub"),
        ("an-owner/a-repository", "a name on the Hugging Face Hub"),
        ("empty", "config.json"),
        ("model.bin", ".gguf"),
    ],
)
def test_path_that_is_not_a_model_is_rejected_with_a_remedy(tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(b"x")
    assert words in refusal(tmp_path / name)


@pytest.mark.parametrize("data", [b"", b"GG", b"not a model", POINTER.encode()])
def test_invalid_gguf_file_is_rejected_immediately(tmp_path, data):
    (tmp_path / "broken.gguf").write_bytes(data)
    assert "broken.gguf" in refusal(tmp_path / "broken.gguf")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("number", ["00001", "00003"])
def test_part_of_a_split_gguf_file_is_rejected_with_the_command_to_join_it(tmp_path, number):
    path = tmp_path / f"big-{number}-of-00003.gguf"
    path.write_bytes(b"GGUF")
    said = refusal(path)
    assert f"llama-gguf-split --merge big-{number}-of-00003.gguf big.gguf" in said


def test_gguf_file_of_a_single_part_is_not_rejected_as_a_part(tmp_path):
    path = tmp_path / "big-00001-of-00001.gguf"
    path.write_bytes(b"not a model")
    assert "it does not start with GGUF" in refusal(path)


@pytest.mark.filterwarnings("ignore")  # transformers warns about the file
def test_failed_conversion_leaves_no_model_directory(converts_here, tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    for data in (b"GGUF but not really", whole[: len(whole) // 2]):
        (tmp_path / "broken.gguf").write_bytes(data)
        assert "may be truncated" in refusal(tmp_path / "broken.gguf")
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_gguf_with_a_missing_tensor_is_rejected_by_name(tmp_path):
    lacking = write_gguf(tmp_path / "lacking.gguf", without="blk.1.ffn_down.weight")
    assert "model.layers.1.mlp.down_proj.weight" in refusal(lacking)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


@pytest.mark.filterwarnings("ignore")
def test_gguf_weights_are_rounded_once_to_the_requested_type(converts_here, tmp_path):
    path = write_gguf(tmp_path / "model.gguf")
    exact = torch.from_numpy(tensors()["token_embd.weight"])

    def converted(dtype) -> tuple[Path, torch.Tensor]:
        settings = EngineOptions(dtype=dtype)
        directory = resolve_model(str(path), tmp_path / "cache", settings)
        return directory, load_file(directory / "model.safetensors")["model.embed_tokens.weight"]

    found = {dtype: converted(dtype) for dtype in ("auto", "bfloat16", "float16", "float32")}
    assert found["auto"][0] == found["bfloat16"][0]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = found[str(dtype).removeprefix("torch.")][1]
        assert weight.dtype == dtype
        assert torch.equal(weight, exact.to(dtype))


@pytest.mark.filterwarnings("ignore")
def test_cpu_without_bfloat16_computes_a_gguf_in_float32(converts_here, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx2"}))
    directory = resolve_model(str(write_gguf(tmp_path / "model.gguf")), tmp_path / "cache")
    config = EngineConfig(model_dir=str(directory), device="cpu")
    assert machine.with_dtype(config).dtype == "float32"


def test_gguf_is_converted_once(embedded_model, tmp_path):
    kept = (embedded_model / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(None, embedded_model.parent) == embedded_model
    assert (embedded_model / "model.safetensors").stat().st_mtime_ns == kept


def test_model_is_named_after_its_path(tmp_path):
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
        # As in SGLang and vLLM, temperature alone decides whether sampling is greedy.
        ('{"do_sample": false}', {}),
        ('{"do_sample": false, "temperature": 0.0}', {"temperature": 0.0}),
        # vLLM uses max_new_tokens as default and limit, SGLang does not.
        ('{"max_new_tokens": 5, "eos_token_id": 2}', {}),
    ],
)
def test_generation_config_sets_the_sampling_defaults(tmp_path, text, expected):
    (tmp_path / "generation_config.json").write_text(text)
    assert sampling_defaults(tmp_path) == SamplingDefaults(**expected)


def test_model_without_generation_config_has_the_api_defaults(tmp_path):
    assert sampling_defaults(tmp_path) == SamplingDefaults()


@pytest.mark.parametrize(
    "value",
    ['"0.7"', "true", "[0.7]", "-1", "NaN", "Infinity", '{"a": 1}', "1" + "0" * 400],
)
def test_invalid_sampling_default_is_rejected_with_a_remedy(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(f'{{"temperature": {value}}}')
    with pytest.raises(ConfigInvalid, match=r"temperature.*--generation-config none"):
        sampling_defaults(tmp_path)
