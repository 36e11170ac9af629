"""What a model takes, by its configuration alone, and by the numbers that a node uses."""

import shutil

import pytest
from safetensors.torch import load_file

from tandem.doctor.machine import read_model
from tandem.engine.config import EngineConfig
from tandem.engine.model import load_model, model_needs
from tandem.wire.errors import ConfigInvalid

# 3 layers of 2 KV heads of 16 elements of float32, K and V.
TOKEN_BYTES = 3 * 2 * 16 * 4 * 2


def test_the_numbers_are_those_of_the_loaded_model(tiny_model, tmp_path):
    directory = tiny_model("llama")
    settings = EngineConfig(model_dir=str(directory), max_total_tokens=4096)
    needs = model_needs(settings)
    assert needs.shape == load_model(settings)[1]
    stored = load_file(directory / "model.safetensors").values()
    assert needs.weight_bytes == sum(each.numel() * each.itemsize for each in stored)
    facts = read_model(settings, tmp_path)
    assert (facts.name, facts.dtype) == (directory.name, "float32")
    assert (facts.kv_bytes_per_token, facts.num_tokens) == (TOKEN_BYTES, 4096)
    assert facts.pool_bytes == 4096 * TOKEN_BYTES


def test_weights_are_not_read(tiny_model, tmp_path):
    shutil.copy(tiny_model("llama") / "config.json", tmp_path)
    facts = read_model(EngineConfig(model_dir=str(tmp_path), dtype="bfloat16"), tmp_path)
    assert facts.kv_bytes_per_token == TOKEN_BYTES // 2
    assert facts.num_tokens == (1 << 30) // (16 * TOKEN_BYTES // 2) * 16  # of 1 GiB


def test_ranks_share_the_pool(tiny_model, tmp_path):
    settings = EngineConfig(model_dir=str(tiny_model("llama")), tp_size=2, max_total_tokens=160)
    facts = read_model(settings, tmp_path)
    assert (facts.pool_bytes, facts.kv_bytes_per_token) == (160 * TOKEN_BYTES, TOKEN_BYTES)
    with pytest.raises(ConfigInvalid, match="--tp 3 cannot share"):
        read_model(EngineConfig(model_dir=str(tiny_model("llama")), tp_size=3), tmp_path)


def test_a_model_that_no_node_could_serve_is_refused_as_a_node_would(tiny_model, tmp_path):
    def refusal(path) -> str:
        with pytest.raises(ConfigInvalid) as raised:
            read_model(EngineConfig(model_dir=str(path)), tmp_path)
        return raised.value.message

    assert "models are not downloaded" in refusal(tmp_path / "absent")
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (directory / "tokenizer.json").write_text("{}")
    assert "tokenizer.json cannot be used" in refusal(directory)
    (directory / "tokenizer.json").unlink()
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    assert "not copied whole" in refusal(directory)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").unlink()
    assert "cannot load the model" in refusal(directory)
