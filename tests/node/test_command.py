"""The options of a node become its config once the directory of its model is known."""

import pwd

import msgspec
import pytest

from tandem.engine.config import EngineConfig
from tandem.node.command import COMMANDS, with_model
from tandem.node.config import NodeConfig, NodeOptions
from tandem.node.flags import read_options
from tandem.wire.errors import ConfigInvalid


def read(*argv: str) -> NodeOptions:
    return read_options(COMMANDS["decode"].build_parser(), "decode", argv)[0]


def test_config_keeps_the_options_and_adds_the_directory(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny_model("llama"))
    options = read(
        "--model", ".", "--cache-dir", str(tmp_path), "--dtype", "float32", "--port", "1"
    )
    config = with_model(options)
    assert (config.model, config.port) == (".", 1)
    assert config.engine == EngineConfig(
        **msgspec.structs.asdict(options.engine), model_dir=config.engine.model_dir
    )
    assert msgspec.json.decode(msgspec.json.encode(config), type=NodeConfig) == config


def test_user_without_home_directory_is_told_to_set_one(tiny_model, tmp_path, monkeypatch):
    def no_entry(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigInvalid, match=r"no home directory.*set HOME or --cache-dir"):
        with_model(read("--model", str(tiny_model("llama"))))
    options = ("--model", str(tiny_model("llama")), "--dtype", "float32")
    with_model(read(*options, "--cache-dir", str(tmp_path)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with_model(read(*options))


def test_options_have_no_directory():
    assert not hasattr(read("--model", "org/name").engine, "model_dir")
    with pytest.raises(TypeError, match="model_dir"):
        EngineConfig()
    with pytest.raises(TypeError, match="engine"):
        NodeConfig(role="decode")


def test_config_with_an_empty_directory_is_refused_by_the_engine():
    config = NodeConfig(role="decode", engine=EngineConfig(model_dir=""))
    with pytest.raises(msgspec.ValidationError, match="model_dir"):
        msgspec.json.decode(msgspec.json.encode(config), type=NodeConfig)
