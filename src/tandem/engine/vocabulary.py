"""Token ids in the files of a tokenizer. Text is tokenized elsewhere; the engine only needs ids."""

from pathlib import Path
from typing import Any, TypedDict, TypeVar

import msgspec

from tandem.engine.weight_files import read_object
from tandem.wire.errors import ConfigInvalid

T = TypeVar("T")


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str = ""


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class Vocabulary(msgspec.Struct, frozen=True):
    """The fields of tokenizer.json that define ids. The others, mainly merges, are skipped without parsing."""

    model: _Model = _Model()
    added_tokens: list[_AddedToken] = []

    @property
    def ordinary_ids(self) -> set[int]:
        """Ids of all tokens except added ones."""
        vocab = self.model.vocab
        ids = set(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
        return ids - {token.id for token in self.added_tokens}

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None if there is no such token."""
        added = {each.content: each.id for each in self.added_tokens}
        vocab = self.model.vocab
        names = vocab if isinstance(vocab, dict) else {name: i for i, (name, _) in enumerate(vocab)}
        return added.get(token, names.get(token))


def read_vocabulary(model_dir: Path) -> Vocabulary | None:
    """Return the vocabulary of a model's tokenizer.json; None if there is no such file."""
    file = model_dir / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Vocabulary)
    except msgspec.DecodeError as error:
        raise ConfigInvalid(f"{file} cannot be read: {error}") from error


class _Declared(msgspec.Struct, frozen=True):
    content: str


class _Config(TypedDict, total=False):
    """The keys of tokenizer_config.json and special_tokens_map.json that define the end."""

    eos_token: Any
    added_tokens_decoder: dict[int, _Declared] | None


def tokenizer_end(model_dir: Path) -> int | None:
    """Return the id of the tokenizer's `eos_token`; None if it has none.

    Raises:
        ConfigInvalid: A file of the tokenizer is not valid JSON, or its added tokens lack names or ids.
    """
    special = _converted(model_dir / "special_tokens_map.json", _Config)
    config = special | _converted(model_dir / "tokenizer_config.json", _Config)
    added = _converted(model_dir / "added_tokens.json", dict[str, int])
    match config.get("eos_token"):
        case str(token) | {"content": str(token)}:
            vocabulary = read_vocabulary(model_dir)
        case _:
            return None
    if vocabulary is None:
        return None
    declared = config.get("added_tokens_decoder") or {}
    others = {each.content: id_ for id_, each in declared.items()} | added
    found = vocabulary.id_of(token)
    return others.get(token) if found is None else found


def _converted(file: Path, kind: type[T]) -> T:
    content = read_object(file) if file.is_file() else {}
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigInvalid(f"{file} cannot be read: {error}") from error
