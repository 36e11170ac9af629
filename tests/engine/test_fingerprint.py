"""Fingerprints distinguish weights, because page keys outlive a node."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.config import EngineConfig
from tandem.engine.model.loading import load_model
from tandem.wire.errors import ConfigInvalid


def fingerprint_of(path) -> str:
    return load_model(EngineConfig(model_dir=str(path), dtype="float32"))[1].fingerprint


@pytest.fixture
def model_dir(tiny_model, tmp_path):
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


def in_safetensors(path, change=None):
    (file,) = path.glob("*.safetensors")
    weights = load_file(file)
    if change:
        weights[change] *= 1.01
    # More than 1 MiB at both ends of the file.
    save_file({**weights, "0.before": filler(), "zz.behind": filler()}, file, {"format": "pt"})


def in_an_archive(path, change=None):
    archive = path / "pytorch_model.bin"
    if not archive.exists():
        (file,) = path.glob("*.safetensors")
        torch.save(load_file(file), archive)
        file.unlink()
    weights = torch.load(archive)
    if change:
        weights[change] *= 1.01
    torch.save({**weights, "zz.behind": filler()}, archive)


def in_shards(path, change=None):
    (file, *_) = path.glob("*.safetensors")
    weights = {}
    for file in path.glob("*.safetensors"):
        weights |= load_file(file)
        file.unlink()
    if change:
        weights[change] *= 1.01
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, own in shards.items():
        save_file({name: weights[name] for name in own}, path / shard, {"format": "pt"})
    where = {name: shard for shard, own in shards.items() for name in own}
    index = {"metadata": {}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def beside_others(path, change=None):
    """Weight files that are loaded, and one that is not."""
    in_an_archive(path, change)
    save_file({"other": filler()}, path / "adapter.safetensors")


def filler() -> torch.Tensor:
    return torch.zeros(1 << 19)


@pytest.mark.parametrize("write", [in_safetensors, in_an_archive, in_shards, beside_others])
def test_one_changed_tensor_changes_the_fingerprint(model_dir, write):
    write(model_dir)
    before = fingerprint_of(model_dir)
    write(model_dir)
    assert fingerprint_of(model_dir) == before
    write(model_dir, "model.layers.0.mlp.down_proj.weight")
    assert fingerprint_of(model_dir) != before


def test_one_changed_tensor_of_a_legacy_pickle_changes_the_fingerprint(model_dir):
    in_an_archive(model_dir)
    archive = model_dir / "pytorch_model.bin"
    weights = torch.load(archive)
    torch.save(weights, archive, _use_new_zipfile_serialization=False)
    before = fingerprint_of(model_dir)
    trained = weights["model.layers.0.mlp.down_proj.weight"]
    old, new = (each.numpy().tobytes() for each in (trained, trained * 1.01))
    assert archive.read_bytes().count(old) == 1
    archive.write_bytes(archive.read_bytes().replace(old, new))
    assert fingerprint_of(model_dir) != before


def test_file_without_weights_is_refused_by_name(model_dir):
    (file,) = model_dir.glob("*.safetensors")
    file.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ConfigInvalid, match=str(model_dir)):
        load_model(EngineConfig(model_dir=str(model_dir), dtype="float32"))
