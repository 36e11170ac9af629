"""The transcript of one generation: convert its token ids to pieces of text and detect its end. Pure.

```
 TokenDelta, or ordinary tokens ──▶ Transcript: hide stop token → detokenizer → stops ──▶ TextPiece ──▶ Sink
```
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from tandem.frontend.text.detokenizer import Detokenizer
from tandem.frontend.text.stops import StopPatterns, StopStrings, TextRules
from tandem.telemetry.histogram import Histogram
from tandem.wire.errors import Aborted, ErrorInfo, TandemError
from tandem.wire.generation import Finish, TokenLogprobs
from tandem.wire.messages import TokenDelta


@dataclass(frozen=True, slots=True)
class Ending:
    """The finish reason of a generation for the client.

    Attributes:
        matched: The stop token, stop string or stop pattern, if the reason is `stop`.
        error: The error, if the reason is `abort`.
    """

    reason: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    error: ErrorInfo | None = None


class TextPiece(msgspec.Struct, frozen=True, gc=False):
    """The next part of a generation. The last one has an `ending`.

    Attributes:
        logprobs: Log-probabilities of each of `token_ids`, if requested.
        prompt_logprobs: All requested log-probabilities of the prompt, on the first piece only.
    """

    text: str
    token_ids: Sequence[int]
    cached_tokens: int = 0
    ending: Ending | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


EMPTY_PIECE = TextPiece("", ())
AUTO = "auto"
# With `auto`, a process that is busier than the first share writes fewer events, until it is less busy than the second.
BUSY_SHARE, IDLE_SHARE = 0.6, 0.25


def join_pieces(pieces: Sequence[TextPiece]) -> TextPiece:
    """Join consecutive pieces into one."""
    return TextPiece(
        text="".join([piece.text for piece in pieces]),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        cached_tokens=max(piece.cached_tokens for piece in pieces),
        ending=pieces[-1].ending,
        logprobs=[entry for piece in pieces for entry in piece.logprobs],
        prompt_logprobs=[entry for piece in pieces for entry in piece.prompt_logprobs],
    )


class Sink(Protocol):
    """Receives the pieces of one generation."""

    def write(self, piece: TextPiece) -> bool:
        """Write the next piece. False: call `drain` before the next write.

        Must neither block nor raise.
        """

    async def drain(self) -> None:
        """Wait until the sink has room.

        Raises:
            ConnectionError: The client has disconnected.
        """


class StreamInterval:
    """A server's least number of tokens per event, except for the first and the last event of a generation.

    Writing an event takes more than a third of the time of a token with 1,024 streams. With `auto`, a busy process
    therefore writes two tokens per event, which saved 12 and 23 % in two measurements.

    Args:
        setting: A number of tokens, or `auto`.

    Attributes:
        num_tokens: The minimum now.
    """

    def __init__(self, setting: str = "1") -> None:
        self._is_auto = setting == AUTO
        self.num_tokens = 1 if self._is_auto else int(setting)

    def adapt(self, busy: float) -> None:
        """Adapt to the CPU share of the event loop's thread, from 0 to 1."""
        if self._is_auto and not IDLE_SHARE <= busy <= BUSY_SHARE:
            self.num_tokens = 2 if busy > BUSY_SHARE else 1


class Transcript:
    """A `TokenReceiver` that writes the pieces of one generation to a sink, except the last piece.

    The text does not depend on how tokens are grouped: with stops, tokens are processed one by one, and
    tokens after the match are dropped.

    Args:
        gaps: Histogram of the time between tokens. Tokens that arrive together share the gap equally.
        interval: The server's stream interval. The larger of it and `rules.stream_interval` applies.

    Attributes:
        num_tokens: Tokens processed so far, without those after a stop.
        has_room: Whether the sink has room.
        end: The last piece, or the error that ended the text. The caller writes it once no node holds the request.
    """

    __slots__ = (
        "_cached_tokens",
        "_detokenizer",
        "_gaps",
        "_held",
        "_interval",
        "_is_plain",
        "_last_token_s",
        "_prompt_logprobs",
        "_rules",
        "_sink",
        "_stops",
        "end",
        "has_room",
        "num_tokens",
    )

    def __init__(
        self,
        rules: TextRules,
        detokenizer: Detokenizer,
        sink: Sink,
        gaps: Histogram,
        interval: StreamInterval,
    ) -> None:
        self._rules, self._detokenizer = rules, detokenizer
        self._sink, self._gaps, self._interval = sink, gaps, interval
        self._last_token_s = 0.0  # 0: no token yet
        self.has_room = True
        self._stops = _stops(rules)
        self._is_plain = not (
            rules.patterns or rules.min_new_tokens or rules.is_silent or rules.stream_interval > 1
        )
        self._held = EMPTY_PIECE
        self.num_tokens = self._cached_tokens = 0
        self._prompt_logprobs: list[TokenLogprobs] = []
        self.end: TextPiece | TandemError | None = None

    @property
    def is_ended(self) -> bool:
        """Whether the text has ended."""
        return self.end is not None

    def take(self, delta: TokenDelta) -> None:
        """Process the next delta. Deltas after the end are ignored."""
        if self.end is not None:
            return
        self._cached_tokens = max(self._cached_tokens, delta.cached_tokens)
        self._prompt_logprobs += delta.prompt_logprobs
        if delta.token_ids or delta.finish is not None:
            self._process(delta.token_ids, delta.finish, delta.logprobs)

    def take_ordinary(self, token_ids: Sequence[int]) -> bool:
        """Process ordinary tokens. False: there is no room, or the text has ended."""
        if not self.has_room or self.end is not None:
            return False
        stops = self._stops
        if not self._is_plain or not (stops is None or len(token_ids) == 1):
            self._process(token_ids)
            return self.end is None
        # A fast path of `_process` without its branches, because most tokens arrive here.
        self.num_tokens += len(token_ids)
        self._record_gap(len(token_ids))
        text, ending = self._detokenizer.push(token_ids), None
        if stops is not None:
            text = stops.push(text)
            ending = None if stops.matched is None else Ending("stop", stops.matched)
        piece = TextPiece(text, token_ids, self._cached_tokens, ending)
        shown: TextPiece | None = piece
        if self._interval.num_tokens > 1 or self._held is not EMPTY_PIECE:
            shown = self._batch(piece)
        if ending is not None:
            self.end = shown
            return False
        if shown is not None:
            self.has_room = self._sink.write(shown)
        return True

    async def drain(self) -> None:
        """Wait until the sink has room."""
        await self._sink.drain()
        self.has_room = True

    def flush(self) -> None:
        """Write the tokens that wait for others of their event, because no more will come."""
        if self._held is not EMPTY_PIECE:
            self._sink.write(self._held)
            self._held = EMPTY_PIECE

    def _process(
        self,
        ids: Sequence[int],
        finish: Finish | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        try:
            piece = self._read(ids, finish, logprobs)
        except TandemError as error:  # a stop pattern takes too long on this text
            self.end = error
            return
        if piece is None:
            return
        if piece.ending is not None:
            self.end = piece
        else:
            self.has_room = self._sink.write(piece)

    def _record_gap(self, num_tokens: int) -> None:
        now_s = time.perf_counter()
        if self._last_token_s:
            self._gaps.observe((now_s - self._last_token_s) / num_tokens, num_tokens)
        else:  # the first token has no gap before it
            self._gaps.observe(0.0, num_tokens - 1)
        self._last_token_s = now_s

    def _read(
        self,
        ids: Sequence[int],
        finish: Finish | None,
        logprobs: Sequence[TokenLogprobs],
    ) -> TextPiece | None:
        if ids:
            self._record_gap(len(ids))
        ending = None if finish is None else _ending(finish)
        if self._rules.is_silent:
            is_aborted = ending is not None and ending.reason == "abort"
            return self._piece("", (), ending if is_aborted else Ending("length"), ())
        visible = ids if finish is None else self._visible(ids, finish)
        if self._stops is None:
            text = self._detokenizer.push(visible)
            if finish is not None:
                text += self._detokenizer.finish()
        else:
            text, num_read = self._read_to_stop(self._stops, visible)
            ids = ids if self._stops.matched is None else ids[:num_read]
            if finish is not None and self._stops.matched is None:
                text += self._stops.push(self._detokenizer.finish()) + self._stops.finish()
            if self._stops.matched is not None:
                ending = Ending("stop", self._stops.matched)
        self.num_tokens += len(ids)
        return self._batch(self._piece(text, ids, ending, logprobs[: len(ids)]))

    def _read_to_stop(
        self, stops: StopStrings | StopPatterns, ids: Sequence[int]
    ) -> tuple[str, int]:
        """Return the text of `ids` up to a stop, and the number of ids processed."""
        text = ""
        for num_read, token_id in enumerate(ids, start=1):
            new = self._detokenizer.push((token_id,))
            is_too_early = self.num_tokens + num_read <= self._rules.min_new_tokens
            text += new if is_too_early else stops.push(new)
            if stops.matched is not None:
                return text, num_read
        return text, len(ids)

    def _visible(self, ids: Sequence[int], finish: Finish) -> Sequence[int]:
        """Return the ids to detokenize: all except a trimmed stop token."""
        if finish.matched is None or self._rules.keeps_stop:
            return ids
        return ids[:-1] if ids and ids[-1] == finish.matched else ids

    def _piece(
        self,
        text: str,
        ids: Sequence[int],
        ending: Ending | None,
        logprobs: Sequence[TokenLogprobs],
    ) -> TextPiece:
        prompt_logprobs: Sequence[TokenLogprobs] = ()
        if self._prompt_logprobs:
            prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        return TextPiece(text, ids, self._cached_tokens, ending, logprobs, prompt_logprobs)

    def _batch(self, piece: TextPiece) -> TextPiece | None:
        """Merge the piece with the held ones. Return the result, or hold it while it has too few tokens."""
        if self._held is not EMPTY_PIECE:
            piece, self._held = join_pieces((self._held, piece)), EMPTY_PIECE
        interval, num_tokens = self._interval.num_tokens, len(piece.token_ids)
        interval = max(interval, self._rules.stream_interval)
        is_first = num_tokens == self.num_tokens
        if piece.ending is None and not is_first and num_tokens < interval:
            self._held = piece
            return None
        return piece


def error_ending(error: ErrorInfo) -> Ending:
    """Return the ending of a generation that failed."""
    return Ending("abort", error=error)


def _ending(finish: Finish) -> Ending:
    if finish.reason == "abort":
        return error_ending(Aborted("the request was aborted").info())
    if finish.reason == "stop":
        return Ending("stop", finish.matched)
    # A prefill half that was handed off generated its one requested token.
    return Ending("length")


def _stops(rules: TextRules) -> StopStrings | StopPatterns | None:
    if rules.patterns:
        return StopPatterns(rules.patterns, rules.keeps_stop, rules.budget)
    return StopStrings(rules.stops, rules.keeps_stop) if rules.stops else None
