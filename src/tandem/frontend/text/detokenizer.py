"""Incremental detokenization: the joined pieces equal the text of decoding all ids at once.

```
 byte-level vocabularies     ids → bytes of each token → UTF-8, incomplete characters held back
 all others (sentencepiece)  ids → the tokenizer's decoder on a short window, byte runs held back
 with clean-up               → text of one of these, without some spaces; the last characters held back
```

`tokenizers.decoders.DecodeStream` is not used: it raises if a stream starts inside a character, holds back a real
U+FFFD forever, and takes twice as long as a table of bytes with Python's incremental decoder.
"""

import codecs
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import tokenizers


def _alphabet() -> dict[str, int]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    code_points = {byte: 0x100 + position for position, byte in enumerate(unprintable)}
    return {chr(code_points.get(byte, byte)): byte for byte in range(256)}


# The alphabet of byte-level vocabularies: one printable character per byte.
# Source: `bytes_to_unicode` of GPT-2's encoder.py (Radford et al. 2019).
BYTE_OF_CHARACTER = _alphabet()
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# In this order. Source: `clean_up_tokenization` of transformers.
_CLEAN_UPS = {
    **{f" {mark}": mark for mark in ".?!,"},
    " ' ": "'",
    **{f" {ending}": ending for ending in ("n't", "'m", "'s", "'ve", "'re")},
}
# No later text can change what precedes the end of this match. A replacement starts at a space and includes at most
# three more characters, so it ends within three characters that are no spaces. And it does not go across a space, except
# " ' ", whose result may end a contraction: "  ' s", " n ' t".
_SETTLED = re.compile(r".*(?:[^ ]{3}|(?<! ')(?:(?<! )(?<! n)(?= )|(?= [^'])))", re.DOTALL)


class Detokenizer(Protocol):
    """Detokenizes one generation. Created by `Tokenizer.detokenizer`."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Process the next ids and return the text that is final now; may be empty."""

    def finish(self) -> str:
        """Return the text held back, with U+FFFD for incomplete characters."""


class NoText:
    """The detokenizer of a model without a tokenizer. All text is empty."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return an empty string."""
        return ""

    def finish(self) -> str:
        """Return an empty string."""
        return ""


class Pieces(dict[int, str | bytes]):
    """Maps each id to its text, or to bytes if it starts or ends inside a character.

    Filled on demand: a vocabulary has 50,000 to 250,000 tokens, of which a model uses few.
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

    __slots__ = ("_decoder", "_is_mid_character", "_pieces")

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        # "replace" substitutes U+FFFD for maximal ill-formed runs, as Unicode recommends and `tokenizers` does.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_mid_character = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Process the next ids and return the text that is final now."""
        pieces = self._pieces
        if len(token_ids) == 1 and not self._is_mid_character:
            piece = pieces[token_ids[0]]
            if isinstance(piece, str):
                return piece
        text = self._decoder.decode(b"".join([pieces.bytes_of(id_) for id_ in token_ids]))
        self._is_mid_character = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete, else an empty string."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Decodes a short window twice with the tokenizer's decoder, with and without the new ids.

    The window starts one token before the new ids, so that the decoder's special treatment of the first token
    (dropping a leading space) affects both results equally. It ends at a token that is not a byte token, because
    a run of byte tokens must be decoded together, to characters or to U+FFFD.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped: AbstractSet[int]) -> None:
        self._backend = backend
        self._skipped = skipped
        self._context: list[int] = []
        self._new_ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Process the next ids and return the text that is final now."""
        last = None
        for token_id in token_ids:
            token = None if token_id in self._skipped else self._backend.id_to_token(token_id)
            if token is not None:
                self._new_ids.append(token_id)
                last = token
        if last is None or _BYTE_TOKEN.fullmatch(last):
            return ""
        return self._take(is_final=False)

    def finish(self) -> str:
        """Return the text held back."""
        return self._take(is_final=True)

    def _take(self, *, is_final: bool) -> str:
        before = self._decode(self._context)
        after = self._decode(self._context + self._new_ids)
        # If the decoder has a byte-level step, U+FFFD may be a character whose remaining bytes follow.
        if not is_final and after.endswith(_REPLACEMENT):
            return ""
        if self._new_ids:
            self._context, self._new_ids = self._new_ids[-1:], []
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)


class CleaningDetokenizer:
    """Cleans up the text of another detokenizer, see `clean_up`."""

    def __init__(self, source: Detokenizer) -> None:
        self._source = source
        self._settled = self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Process the next ids and return the text that is final now."""
        self._held += self._source.push(token_ids)
        found = _SETTLED.match(self._settled + self._held)
        end = 0 if found is None else max(0, found.end() - len(self._settled))
        final, self._held = self._held[:end], self._held[end:]
        self._settled = (self._settled + final)[-3:]
        return clean_up(final)

    def finish(self) -> str:
        """Return the text held back."""
        return clean_up(self._held + self._source.finish())


def clean_up(text: str) -> str:
    """Remove spaces before punctuation and English contractions, which decoders of whole words insert."""
    for before, after in _CLEAN_UPS.items():
        text = text.replace(before, after)
    return text


def token_bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary.

    A token with a character outside the alphabet is an added token, whose text is the token itself.
    """
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Return the bytes of a token of a vocabulary that is not byte-level."""
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SENTENCEPIECE_SPACE, " ").encode()
