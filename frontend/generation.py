"""One generation at the edge: what is asked of the backend, and the answer that its pieces make.

What is common to both APIs, without HTTP. How ids become text is in `frontend/transcript.py`.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from tandem.frontend.backend import Backend, Bootstrap, ServedModel
from tandem.frontend.detokenizer import NoText
from tandem.frontend.sampling import SamplingBody, TextRules, engine_params, seeds
from tandem.frontend.timings import Report, Timings, TimingsSink
from tandem.frontend.tokenizer import Tokenizer
from tandem.frontend.transcript import Ending, Gaps, Outlet, Piece, Transcript
from tandem.wire.errors import EngineFailed
from tandem.wire.generation import GenerateRequest, Grammar, LogprobsWanted, TokenLogprobs
from tandem.wire.ids import RequestId, new_request_id


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation to run.

    Attributes:
        tokenizer: None when the model has none: the text stays empty.
        bootstrap: Where its other half is, when a router of SGLang's kind chose the pair.
        timings: Where its time goes.
        trace: Told of that when it is over.
    """

    request: GenerateRequest
    rules: TextRules
    tokenizer: Tokenizer | None
    bootstrap: Bootstrap | None = None
    timings: Timings = field(default_factory=Timings)
    trace: TimingsSink | None = None

    def report(self) -> Report:
        """Return where its time has gone."""
        request = self.request
        return self.timings.report(request.request_id, len(request.prompt_ids))


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a client wants beside sampling parameters; see `GenerateRequest`."""

    priority: int = 0
    cache_salt: str = ""
    logprobs: LogprobsWanted | None = None
    grammar: Grammar | None = None
    session: str = ""


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
                session=wishes.session,
            ),
            rules=rules,
            tokenizer=model.tokenizer,
            bootstrap=prompt.bootstrap,
        )
        for request_id, seed in zip(prompt.request_ids, chosen, strict=True)
    ]


def transcript_of(
    generation: Generation, outlet: Outlet | None = None, gaps: Gaps | None = None
) -> Transcript:
    """Return the transcript of a generation that begins."""
    rules, tokenizer = generation.rules, generation.tokenizer
    detokenizer = (
        NoText() if tokenizer is None else tokenizer.detokenizer(rules.skip_special_tokens)
    )
    return Transcript(rules, detokenizer, outlet, gaps)


async def run(
    backend: Backend, generation: Generation, transcript: Transcript
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of a generation; the last one has an ending.

    The backend's part is over, or cancelled, before the last piece is yielded and when the caller
    closes the generator early.

    Raises:
        TandemError: As the backend raises it, at any point.
    """
    request, timings = generation.request, generation.timings
    # Log-probabilities belong to pieces.
    tap = transcript if transcript.has_outlet and request.logprobs is None else None
    timings.sent()
    deltas = backend.generate(request, generation.bootstrap, tap)
    async with aclosing(deltas):
        async for delta in deltas:
            timings.came(delta)
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
