"""LoRA adapters of a node. `vllm serve` reads `--lora-modules` in its API server, which a node of ours does not start."""

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from tandem.wire.errors import ConfigInvalid

_FLAG = "--lora-modules"


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--lora-modules` as `vllm serve` has it."""
    parser.add_argument(_FLAG, nargs="+", default=[])


def read_adapters(words: Sequence[str], model_name: str) -> dict[str, LoRARequest]:
    """Return the adapters by name.

    Args:
        words: Of the flag: `name=path`, or an object with `name` and `path`. A path may be a repository of the Hub.

    Raises:
        ConfigInvalid: One cannot be read, or two have one name.
    """
    adapters: dict[str, LoRARequest] = {}
    for number, word in enumerate(words, 1):
        name, path = _name_and_path(word)
        if name in adapters or name == model_name:
            raise ConfigInvalid(f"{_FLAG}: two have the name {name!r}", topic="vllm")
        folder = Path(get_adapter_absolute_path(path))
        if not (folder / "adapter_config.json").is_file():
            raise ConfigInvalid(
                f"{_FLAG}: {name!r}: there is no adapter_config.json in {folder}", topic="vllm"
            )
        adapters[name] = LoRARequest(name, number, str(folder), model_name)
    return adapters


def _name_and_path(word: str) -> tuple[str, str]:
    try:
        name, path = word.split("=", 1) if word[:1] != "{" else _of_json(word)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigInvalid(f"{_FLAG}: {word!r} is not NAME=PATH", topic="vllm") from error
    if not (name and path):
        raise ConfigInvalid(f"{_FLAG}: {word!r} is not NAME=PATH", topic="vllm")
    return name, path


def _of_json(word: str) -> tuple[str, str]:
    fields = json.loads(word)
    return str(fields["name"]), str(fields["path"])


def digest_of(adapters: Mapping[str, LoRARequest]) -> str:
    """Return a name of what the adapters contain and are called; empty: there is none."""
    if not adapters:
        return ""
    digest = hashlib.sha256()
    for name, adapter in sorted(adapters.items()):
        for file in sorted(Path(adapter.lora_path).glob("adapter_*")):
            with file.open("rb") as opened:
                content = hashlib.file_digest(opened, "sha256").hexdigest()
            digest.update(json.dumps([name, file.name, content]).encode())
    return digest.hexdigest()[:16]
