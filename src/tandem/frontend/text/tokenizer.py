"""The tokenizer: converts text to token ids and back, without transformers.

Nodes send its files to routers, which have no model; see `tokenizer_files.py`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from tandem.frontend.text.chat_template import ChatTemplate, Messages
from tandem.frontend.text.detokenizer import (
    ByteLevelDetokenizer,
    CleaningDetokenizer,
    Detokenizer,
    Pieces,
    WindowDetokenizer,
    clean_up,
    sentencepiece_bytes,
)
from tandem.frontend.text.tokenizer_files import tokenizer_files
from tandem.wire.errors import ConfigInvalid

_TEMPLATE = "chat_template.jinja"
# Twice the characters of an average token in English text.
_LONG_TOKEN_CHARS = 8
# More tokens than can change near the place where a text is cut.
_CUT_TOKENS = 64


class Tokenizer:
    """The tokenizer of one model. Immutable, so threads may share it.

    Attributes:
        backend: The underlying `tokenizers` object.
        special_ids: Ids that `skip_special_tokens` omits.
        special_tokens: Special tokens by the names that templates use, such as `bos_token`.
        response_template: The template of replies that transformers' `parse_response` reads. None: the model has none.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, object]) -> None:
        self.backend = backend
        self.special_tokens = _special_tokens(config)
        backend.encode_special_tokens = bool(config.get("split_special_tokens"))
        self._cleans_up = bool(config.get("clean_up_decoded"))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.response_template = config.get("response_template")
        self._template = ChatTemplate(_templates(config), self.special_tokens)
        self._longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)))
        decoder = json.loads(backend.to_str())["decoder"]
        self._is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        # Tables by the set of ids that they omit.
        self._pieces = {ids: Pieces(backend, ids) for ids in (frozenset[int](), self.special_ids)}
        self._all_pieces = self._pieces[frozenset()]

    @classmethod
    def load(cls, directory: Path, chat_template: str = "") -> "Tokenizer":
        """Read the tokenizer files of a model directory. `chat_template` replaces the model's own."""
        files = with_chat_template(tokenizer_files(directory), chat_template)
        if not files:
            raise ConfigInvalid(f"{directory} has no tokenizer.json; copy it from the model")
        return cls.from_files(files)

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> "Tokenizer":
        """Create a tokenizer from the texts of its files by name, as `tokenizer_files` returns them."""
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
                f"tokenizer.json does not match tokenizer_config.json: {error}; copy both from the same model"
            ) from error

    def is_special(self, text: str) -> bool:
        """Return whether a text is one special token. A grammar of text never matches such a token."""
        return self.backend.token_to_id(text) in self.special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`.

        Holds the GIL for 0.4 ms per KB. Use `encode_batch` for long texts.
        """
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the ids of each text. Releases the GIL, so call it in a thread."""
        encodings = self.backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a complete list of ids. Ids outside the vocabulary have no text."""
        text = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return clean_up(text) if self._cleans_up else text

    def detokenizer(
        self, skip_special_tokens: bool = True, shown_tokens: Sequence[str] = ()
    ) -> Detokenizer:
        """Return the incremental detokenizer of a new generation. Its result equals that of `decode`.

        Args:
            shown_tokens: Special tokens that are shown although special tokens are skipped.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        if shown_tokens:
            skipped = skipped.difference(map(self.backend.token_to_id, shown_tokens))
        if self._is_byte_level:
            if skipped not in self._pieces:
                self._pieces[skipped] = Pieces(self.backend, skipped)
            return ByteLevelDetokenizer(self._pieces[skipped])
        detokenizer = WindowDetokenizer(self.backend, skipped)
        return CleaningDetokenizer(detokenizer) if self._cleans_up else detokenizer

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be part of a character.

        Ids outside the vocabulary have no bytes. Joined, the bytes of all tokens are the text's bytes, except for
        changes that a decoder makes to the complete text, such as dropping a leading space.
        """
        if self._is_byte_level:
            return self._all_pieces.bytes_of(token_id)
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else sentencepiece_bytes(token)

    def min_tokens(self, text: str, limit: int) -> int:
        """Return a lower bound of a text's number of tokens, which is good enough to refuse most texts above `limit`.

        Tokenizing 10 MB takes seconds. So the bound comes from the longest token of the vocabulary (source:
        `max_chars_per_token` of vLLM) and, for a text of twice the usual length, from its beginning.
        """
        bound, num_chars = len(text) // self._longest_token, _LONG_TOKEN_CHARS * limit
        if bound > limit or len(text) <= num_chars:
            return bound
        [ids] = self.encode_batch([text[:num_chars]], add_special_tokens=False)
        return max(bound, len(ids) - _CUT_TOKENS)

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
        """Return the prompt text of a conversation, including special tokens."""
        return self._template.render(messages, tools, add_generation_prompt, extra)

    @property
    def template_names(self) -> frozenset[str]:
        """The variables that the chat template reads, such as `enable_thinking`."""
        return self._template.names


def _read_config(files: Mapping[str, str]) -> dict[str, object]:
    """Return the content of tokenizer_config.json. The template file overrides its template."""
    try:
        config = json.loads(files.get("tokenizer_config.json", "{}"))
    except ValueError as error:
        raise ConfigInvalid(f"tokenizer_config.json is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigInvalid("tokenizer_config.json is not a JSON object")
    return config | ({"chat_template": files[_TEMPLATE]} if _TEMPLATE in files else {})


def _templates(config: Mapping[str, object]) -> dict[str, str]:
    """Return the templates by name. The config has one text or a list of `{"name", "template"}`."""
    match config.get("chat_template"):
        case str(text):
            return {"default": text}
        case list(named):
            return {str(entry["name"]): str(entry["template"]) for entry in named}
        case _:
            return {}


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Return the special tokens by name. Nodes of earlier releases send some as objects with `content`."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        match value:
            case str(token) | {"content": str(token)} if name != "chat_template":
                tokens[name] = token
            case _:
                pass
    return tokens


def with_chat_template(files: Mapping[str, str], chat_template: str) -> dict[str, str]:
    """Return the tokenizer files with `chat_template` in place of the model's own. Empty: keep the model's."""
    return {**files, _TEMPLATE: chat_template} if files and chat_template else dict(files)


def tokenizer_hash(files: Mapping[str, str]) -> str:
    """Return the hexadecimal hash of the files. Empty if there are no files."""
    if not files:
        return ""
    digest = hashlib.sha256()
    for name in sorted(files):
        data = files[name].encode()
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()
