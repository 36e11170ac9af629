"""Log-probabilities in the formats of the APIs.

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
from tandem.frontend.chat.generation import Generation
from tandem.frontend.text.tokenizer import Tokenizer
from tandem.wire.generation import LogprobOptions, TokenLogprobs

# OpenAI's limit for chats. A step must sort this many candidates for each of its tokens.
MAX_TOP_LOGPROBS = 20
# JSON has no infinity. vLLM and OpenAI use this value for probability 0.
_MIN_LOGPROB = -9999.0

Run = tuple[Sequence[int], Sequence[TokenLogprobs]]
"""Consecutive token ids and the log-probabilities of each."""


class NativeLogprobs:
    """Collects the log-probability fields of one generation's `meta_info`.

    Args:
        generation: A generation whose request asks for log-probabilities.
        logprobs: The log-probabilities that the request asks for.
        has_text: Whether each entry contains the text of its token.
    """

    def __init__(self, generation: Generation, logprobs: LogprobOptions, *, has_text: bool) -> None:
        self._num_top = logprobs.num_top
        # As in SGLang, the first reported position has no value, even if it is not the prompt's start.
        self._is_first = True
        self._prompt_ids = generation.request.prompt_ids
        self._position = logprobs.prompt_start
        self._tokenizer = generation.tokenizer if has_text else None
        self._fields = self._empty()

    def fill(self, meta: MetaInfo) -> None:
        """Set the collected fields in `meta_info`."""
        for name, values in self._fields.items():
            setattr(meta, name, values)

    def add(self, output: Run, prompt: Sequence[TokenLogprobs]) -> None:
        """Add the tokens of a piece and the next positions of the prompt."""
        for entry in prompt:
            shown = TokenLogprobs(logprob=None) if self._is_first else entry
            self._add("input", self._prompt_ids[self._position], shown)
            self._position, self._is_first = self._position + 1, False
        for token_id, entry in _entries([output]):
            self._add("output", token_id, entry)

    def clear(self) -> None:
        """Discard the collected entries."""
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

    `top_logprobs` include the chosen token. They are keyed by text; if two tokens have the same text, the more
    likely one is used. Offsets refer to the text of all tokens, including special tokens.

    Args:
        has_ids_as_tokens: Identify each token as `token_id:ID` instead of by its text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, num_top: int, *, has_ids_as_tokens: bool = False
    ) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self._names = None if has_ids_as_tokens else tokenizer
        # A token that starts inside a character has that character's offset.
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._offset = 0

    def write(self, *runs: Run) -> dict[str, Any]:
        """Return `logprobs` for the next tokens of the choice."""
        fields: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token_id, entry in _entries(runs):
            fields["tokens"].append(_text(self._names, token_id))
            fields["token_logprobs"].append(_finite(entry.logprob))
            fields["top_logprobs"].append(self._top(token_id, entry))
            fields["text_offset"].append(self._offset)
            self._offset += len(self._decode(_bytes(self._tokenizer, token_id)))
        return fields

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float] | None:
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for id_, logprob in (*entry.top[: self._num_top], (token_id, entry.logprob)):
            top.setdefault(_text(self._names, id_), max(logprob, _MIN_LOGPROB))
        return top


class ChatLogprobs:
    """Writes the `logprobs` of a choice of `/v1/chat/completions`. Arguments as in `CompletionLogprobs`."""

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

    `top_logprobs` has at least one entry, and the chosen token comes first. Its rank is null unless it is one
    of the most likely tokens.
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
        # Not strict: a node of an older release sends no log-probabilities.
        yield from zip(token_ids, entries, strict=False)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _MIN_LOGPROB)


def _bytes(tokenizer: Tokenizer | None, token_id: int) -> bytes:
    return tokenizer.token_bytes(token_id) if tokenizer is not None else b""


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """Return a token's text, or `bytes:...` if it is part of a character (OpenAI's format)."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
