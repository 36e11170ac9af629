"""Log-probabilities as the APIs write them, from those that came with the tokens.

```
 /generate              lists of [logprob, token id, text or null]
 /v1/completions        {tokens, token_logprobs, top_logprobs, text_offset}
 /v1/chat/completions   {content: [{token, logprob, bytes, top_logprobs}]}
 /inference/v1/generate {content: [{token_id, logprob, rank, top_logprobs}]}
```
"""

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

from tandem.frontend.answers import MetaInfo, Triple
from tandem.frontend.generation import Generation
from tandem.frontend.tokenizer import Tokenizer
from tandem.wire.generation import LogprobsWanted, TokenLogprobs

# OpenAI's limit for chats. A step must sort so many for each of its tokens.
MAX_TOP_LOGPROBS = 20
# JSON has no infinity. vLLM and OpenAI write this number for the impossible.
_IMPOSSIBLE = -9999.0

Run = tuple[Sequence[int], Sequence[TokenLogprobs]]
"""Ids that follow each other, with the log-probabilities of each."""


class NativeLogprobs:
    """The fields of one generation's `meta_info`, which grow as tokens come.

    Args:
        generation: Its request wants log-probabilities.
        has_text: Whether each entry has the text of its token.
    """

    def __init__(self, generation: Generation, wanted: LogprobsWanted, *, has_text: bool) -> None:
        self._num_top = wanted.num_top
        # As SGLang: the first position has no value, wherever it is.
        self._is_first = True
        self._prompt_ids = generation.request.prompt_ids
        self._position = wanted.prompt_start
        self._tokenizer = generation.tokenizer if has_text else None
        self._fields = self._empty()

    def fill(self, meta: MetaInfo) -> None:
        """Put what was added into `meta_info`."""
        for name, values in self._fields.items():
            setattr(meta, name, values)

    def add(self, output: Run, prompt: Sequence[TokenLogprobs]) -> None:
        """Add the tokens of a piece, and positions of the prompt."""
        for entry in prompt:
            known = TokenLogprobs(logprob=None) if self._is_first else entry
            self._add("input", self._prompt_ids[self._position], known)
            self._position, self._is_first = self._position + 1, False
        for token_id, entry in _entries([output]):
            self._add("output", token_id, entry)

    def clear(self) -> None:
        """Forget what was added."""
        self._fields = self._empty()

    def _empty(self) -> dict[str, list[Any]]:
        kinds = ("token_logprobs", "top_logprobs") if self._num_top else ("token_logprobs",)
        return {f"{side}_{kind}": [] for kind in kinds for side in ("input", "output")}

    def _add(self, side: str, token_id: int, entry: TokenLogprobs) -> None:
        self._fields[f"{side}_token_logprobs"].append(self._triple(token_id, entry.logprob))
        if self._num_top:
            top = [self._triple(id_, logprob) for id_, logprob in entry.top[: self._num_top]]
            self._fields[f"{side}_top_logprobs"].append(top or None)

    def _triple(self, token_id: int, logprob: float | None) -> Triple:
        text = None
        if self._tokenizer is not None:
            text = self._tokenizer.token_bytes(token_id).decode(errors="replace")
        return [_finite(logprob), token_id, text]


class CompletionLogprobs:
    """Writes the `logprobs` of a choice of `/v1/completions`, piece by piece.

    The chosen token is among its `top_logprobs`. These are keyed by text: of two tokens with the same
    text the likelier counts. Offsets are in the text of all tokens, special ones included.

    Args:
        has_ids_as_tokens: Name each token `token_id:ID` instead of by its text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, num_top: int, *, has_ids_as_tokens: bool = False
    ) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self._names = None if has_ids_as_tokens else tokenizer
        # The offset of a token inside a character is that of the character.
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._offset = 0

    def write(self, *runs: Run) -> dict[str, Any]:
        """Return `logprobs` for the next tokens of the choice."""
        made: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token_id, entry in _entries(runs):
            made["tokens"].append(_text(self._names, token_id))
            made["token_logprobs"].append(_finite(entry.logprob))
            made["top_logprobs"].append(self._top(token_id, entry))
            made["text_offset"].append(self._offset)
            self._offset += len(self._decode(_bytes(self._tokenizer, token_id)))
        return made

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float] | None:
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for id_, logprob in (*entry.top[: self._num_top], (token_id, entry.logprob)):
            top.setdefault(_text(self._names, id_), max(logprob, _IMPOSSIBLE))
        return top


class ChatLogprobs:
    """Writes the `logprobs` of a choice of `/v1/chat/completions`; as `CompletionLogprobs`."""

    def __init__(
        self, tokenizer: Tokenizer | None, num_top: int, *, has_ids_as_tokens: bool = False
    ) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self._names = None if has_ids_as_tokens else tokenizer

    def write(self, *runs: Run) -> dict[str, Any]:
        """Return `logprobs` for the next tokens of the choice."""
        return {
            "content": [
                self._token(token_id, entry.logprob)
                | {"top_logprobs": [self._token(*top) for top in entry.top[: self._num_top]]}
                for token_id, entry in _entries(runs)
            ]
        }

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": _text(self._names, token_id),
            "logprob": _finite(logprob),
            "bytes": list(_bytes(self._tokenizer, token_id)),
        }


class IdLogprobs:
    """Writes the `logprobs` of a choice of `/inference/v1/generate`, piece by piece.

    The chosen token comes first among its `top_logprobs`, which are at least one. Its rank is known
    where it is one of the likeliest.
    """

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top

    def write(self, *runs: Run) -> dict[str, Any]:
        """Return `logprobs` for the next tokens of the choice."""
        return {"content": [self._token(*entry) for entry in _entries(runs)]}

    def _token(self, token_id: int, entry: TokenLogprobs) -> dict[str, Any]:
        top = [
            {"token_id": id_, "logprob": _finite(logprob), "rank": rank}
            for rank, (id_, logprob) in enumerate(entry.top, start=1)
        ]
        chosen = {"token_id": token_id, "logprob": _finite(entry.logprob), "rank": None}
        chosen = next((each for each in top if each["token_id"] == token_id), chosen)
        others = [each for each in top if each is not chosen]
        return chosen | {"top_logprobs": [chosen, *others][: max(1, self._num_top)]}


def _entries(runs: Sequence[Run]) -> Iterator[tuple[int, TokenLogprobs]]:
    for token_ids, entries in runs:
        # Not strict: a node of an older release sends none.
        yield from zip(token_ids, entries, strict=False)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _IMPOSSIBLE)


def _bytes(tokenizer: Tokenizer | None, token_id: int) -> bytes:
    return tokenizer.token_bytes(token_id) if tokenizer is not None else b""


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """Return a token's text; as OpenAI, `bytes:...` for one that is only part of a character."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
