"""Text from token ids as they come: the pieces joined equal the text decoded at once.

```
 byte-level vocabularies     ids → bytes of each token → UTF-8, incomplete characters held back
 all others (sentencepiece)  ids → the tokenizer's decoder on a short window, byte runs held back
```

`tokenizers.decoders.DecodeStream` raises where a stream begins inside a character, holds a real U+FFFD
back for ever, and takes twice the time of a table of bytes with Python's own incremental decoder.
"""

import codecs
import json
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import tokenizers
from typing_extensions import override


def _alphabet() -> dict[str, int]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: 0x100 + position for position, byte in enumerate(others)}
    return {chr(stand_ins.get(byte, byte)): byte for byte in range(256)}


# The alphabet of byte-level vocabularies: a printable character for each byte.
# Source: `bytes_to_unicode` of GPT-2's encoder.py (Radford et al. 2019).
BYTE_OF_CHARACTER = _alphabet()
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """The text of one generation. Made by `Detokenizers.start`."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids. Returns the text that is now certain, maybe none."""

    def finish(self) -> str:
        """Return the text held back, with U+FFFD for what never became a character."""


class NoText:
    """The detokenizer of a model without a tokenizer: ids have no text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return nothing."""
        return ""

    def finish(self) -> str:
        """Return nothing."""
        return ""


class Detokenizers:
    """Makes detokenizers for one tokenizer, and holds the tables that they share.

    Tables are filled as ids occur: a vocabulary has 50,000 to 250,000, a model uses few.

    Args:
        backend: The tokenizer. Its vocabulary and decoder must not change.
        special_ids: Ids that `skip_special_tokens` leaves out.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: AbstractSet[int]) -> None:
        self._backend = backend
        self._skipped: dict[bool, AbstractSet[int]] = {False: frozenset(), True: special_ids}
        decoder = json.loads(backend.to_str())["decoder"]
        self._is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        self._tables = {skip: _Pieces(backend, ids) for skip, ids in self._skipped.items()}

    @override
    def __repr__(self) -> str:
        kind = "byte-level" if self._is_byte_level else "windowed"
        return f"Detokenizers({kind}, {len(self._tables[True])} ids met)"

    def start(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Return the detokenizer of a new generation."""
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._tables[skip_special_tokens])
        return WindowDetokenizer(self._backend, self._skipped[skip_special_tokens])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token by itself. None for an id that the vocabulary lacks.

        Joined, they are the text's bytes, except for what a decoder does to the whole, such as
        dropping a leading space.
        """
        if self._is_byte_level:
            return self._tables[False].bytes_of(token_id)
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(_SENTENCEPIECE_SPACE, " ").encode()


class _Pieces(dict[int, str | bytes]):
    """What each id so far stands for: text, or bytes if it begins or ends inside a character."""

    def __init__(self, backend: tokenizers.Tokenizer, skipped: AbstractSet[int]) -> None:
        super().__init__()
        self._backend = backend
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | bytes:
        token = None if token_id in self._skipped else self._backend.id_to_token(token_id)
        data = b"" if token is None else token_bytes(token)
        try:
            self[token_id] = piece = data.decode()
        except UnicodeDecodeError:
            self[token_id] = data
            return data
        return piece

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of an id."""
        piece = self[token_id]
        return piece if isinstance(piece, bytes) else piece.encode()


class ByteLevelDetokenizer:
    """Joins the bytes of tokens and holds back an incomplete character at the end."""

    __slots__ = ("_decoder", "_is_inside", "_pieces")

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        # "replace" marks maximal ill-formed runs as Unicode recommends, and as tokenizers does.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False  # a character

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids. Returns the text that is now certain."""
        pieces = self._pieces
        if len(token_ids) == 1 and not self._is_inside:
            piece = pieces[token_ids[0]]
            if isinstance(piece, str):
                return piece
        text = self._decoder.decode(b"".join([pieces.bytes_of(id_) for id_ in token_ids]))
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Return U+FFFD for a character that stayed incomplete, or nothing."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Decodes the last ids with the tokenizer's own decoder, twice: with and without the new ones.

    The window begins one token earlier, because what a decoder does to the first token (drop a
    leading space) must happen in neither or both. It ends at a token that is no byte: a run of byte
    tokens becomes text as a whole, as characters or as U+FFFD.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped: AbstractSet[int]) -> None:
        self._backend = backend
        self._skipped = skipped
        self._context: list[int] = []
        self._news: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids. Returns the text that is now certain."""
        last = None
        for token_id in token_ids:
            token = None if token_id in self._skipped else self._backend.id_to_token(token_id)
            if token is not None:
                self._news.append(token_id)
                last = token
        if last is None or _BYTE_TOKEN.fullmatch(last):
            return ""
        return self._take(is_final=False)

    def finish(self) -> str:
        """Return the text held back."""
        return self._take(is_final=True)

    def _take(self, *, is_final: bool) -> str:
        before = self._decode(self._context)
        after = self._decode(self._context + self._news)
        # A decoder that ends in a byte-level step may still wait for the rest of a character.
        if not is_final and after.endswith(_REPLACEMENT):
            return ""
        if self._news:
            self._context, self._news = self._news[-1:], []
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)


def token_bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary.

    A token with a character outside the alphabet is an added one, and stands for its own text.
    """
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()
