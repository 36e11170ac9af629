"""Text to token ids and back, from a model's tokenizer files, without transformers.

Nodes serve the files to routers without a model.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import processors

from tandem.frontend.chat_template import ChatTemplate, Messages
from tandem.frontend.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    Pieces,
    WindowDetokenizer,
    sentencepiece_bytes,
)
from tandem.wire.errors import ConfigInvalid

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

_TEMPLATE = "chat_template.jinja"
# Only these names are ever read.
TOKENIZER_FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    _TEMPLATE,
    "chat_template.json",
)
# The beginning of what git checks out in place of a file that it did not fetch.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Gemma 3's tokenizer.json, among the largest published, is 33 MB.
MAX_FILE_BYTES = 64 * 1024 * 1024


class Tokenizer:
    """One model's tokenizer. It never changes, so threads may share it.

    Attributes:
        backend: The `tokenizers` object beneath.
        special_ids: Ids that `skip_special_tokens` leaves out.
        special_tokens: `bos_token` and its like, as templates name them.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, object]) -> None:
        self.backend = backend
        self.special_tokens = _special_tokens(config)
        _add_bos_and_eos(backend, config, self.special_tokens)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._template = ChatTemplate(_templates(config), self.special_tokens)
        self._longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)))
        decoder = json.loads(backend.to_str())["decoder"]
        self._is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        # By the ids that they leave out.
        self._pieces = {ids: Pieces(backend, ids) for ids in (frozenset[int](), self.special_ids)}
        self._all_pieces = self._pieces[frozenset()]

    @classmethod
    def load(cls, directory: Path, chat_template: str = "") -> "Tokenizer":
        """Read the tokenizer files of a model directory. `chat_template` replaces the model's own."""
        files = with_chat_template(tokenizer_files(directory), chat_template)
        if not files:
            raise ConfigInvalid(f"{directory} has no tokenizer.json")
        return cls.from_files(files)

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> "Tokenizer":
        """Make a tokenizer of file texts by name, as `tokenizer_files` returns them."""
        config = _read_config(files)
        try:
            backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
            backend.no_padding()
            backend.no_truncation()
            return cls(backend, config)
        except ConfigInvalid:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigInvalid(
                f"tokenizer.json cannot be used with tokenizer_config.json: {error}; copy both again from one model"
            ) from error

    def is_special(self, text: str) -> bool:
        """Return whether a text is one special token, which no grammar of text allows."""
        return self.backend.token_to_id(text) in self.special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`.

        It holds the interpreter's lock for 0.4 ms a KB. Use `encode_batch` for long texts.
        """
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the ids of each text. It releases the interpreter's lock: call it in a thread."""
        encodings = self.backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of all ids at once. Ids that the vocabulary lacks have no text."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self, skip_special_tokens: bool = True, shown_tokens: Sequence[str] = ()
    ) -> Detokenizer:
        """Return the detokenizer of a new generation: `decode`, as tokens come.

        Args:
            shown_tokens: Special tokens that are not skipped.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        if shown_tokens:
            skipped = skipped.difference(map(self.backend.token_to_id, shown_tokens))
        if self._is_byte_level:
            if skipped not in self._pieces:
                self._pieces[skipped] = Pieces(self.backend, skipped)
            return ByteLevelDetokenizer(self._pieces[skipped])
        return WindowDetokenizer(self.backend, skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token by itself, which may be part of a character.

        An id that the vocabulary lacks has none. Joined, they are the text's bytes, except for what a
        decoder does to the whole, such as dropping a leading space.
        """
        if self._is_byte_level:
            return self._all_pieces.bytes_of(token_id)
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else sentencepiece_bytes(token)

    def least_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least: each stands for so many characters at most.

        A text of 10 MB takes seconds to tokenize. Source: `max_chars_per_token` of vLLM.
        """
        return len(text) // self._longest_token

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return not self._template.is_missing

    def render_chat(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt text of a conversation, special tokens included."""
        return self._template.render(messages, tools, add_generation_prompt, extra)

    @property
    def template_names(self) -> frozenset[str]:
        """The names that the chat template reads, such as `enable_thinking`."""
        return self._template.names


def _read_config(files: Mapping[str, str]) -> dict[str, object]:
    """Merge the JSON files, later ones over earlier, and the template file over all."""
    config: dict[str, object] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json", "chat_template.json"):
        try:
            part = json.loads(files.get(name, "{}"))
        except ValueError as error:
            raise ConfigInvalid(f"{name} is not JSON: {error}") from error
        if not isinstance(part, dict):
            raise ConfigInvalid(f"{name} is not a JSON object")
        config |= part
    if _TEMPLATE in files:
        config["chat_template"] = files[_TEMPLATE]
    return config


def _templates(config: Mapping[str, object]) -> dict[str, str]:
    """Return templates by name: one text, or a list of `{"name", "template"}`."""
    match config.get("chat_template"):
        case str(text):
            return {"default": text}
        case list(named):
            return {str(entry["name"]): str(entry["template"]) for entry in named}
        case _:
            return {}


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Return the named special tokens; each is a string, or an object with its content."""
    found: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        match config.get(name):
            case str(token) | {"content": str(token)}:
                found[name] = token
            case _:
                pass
    return found


def _add_bos_and_eos(
    backend: tokenizers.Tokenizer, config: Mapping[str, object], tokens: Mapping[str, str]
) -> None:
    """Let `add_bos_token` and `add_eos_token` overrule tokenizer.json, as transformers does."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    bos = tokens.get("bos_token") if config.get("add_bos_token") else None
    eos = tokens.get("eos_token") if config.get("add_eos_token") else None
    backend.post_processor = processors.TemplateProcessing(
        single=[part for part in (bos, "$A", eos) if part],
        pair=None,
        special_tokens=[(token, backend.token_to_id(token)) for token in (bos, eos) if token],
    )


def tokenizer_files(directory: Path) -> dict[str, str]:
    """Return the text of each tokenizer file in `directory`, or nothing if it has no tokenizer."""
    if not (directory / "tokenizer.json").is_file():
        return {}
    paths = [directory / name for name in TOKENIZER_FILE_NAMES]
    return {path.name: _read_file(path) for path in paths if path.is_file()}


def with_chat_template(files: Mapping[str, str], chat_template: str) -> dict[str, str]:
    """Return tokenizer files with another chat template; empty: with the model's own."""
    return {**files, _TEMPLATE: chat_template} if files and chat_template else dict(files)


def _read_file(path: Path) -> str:
    try:
        data = path.read_bytes()
        if len(data) > MAX_FILE_BYTES:
            raise ConfigInvalid(
                f"{path.name} has {len(data)} bytes; at most {MAX_FILE_BYTES} are taken"
            )
        if data.startswith(_LFS_POINTER):
            raise ConfigInvalid(
                f"in {path.parent} git has put a Git LFS pointer in place of {path.name}: run `git lfs pull` there"
            )
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path} cannot be read as text: {error}") from error


def tokenizer_hash(files: Mapping[str, str]) -> str:
    """Return the hash of these files, in hexadecimal; empty for no files."""
    if not files:
        return ""
    digest = hashlib.sha256()
    for name in sorted(files):
        data = files[name].encode()
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()
