"""Reads `--lora-modules`, the LoRA adapters of a node. vLLM reads them in its API server, which nodes do not start."""

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
        words: Values of the flag: `name=path`, or a JSON object with `name` and `path`. A path may be a Hub repository.

    Raises:
        ConfigInvalid: An adapter cannot be read, or a name is used twice.
    """
    adapters: dict[str, LoRARequest] = {}
    for number, word in enumerate(words, 1):
        name, path = _name_and_path(word)
        if name in adapters or name == model_name:
            raise ConfigInvalid(
                f"{_FLAG}: the name {name!r} is used twice; rename one", topic="docs/vllm.md"
            )
        folder = Path(get_adapter_absolute_path(path))
        if not (folder / "adapter_config.json").is_file():
            raise ConfigInvalid(
                f"{_FLAG}: {name!r}: no adapter_config.json in {folder}; check the path",
                topic="docs/vllm.md",
            )
        adapters[name] = LoRARequest(name, number, str(folder), model_name)
    return adapters


def _name_and_path(word: str) -> tuple[str, str]:
    try:
        name, path = word.split("=", 1) if word[:1] != "{" else _of_json(word)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigInvalid(f"{_FLAG}: {word!r} is not NAME=PATH", topic="docs/vllm.md") from error
    if not (name and path):
        raise ConfigInvalid(f"{_FLAG}: {word!r} is not NAME=PATH", topic="docs/vllm.md")
    return name, path


def _of_json(word: str) -> tuple[str, str]:
    fields = json.loads(word)
    return str(fields["name"]), str(fields["path"])


def digest_of(adapters: Mapping[str, LoRARequest]) -> str:
    """Hash the names and contents of the adapters; empty if there are none."""
    if not adapters:
        return ""
    digest = hashlib.sha256()
    for name, adapter in sorted(adapters.items()):
        for file in sorted(Path(adapter.lora_path).glob("adapter_*")):
            with file.open("rb") as opened:
                content = hashlib.file_digest(opened, "sha256").hexdigest()
            digest.update(json.dumps([name, file.name, content]).encode())
    return digest.hexdigest()[:16]
