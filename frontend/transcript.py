"""The transcript of one generation: ids to text, piece by piece, until it ends. Pure.

```
 TokenDelta ──▶ Transcript: stop token hidden → detokenizer → stops ──▶ Piece
 ordinary token ──▶ the same, where it surely ends nothing ──▶ Outlet
```
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from typing_extensions import override

from tandem.frontend.detokenizer import Detokenizer
from tandem.frontend.sampling import TextRules
from tandem.frontend.stop_patterns import StopPatterns
from tandem.frontend.stops import StopStrings
from tandem.wire.errors import Aborted, ErrorInfo
from tandem.wire.generation import Finish, TokenLogprobs
from tandem.wire.messages import TokenDelta


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a generation ended, as the client is told.

    Attributes:
        matched: The stop token, stop string or stop pattern, for `stop`.
        error: What went wrong, for `abort`.
    """

    reason: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one delta became. The last piece of a generation has an `ending`.

    Attributes:
        logprobs: One for each of `token_ids`, when wanted.
        prompt_logprobs: All that were wanted, on the first piece.
    """

    text: str
    token_ids: list[int]
    cached_tokens: int = 0
    ending: Ending | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


def failed(error: ErrorInfo) -> Ending:
    """Return the ending of a generation that an error cut short."""
    return Ending("abort", error=error)


def _ending(finish: Finish) -> Ending:
    if finish.reason == "abort":
        return failed(Aborted("the request was aborted").info())
    if finish.reason == "stop":
        return Ending("stop", finish.matched)
    # A prefill half that was handed off made the one token it was asked for.
    return Ending("length")


class Outlet(Protocol):
    """Where the text of ordinary tokens may go at once, between two pieces."""

    def has_room(self) -> bool:
        """Tell whether `write` can take more without waiting; if not, it comes as a piece."""
        ...

    def write(self, text: str, token_ids: Sequence[int]) -> None:
        """Take what stands behind everything before. Must neither wait nor raise."""
        ...


class Gaps(Protocol):
    """Who wants to know how evenly tokens come."""

    def came(self, num_tokens: int) -> None:
        """So many came now."""
        ...


class Transcript:
    """Turns the deltas of one generation into pieces.

    Its text does not depend on how tokens were grouped into deltas: with stops tokens are
    read one by one, and those after the match are dropped.

    Args:
        outlet: For ordinary tokens; without one, everything becomes pieces.
        gaps: Told when tokens come.

    Attributes:
        num_tokens: Read so far, but for what follows a stop.
    """

    __slots__ = (
        "_cached_tokens",
        "_detokenizer",
        "_gaps",
        "_held",
        "_interval",
        "_is_plain",
        "_outlet",
        "_prompt_logprobs",
        "_rules",
        "_stops",
        "num_tokens",
    )

    def __init__(
        self,
        rules: TextRules,
        detokenizer: Detokenizer,
        outlet: Outlet | None = None,
        gaps: Gaps | None = None,
    ) -> None:
        self._rules, self._gaps = rules, gaps
        self._detokenizer, self._outlet = detokenizer, outlet
        self._stops = _stops(rules)
        # With nothing to look for, every token is ordinary.
        self._is_plain = not (rules.stops or rules.patterns or rules.is_silent)
        self._interval, self._held = rules.stream_interval, Piece("", [])
        self.num_tokens = 0
        self._cached_tokens = 0
        self._prompt_logprobs: list[TokenLogprobs] = []

    @override
    def __repr__(self) -> str:
        return f"Transcript({self.num_tokens} tokens, {self._stops!r})"

    def take(self, delta: TokenDelta) -> Piece | None:
        """Return the next piece, or None for a delta that tells of the prompt only.

        Nothing may be taken after a piece with an ending.
        """
        self._cached_tokens = max(self._cached_tokens, delta.cached_tokens)
        self._prompt_logprobs += delta.prompt_logprobs
        if not delta.token_ids and delta.finish is None:
            return None
        if self._gaps is not None and delta.token_ids:
            self._gaps.came(len(delta.token_ids))
        if self._rules.is_silent:
            return self._piece("", [], delta, self._silent_ending(delta.finish))
        ids, finish = delta.token_ids, delta.finish
        text, num_read = self._read(self._visible(ids, finish))
        ending = None
        if self._stops.matched is not None:
            ids = ids[:num_read]
        elif finish is not None:
            text += self._stops.push(self._detokenizer.finish()) + self._stops.finish()
            ending = _ending(finish)
        if self._stops.matched is not None:
            ending = Ending("stop", self._stops.matched)
        self.num_tokens += len(ids)
        piece = self._piece(text, ids, delta, ending)
        return piece if self._interval == 1 else self._spaced(piece)

    @property
    def has_outlet(self) -> bool:
        """Whether there is somewhere for ordinary tokens to go."""
        return self._outlet is not None

    def take_ordinary(self, token_ids: Sequence[int]) -> bool:
        """See `Tap`. Takes what surely ends nothing; what it is unsure of comes again, in a delta."""
        outlet = self._outlet
        if outlet is None or not outlet.has_room():
            return False
        if not self._is_plain:
            is_early = self.num_tokens < self._rules.min_new_tokens
            if is_early or not self._stops.lets_pass(self._detokenizer.preview(token_ids)):
                return False
        self.num_tokens += len(token_ids)
        if self._gaps is not None:
            self._gaps.came(len(token_ids))
        text = self._detokenizer.push(token_ids)
        if self._interval == 1:
            outlet.write(text, token_ids)
        elif (piece := self._spaced(Piece(text, list(token_ids)))) is not None:
            outlet.write(piece.text, piece.token_ids)
        return True

    def _spaced(self, piece: Piece) -> Piece | None:
        """Return a piece with what was held before it, or hold it as well: it is too few tokens."""
        held = self._held
        merged = replace(
            piece,
            text=held.text + piece.text,
            token_ids=held.token_ids + piece.token_ids,
            logprobs=held.logprobs + piece.logprobs,
        )
        num_tokens = len(merged.token_ids)
        is_first = num_tokens == self.num_tokens
        if merged.ending is None and not is_first and num_tokens < self._interval:
            self._held = merged
            return None
        self._held = Piece("", [])
        return merged

    def _piece(self, text: str, ids: list[int], delta: TokenDelta, ending: Ending | None) -> Piece:
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        logprobs = delta.logprobs[: len(ids)]
        return Piece(text, ids, self._cached_tokens, ending, logprobs, prompt_logprobs)

    def _silent_ending(self, finish: Finish | None) -> Ending:
        """Return the end of a generation of no tokens: the first one that came is not shown."""
        if finish is not None and finish.reason == "abort":
            return _ending(finish)
        return Ending("length")

    def _visible(self, ids: list[int], finish: Finish | None) -> list[int]:
        """Return the ids that make text: all but a stop token that is to be trimmed."""
        if finish is None or finish.matched is None or self._rules.keeps_stop:
            return ids
        return ids[:-1] if ids and ids[-1] == finish.matched else ids

    def _read(self, ids: list[int]) -> tuple[str, int]:
        """Return the text of `ids` up to a stop, and how many of them that took."""
        if not (self._rules.stops or self._rules.patterns):
            return self._detokenizer.push(ids), len(ids)
        text = ""
        for num_read, token_id in enumerate(ids, start=1):
            new = self._detokenizer.push((token_id,))
            is_too_early = self.num_tokens + num_read <= self._rules.min_new_tokens
            text += new if is_too_early else self._stops.push(new)
            if self._stops.matched is not None:
                return text, num_read
        return text, len(ids)


def _stops(rules: TextRules) -> StopStrings | StopPatterns:
    if rules.patterns:
        return StopPatterns(rules.patterns, rules.keeps_stop)
    return StopStrings(rules.stops, rules.keeps_stop)
