"""How many tokens a text has at least, found without tokenizing it.

A text of 10 MB takes seconds to tokenize and can be refused in a millisecond, where the
tokenizer is known to keep every character and its longest token is known.
"""

import json
from dataclasses import dataclass
from typing import Any

import tokenizers

from tandem.frontend.byte_level import BYTE_OF_CHARACTER, token_bytes

# NFC makes text shorter, never below a quarter: a composed character stands for at most four code
# points, and three bytes for at most nine (Hangul).
_NFC_SHRINKS_TO = 0.25
_CONTINUATION_BYTES = range(0x80, 0xC0)


@dataclass(frozen=True, slots=True)
class TextBound:
    """What one tokenizer allows to be said.

    Attributes:
        chars_per_token: The most characters of text one token stands for.
        dropped: Characters that the vocabulary lacks, so that they leave no token.
    """

    chars_per_token: float
    dropped: str

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` never has fewer than."""
        num_kept = len(text) - sum(text.count(character) for character in self.dropped)
        return int(num_kept / self.chars_per_token)


def text_bound(backend: tokenizers.Tokenizer) -> TextBound | None:
    """Return the bound of a byte-level tokenizer, or None for others.

    Others may drop whitespace, or merge any run of unknown characters to one token.
    """
    spec = json.loads(backend.to_str())
    vocabulary = backend.get_vocab(with_added_tokens=True)
    missing = {byte for char, byte in BYTE_OF_CHARACTER.items() if char not in vocabulary}
    # A character of several bytes has a continuation byte, so it leaves something if those do.
    if not _keeps_text(spec) or missing.intersection(_CONTINUATION_BYTES):
        return None
    # In bytes, which are never fewer than characters.
    longest = max(len(token_bytes(token)) for token in vocabulary)
    return TextBound(
        chars_per_token=longest if spec["normalizer"] is None else longest / _NFC_SHRINKS_TO,
        dropped="".join(chr(byte) for byte in sorted(missing) if byte < 0x80),
    )


def _keeps_text(spec: dict[str, Any]) -> bool:
    """Tell whether nothing before the vocabulary is known to drop text."""
    splits = json.dumps(spec["pre_tokenizer"])
    normalizer = spec["normalizer"]
    return (
        spec["model"]["type"] == "BPE"
        and '"ByteLevel"' in splits
        and '"Removed"' not in splits
        and (normalizer is None or normalizer["type"] == "NFC")
        # An added token may swallow all the whitespace around it.
        and not any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
    )
