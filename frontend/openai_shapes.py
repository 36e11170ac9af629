"""What a choice looks like on each of OpenAI's two routes, whole or in chunks. Pure."""

from typing import Any, Protocol

from tandem.frontend.logprobs import ChatLogprobs, CompletionLogprobs, LogprobWriter
from tandem.frontend.tokenizer import Tokenizer

Logprobs = dict[str, Any] | None


class Shape(Protocol):
    """How one route writes its choices."""

    whole: str
    chunk: str

    def writer(self, tokenizer: Tokenizer | None, num_top: int) -> LogprobWriter:
        """Return what writes the log-probabilities of one choice."""
        ...

    def choice(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs = None
    ) -> dict[str, Any]:
        """Return a choice of a whole answer."""
        ...

    def opening(self, index: int, echo: str, logprobs: Logprobs) -> list[dict[str, Any]]:
        """Return the choices, one a chunk, that stand before the first text."""
        ...

    def delta(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs = None
    ) -> list[dict[str, Any]]:
        """Return the choices, one a chunk, that add `text` and maybe end."""
        ...


class Completion:
    """`/v1/completions`."""

    whole = chunk = "text_completion"

    def writer(self, tokenizer: Tokenizer | None, num_top: int) -> LogprobWriter:
        """See `Shape`."""
        return CompletionLogprobs(tokenizer, num_top)

    def choice(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs = None
    ) -> dict[str, Any]:
        """See `Shape`."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int, echo: str, logprobs: Logprobs) -> list[dict[str, Any]]:
        """See `Shape`."""
        is_worth = echo or (logprobs is not None and logprobs["tokens"])
        return [self.choice(index, echo, None, logprobs)] if is_worth else []

    def delta(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs = None
    ) -> list[dict[str, Any]]:
        """See `Shape`. A delta that tells nothing is not worth a chunk."""
        is_worth = text or reason or logprobs
        return [self.choice(index, text, reason, logprobs)] if is_worth else []


class Chat:
    """`/v1/chat/completions`."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def writer(self, tokenizer: Tokenizer | None, num_top: int) -> LogprobWriter:
        """See `Shape`."""
        return ChatLogprobs(tokenizer, num_top)

    def choice(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs = None
    ) -> dict[str, Any]:
        """See `Shape`."""
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int, echo: str, logprobs: Logprobs) -> list[dict[str, Any]]:
        """See `Shape`. A chat echoes nothing."""
        return [self._delta(index, {"role": "assistant", "content": echo}, None)]

    def delta(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs = None
    ) -> list[dict[str, Any]]:
        """See `Shape`. The end has a chunk of its own."""
        is_worth = text or logprobs
        part = [self._delta(index, {"content": text}, None, logprobs)] if is_worth else []
        return part + ([self._delta(index, {}, reason)] if reason else [])

    def _delta(
        self, index: int, delta: dict[str, str], reason: str | None, logprobs: Logprobs = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
