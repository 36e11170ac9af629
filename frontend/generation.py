"""One generation at the edge: from the backend's token deltas to pieces of text.

```
 TokenDelta ──▶ Transcript: stop token hidden → detokenizer → stops ──▶ Piece
```

What is common to both APIs, without HTTP.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import msgspec
from typing_extensions import override

from frontend.backend import Backend, Bootstrap, ServedModel
from frontend.detokenizer import Detokenizer, NoText
from frontend.sampling import SamplingBody, TextRules, engine_params, seeds
from frontend.stop_patterns import StopPatterns
from frontend.stops import StopStrings
from frontend.tokenizer import Tokenizer
from wire.errors import Aborted, EngineFailed, ErrorInfo
from wire.generation import Finish, GenerateRequest, Grammar, LogprobsWanted, TokenLogprobs
from wire.ids import RequestId, new_request_id
from wire.messages import TokenDelta


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation to run.

    Attributes:
        tokenizer: None when the model has none: the text stays empty.
        bootstrap: Where its other half is, when a router of SGLang's kind chose the pair.
    """

    request: GenerateRequest
    rules: TextRules
    tokenizer: Tokenizer | None
    bootstrap: Bootstrap | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a client wants beside sampling parameters; see `GenerateRequest`."""

    priority: int = 0
    cache_salt: str = ""
    logprobs: LogprobsWanted | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One checked prompt, and what is wanted of it.

    Attributes:
        request_ids: One for each generation of it.
    """

    token_ids: list[int]
    request_ids: Sequence[RequestId]
    wishes: Wishes
    bootstrap: Bootstrap | None = None


def generations_of(model: ServedModel, prompt: Prompt, sampling: SamplingBody) -> list[Generation]:
    """Return the generations of one prompt, each with a seed of its own; several are a group.

    Raises:
        InvalidRequest: The parameters do not fit the model.
    """
    chosen = seeds(
        sampling.seed, len(prompt.request_ids), is_left_open=prompt.bootstrap is not None
    )
    params = engine_params(sampling, model, len(prompt.token_ids))
    rules = sampling.text_rules
    wishes = prompt.wishes
    group = new_request_id() if len(prompt.request_ids) > 1 else ""
    return [
        Generation(
            request=GenerateRequest(
                request_id=request_id,
                prompt_ids=prompt.token_ids,
                sampling=msgspec.structs.replace(params, seed=seed, grammar=wishes.grammar),
                priority=wishes.priority,
                cache_salt=wishes.cache_salt,
                group=group,
                logprobs=wishes.logprobs,
            ),
            rules=rules,
            tokenizer=model.tokenizer,
            bootstrap=prompt.bootstrap,
        )
        for request_id, seed in zip(prompt.request_ids, chosen, strict=True)
    ]


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


class Transcript:
    """Turns the deltas of one generation into pieces.

    Its text does not depend on how tokens were grouped into deltas: with stops tokens are
    read one by one, and those after the match are dropped.

    Args:
        outlet: For ordinary tokens; without one, everything becomes pieces.

    Attributes:
        num_tokens: Read so far, but for what follows a stop.
    """

    __slots__ = (
        "_cached_tokens",
        "_detokenizer",
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
        self, rules: TextRules, detokenizer: Detokenizer, outlet: Outlet | None = None
    ) -> None:
        self._rules = rules
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


def transcript_of(generation: Generation, outlet: Outlet | None = None) -> Transcript:
    """Return the transcript of a generation that begins."""
    rules, tokenizer = generation.rules, generation.tokenizer
    detokenizer = (
        NoText() if tokenizer is None else tokenizer.detokenizer(rules.skip_special_tokens)
    )
    return Transcript(rules, detokenizer, outlet)


async def run(
    backend: Backend, generation: Generation, transcript: Transcript
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of a generation; the last one has an ending.

    The backend's part is over, or cancelled, before the last piece is yielded and when the caller
    closes the generator early.

    Raises:
        TandemError: As the backend raises it, at any point.
    """
    request = generation.request
    # Log-probabilities belong to pieces.
    tap = transcript if transcript.has_outlet and request.logprobs is None else None
    deltas = backend.generate(request, generation.bootstrap, tap)
    async with aclosing(deltas):
        async for delta in deltas:
            piece = transcript.take(delta)
            if piece is None:
                continue
            if piece.ending is not None:
                break
            yield piece
        else:
            raise EngineFailed("the generation ended without saying why")
    yield piece


@dataclass(slots=True)
class Answer:
    """What a generation has made so far.

    Attributes:
        output_ids: All ids so far. Not copied: it grows as pieces are added.
        logprobs: One for each of `output_ids`, when wanted.
        prompt_logprobs: Of the wanted positions, in order.
    """

    text: str
    output_ids: list[int]
    cached_tokens: int = 0
    ending: Ending | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @classmethod
    def empty(cls) -> "Answer":
        """Return the answer before its first piece."""
        return cls("", [])

    def add(self, piece: Piece) -> None:
        """Add what came."""
        self.text += piece.text
        self.output_ids += piece.token_ids
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)
        self.ending = piece.ending
        self.logprobs += piece.logprobs
        self.prompt_logprobs += piece.prompt_logprobs

    def has_room(self) -> bool:
        """See `Outlet`. There always is."""
        return True

    def write(self, text: str, token_ids: Sequence[int]) -> None:
        """See `Outlet`."""
        self.text += text
        self.output_ids += token_ids
