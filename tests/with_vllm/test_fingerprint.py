"""Nodes pair if they compute the same KV and lay it out alike, wherever their checkpoints are."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.config import EngineConfig
from tandem.node.config import NodeConfig
from tests.with_vllm.models import tiny

# vLLM's dependencies raise deprecation warnings on import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny("experts", tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(model, tmp_path):
    return shutil.copytree(model, tmp_path / "copy")


@pytest.fixture
def fingerprint_of(monkeypatch):
    """Return a function from a checkpoint and flags of vLLM to the node's fingerprint."""
    from tandem.vllm import connector
    from tandem.vllm.caches import Heads
    from tandem.vllm.node.arguments import parse_arguments, vllm_config_of

    monkeypatch.setattr(connector, "layout_facts", lambda *_: {})

    def fingerprint(path, *flags, heads=None):
        monkeypatch.setattr(connector, "heads_of", lambda *_: heads or Heads())
        words = ["--skip-tokenizer-init", "--max-model-len", "512", *flags]
        engine = EngineConfig(model_dir=str(path))
        config = NodeConfig(role="decode", engine=engine, vllm_args=words)
        return connector.fingerprint(vllm_config_of(config, parse_arguments(config)), None)

    return fingerprint


def test_copies_of_a_checkpoint_pair(fingerprint_of, model, copy):
    assert fingerprint_of(model) == fingerprint_of(copy)


def test_nodes_of_different_versions_pair(fingerprint_of, model, monkeypatch):
    own = fingerprint_of(model)
    monkeypatch.setattr("tandem.vllm.connector.check_version", lambda: "0.31.0")
    assert fingerprint_of(model) == own


def test_another_revision_of_the_weights_does_not_pair(fingerprint_of, model, copy):
    [file] = copy.glob("*.safetensors")
    tensors = load_file(file)
    name = max(tensors)
    tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, file)
    assert fingerprint_of(model) != fingerprint_of(copy)


def test_shards_of_other_names_identify_the_weights(fingerprint_of, model, copy):
    [file] = copy.glob("*.safetensors")
    file.rename(copy / "consolidated.safetensors")
    renamed = fingerprint_of(copy)
    save_file({"a": torch.zeros(3)}, copy / "consolidated.safetensors")
    assert fingerprint_of(copy) != renamed


def test_another_config_does_not_pair(fingerprint_of, model, copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert fingerprint_of(model) != fingerprint_of(copy)


@pytest.mark.parametrize(
    "flags", [("--dtype", "float16"), ("--hf-overrides", '{"rms_norm_eps": 0.5}')]
)
def test_flags_that_change_the_kv_do_not_pair(fingerprint_of, model, flags):
    assert fingerprint_of(model) != fingerprint_of(model, *flags)


def test_sizes_that_must_be_equal_end_the_name(fingerprint_of, model):
    from tandem.vllm.caches import Heads

    tensor, pipeline = ("--tensor-parallel-size", "2"), ("--pipeline-parallel-size", "2")
    assert fingerprint_of(model, *tensor) == fingerprint_of(model)
    undivided = Heads(1, 2, "blocks of layout LBNHC cannot be divided", "LBNHC")
    assert fingerprint_of(model, *tensor, heads=undivided).endswith("-LBNHC-tp2")
    assert fingerprint_of(model, *pipeline).endswith("-pp2")
