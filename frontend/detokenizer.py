"""Text from token ids as they come: the pieces joined equal the text decoded at once.

```
 byte-level vocabularies     ids → bytes of each token → UTF-8, incomplete characters held back
 all others (sentencepiece)  ids → the tokenizer's decoder on a short window, byte runs held back
```

`tokenizers.decoders.DecodeStream` raises where a stream begins inside a character, holds a real U+FFFD
back for ever, and takes twice the time of a table of bytes with Python's own incremental decoder.
"""

import codecs
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import tokenizers


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
    """The text of one generation. Made by `Tokenizer.detokenizer`."""

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


class Pieces(dict[int, str | bytes]):
    """What each id stands for: text, or bytes if it begins or ends inside a character.

    It is filled as ids occur: a vocabulary has 50,000 to 250,000, a model uses few.
    """

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

    def __init__(self, pieces: Pieces) -> None:
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


def sentencepiece_bytes(token: str) -> bytes:
    """Return the bytes of a token of any other vocabulary."""
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SENTENCEPIECE_SPACE, " ").encode()
