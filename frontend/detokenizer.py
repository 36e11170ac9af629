"""Text from token ids as they come: the pieces joined equal the text decoded at once.

```
 byte-level vocabularies     ids → bytes of each token → UTF-8, incomplete characters held back
 all others (sentencepiece)  ids → the tokenizer's decoder on a short window, byte runs held back
```

`tokenizers.decoders.DecodeStream` is not used: it raises where a stream begins inside a character,
holds a real U+FFFD back for ever, and does not know of the end. A table of bytes and Python's own
incremental decoder are right there, and take half its time.
"""

import codecs
import contextlib
import json
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import tokenizers
from typing_extensions import override

from tandem.frontend.byte_level import token_bytes

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """The text of one generation. Made by `Detokenizers.start`."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is now certain, maybe none."""
        ...

    def preview(self, token_ids: Sequence[int]) -> str:
        """Return what `push` would, and take nothing."""
        ...

    def finish(self) -> str:
        """Return the text held back, with U+FFFD for what never became a character."""
        ...


class NoText:
    """The detokenizer of a model without a tokenizer: ids have no text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return nothing."""
        return ""

    def preview(self, token_ids: Sequence[int]) -> str:
        """Return nothing."""
        return ""

    def finish(self) -> str:
        """Return nothing."""
        return ""


class Detokenizers:
    """Makes detokenizers for one tokenizer, and holds the tables they share.

    Tables are filled as ids are met: a vocabulary has 50,000 to 250,000, a model uses few.

    Args:
        backend: The tokenizer; its vocabulary and decoder do not change.
        special_ids: Ids that `skip_special_tokens` leaves out.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: AbstractSet[int]) -> None:
        self._backend = backend
        self._skipped: dict[bool, AbstractSet[int]] = {False: frozenset(), True: special_ids}
        decoder = json.loads(backend.to_str())["decoder"]
        self._is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        self._tables = {skip: _TokenBytes(backend, ids) for skip, ids in self._skipped.items()}

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
        """Return the bytes of one token by itself; none for an id that the vocabulary lacks.

        Joined, they are the text's bytes, but for what a decoder does to the whole, such as dropping
        a leading space.
        """
        if self._is_byte_level:
            return self._tables[False][token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(_SENTENCEPIECE_SPACE, " ").encode()


class _TokenBytes(dict[int, bytes]):
    """The bytes of each id met so far; ids without text have none.

    Attributes:
        texts: Of each id met, the same as text; None for one that begins or ends inside a character.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped: AbstractSet[int]) -> None:
        super().__init__()
        self._backend = backend
        self._skipped = skipped
        self.texts = _TokenTexts(self)

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._backend.id_to_token(token_id)
        self[token_id] = found = b"" if token is None else token_bytes(token)
        return found


class _TokenTexts(dict[int, str | None]):
    """The text of each id met so far; None for one that begins or ends inside a character."""

    def __init__(self, table: _TokenBytes) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> str | None:
        text: str | None = None
        with contextlib.suppress(UnicodeDecodeError):
            text = self._table[token_id].decode()
        self[token_id] = text
        return text


class ByteLevelDetokenizer:
    """Joins the bytes of tokens and holds back an incomplete character at the end."""

    __slots__ = ("_decoder", "_is_inside", "_table", "_texts")

    def __init__(self, table: _TokenBytes) -> None:
        self._table, self._texts = table, table.texts
        # "replace" marks maximal ill-formed runs as Unicode recommends, and as tokenizers does.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False  # a character

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is now certain."""
        if len(token_ids) == 1 and not self._is_inside:
            text = self._texts[token_ids[0]]
            if text is not None:
                return text
        table = self._table
        text = self._decoder.decode(b"".join([table[token_id] for token_id in token_ids]))
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def preview(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer`."""
        if len(token_ids) == 1 and not self._is_inside:
            text = self._texts[token_ids[0]]
            if text is not None:
                return text
        state, was_inside = self._decoder.getstate(), self._is_inside
        text = self.push(token_ids)
        self._decoder.setstate(state)
        self._is_inside = was_inside
        return text

    def finish(self) -> str:
        """Return U+FFFD for a character that stayed incomplete, or nothing."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Decodes the tail of the ids with the tokenizer's own decoder, twice: with and without news.

    The window begins with the token before the news, because what a decoder does to the first
    token (drop a leading space) must happen to neither or both. It ends at a token that is no
    byte: a run of byte tokens becomes text as a whole, as characters or as U+FFFD.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped: AbstractSet[int]) -> None:
        self._backend = backend
        self._skipped = skipped
        self._context: list[int] = []
        self._news: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is now certain."""
        last = None
        for token_id in token_ids:
            token = None if token_id in self._skipped else self._backend.id_to_token(token_id)
            if token is not None:
                self._news.append(token_id)
                last = token
        if last is None or _BYTE_TOKEN.fullmatch(last):
            return ""
        return self._take(is_final=False)

    def preview(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer`."""
        context, news = self._context, self._news.copy()
        text = self.push(token_ids)
        self._context, self._news = context, news
        return text

    def finish(self) -> str:
        """Return what was held back."""
        return self._take(is_final=True)

    def _take(self, *, is_final: bool) -> str:
        before = self._decode(self._context)
        after = self._decode(self._context + self._news)
        # Decoders that are no plain join (one that ends in a byte-level step) may still wait.
        if not is_final and after.endswith(_REPLACEMENT):
            return ""
        if self._news:
            self._context, self._news = self._news[-1:], []
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)
