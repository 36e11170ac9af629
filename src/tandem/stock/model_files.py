"""The facts of a model that engines do not report: its tokenizer, its end tokens, and its sampling defaults."""

from pathlib import Path
from typing import Any

import msgspec

from tandem.engine.shape import GENERATION_CONFIG
from tandem.engine.weight_files import read_object
from tandem.frontend.text.tokenizer import tokenizer_hash
from tandem.frontend.text.tokenizer_files import tokenizer_files
from tandem.node.command import default_cache_dir
from tandem.node.models.checkpoint import sampling_defaults
from tandem.node.models.hub import download, hub_model
from tandem.stock.dialect import EngineFacts
from tandem.wire.errors import ConfigInvalid
from tandem.wire.messages import ModelInfo


class ModelFiles:
    """The files of one model.

    Args:
        directory: Directory of the files; empty: the model's name on the engine is a directory here, or on the hub.

    Raises:
        ConfigInvalid: They are not there; the message says what to do.
    """

    def __init__(self, model: str, directory: str) -> None:
        path = Path(directory).expanduser() if directory else _found(model)
        if not (path / "config.json").is_file():
            where = f"{path} has no config.json" if directory else f"no files of {model} are here"
            raise ConfigInvalid(
                f"{where}: pass --tokenizer DIR, a directory with the model's config.json, "
                "generation_config.json and tokenizer files (weights are not needed)"
            )
        self._path = path
        self.tokenizer = tokenizer_files(path, cache=default_cache_dir() / "tokenizers")

    def info(self, facts: EngineFacts) -> ModelInfo:
        """Return the model for routers."""
        config: dict[str, Any] = read_object(self._path / "config.json")
        text_config = config.get("text_config") or config
        generation = self._path / GENERATION_CONFIG
        chosen = read_object(generation) if generation.is_file() else {}
        eos = chosen.get("eos_token_id", text_config.get("eos_token_id"))
        try:
            return ModelInfo(
                name=facts.name,
                aliases=facts.aliases,
                fingerprint=facts.kind,
                context_length=facts.context_length,
                vocab_size=msgspec.convert(text_config.get("vocab_size"), int),
                eos_token_ids=sorted(eos)
                if isinstance(eos, list)
                else []
                if eos is None
                else [eos],
                tokenizer_hash=tokenizer_hash(self.tokenizer) if self.tokenizer else "",
                default_sampling=sampling_defaults(self._path),
            )
        except msgspec.ValidationError as error:
            raise ConfigInvalid(
                f"{self._path / 'config.json'} has no vocab_size: pass --tokenizer DIR with the model's own files"
            ) from error


def _found(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    if named := hub_model(model):
        return download(msgspec.structs.replace(named, has_weights=False))
    return Path(model)
