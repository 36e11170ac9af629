"""vLLM's API of token ids: `/inference/v1/generate`, whole or streamed.

```
 body ──▶ InferenceBody ──▶ one prompt, sampling, n ──▶ a Generation for each ──▶ Inference, InferenceChunk
```
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from aiohttp import web
from msgspec import UNSET
from pydantic import Field

from tandem.frontend import answering
from tandem.frontend.answers import Inference, InferenceChoice, InferenceChunk, TokenIds, Usage
from tandem.frontend.backend import ServedModel
from tandem.frontend.body import (
    UNSUPPORTED_IN_INFERENCE,
    Many,
    refuse_unknown,
    refuse_unsupported,
)
from tandem.frontend.generation import (
    Generation,
    Prompts,
    Wanted,
    generations_of,
    prompt_ids,
    require_tokenizer,
)
from tandem.frontend.grammars import OpenAIGrammar, openai_grammar
from tandem.frontend.logprobs import ChatLogprobs, IdLogprobs
from tandem.frontend.middleware import error_body
from tandem.frontend.openai import timings_of
from tandem.frontend.openai_body import NumTop, OpenAIBody, read_body
from tandem.frontend.options import FrontendOptions
from tandem.frontend.request_ids import ids_of
from tandem.frontend.sampling import OpenAISampling, read_sampling
from tandem.frontend.sse import DONE, EventStream, encode, event
from tandem.frontend.transcript import Ending, Piece, failed
from tandem.wire.errors import ErrorInfo, InvalidRequest
from tandem.wire.generation import LogprobsWanted, new_request_id

# vLLM's own among the sampling parameters, which its clients may send and which cannot change the answer.
_WITHOUT_EFFECT = frozenset(
    {
        *("detokenize", "flat_logprobs", "output_kind", "output_text_buffer_length", "skip_clone"),
        *("routed_experts_prompt_start", "skip_reading_prefix_cache"),
        "spaces_between_special_tokens",
    }
)


class InferenceSampling(OpenAISampling):
    """`sampling_params` of `/inference/v1/generate`, without the grammar."""

    logprobs: NumTop | None = None


class InferenceBody(OpenAIBody):
    """`/inference/v1/generate`."""

    token_ids: Annotated[Many[int], Field(min_length=1)]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    output_mode: Literal["tokens", "text"] = "tokens"
    reasoning_ended: bool | None = None


@dataclass(slots=True)
class InferenceCall:
    """One checked call: n generations of one prompt."""

    request_id: str
    model_name: str
    model: ServedModel
    body: InferenceBody
    generations: list[Generation]
    is_stream: bool


PARAMETERS = InferenceSampling.names() | OpenAIGrammar.names() | _WITHOUT_EFFECT


def read_inference(
    model: ServedModel, _options: FrontendOptions, data: dict[str, Any]
) -> InferenceCall:
    """Check a body of `/inference/v1/generate`."""
    body = read_body(InferenceBody, model, data, UNSUPPORTED_IN_INFERENCE)
    params = body.sampling_params
    refuse_unsupported(params, "sampling_params.")
    refuse_unknown(params, PARAMETERS)
    sampling = read_sampling(InferenceSampling, params, model, "sampling_params")
    grammar = openai_grammar(params)
    if grammar is not None and body.reasoning_ended is False:
        raise InvalidRequest("reasoning_ended: a grammar holds from the first token; leave it out")
    if body.output_mode == "text":
        require_tokenizer(model)
    prompts = Prompts(is_batch=False, ids=[body.token_ids])
    num_top = sampling.logprobs
    logprobs = None if num_top is None else LogprobsWanted(num_top=num_top)
    request_id, adapter = body.rid or new_request_id(), model.adapter_named(body.model)
    generations = generations_of(
        model,
        body,
        prompts,
        prompt_ids(model, prompts),
        wanted=[Wanted(sampling, grammar, logprobs)],
        names=ids_of(request_id, sampling.n),
        adapter=adapter,
    )
    name = adapter or model.name
    return InferenceCall(request_id, name, model, body, generations, is_stream=body.stream)


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer `/inference/v1/generate`, whose `sampling_params` are those of chats."""
    return await answering.answer(request, read_inference, InferenceWriter)


class InferenceWriter:
    """Writes the answer of one call. A `Writer`."""

    def __init__(self, call: InferenceCall, _options: FrontendOptions) -> None:
        self._call = call
        self._choices: Sequence[_Choice] = ()
        # For the first event.
        self._prompt_ids = _prompt_ids(call)

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        """Return the answer with a choice for each generation."""
        self._choices = [_Choice(self._call, index) for index in range(len(pieces))]
        pairs = zip(self._choices, pieces, strict=True)
        return encode(
            Inference(
                request_id=self._call.request_id,
                created=int(time.time()),
                model=self._call.model_name,
                output_mode=self._call.body.output_mode,
                choices=[choice.take(piece) for choice, piece in pairs],
                usage=self._usage(),
                prompt_token_ids=_prompt_ids(self._call),
                timings=timings_of(self._call.generations),
            )
        )

    def sinks(self, events: EventStream) -> "list[_Events]":
        """Return what writes each choice to the stream."""
        indexes = range(len(self._call.generations))
        self._choices = sinks = [_Events(self, events, self._call, index) for index in indexes]
        return sinks

    def chunk(self, *choices: InferenceChoice, **extra: Any) -> bytes:
        """Return an event."""
        if self._call.body.stream_options.continuous_usage_stats:
            extra = {"usage": self._usage(), **extra}
        prompt_ids, self._prompt_ids = self._prompt_ids, UNSET
        return event(
            InferenceChunk(
                request_id=self._call.request_id,
                output_mode=self._call.body.output_mode,
                choices=choices,
                prompt_token_ids=prompt_ids,
                **extra,
            )
        )

    def summary(self) -> bytes:
        """Return the usage and the timings, where the client wants them, and the end."""
        found = b""
        if self._call.body.stream_options.include_usage:
            found = self.chunk(usage=self._usage())
        if (timings := timings_of(self._call.generations)) is not UNSET:
            found += self.chunk(timings=timings)
        return found + DONE

    def _usage(self) -> Usage:
        num_prompt = len(self._call.body.token_ids)
        num_output = sum(choice.num_tokens for choice in self._choices)
        num_cached = sum(choice.cached_tokens for choice in self._choices)
        return Usage(num_prompt, num_output, num_prompt + num_output, {"cached_tokens": num_cached})


def _prompt_ids(call: InferenceCall) -> TokenIds:
    return call.body.token_ids if call.body.return_token_ids else UNSET


class _Choice:
    """Makes one choice of pieces.

    Attributes:
        num_tokens, cached_tokens: For the usage.
    """

    def __init__(self, call: InferenceCall, index: int) -> None:
        self.generation, self.index = call.generations[index], index
        self.num_tokens = self.cached_tokens = 0
        self._eos_token_ids = call.model.eos_token_ids
        self._has_text = call.body.output_mode == "text"
        self._logprobs: ChatLogprobs | IdLogprobs | None = None
        if (wanted := self.generation.request.logprobs) is not None:
            self._logprobs = (
                ChatLogprobs(
                    self.generation.tokenizer,
                    wanted.num_top,
                    has_ids_as_tokens=call.body.return_tokens_as_token_ids,
                )
                if self._has_text
                else IdLogprobs(wanted.num_top)
            )

    def take(self, piece: Piece) -> InferenceChoice:
        """Return a piece, or all of them joined, as a choice."""
        self.num_tokens += len(piece.token_ids)
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs.write((piece.token_ids, piece.logprobs))
        return InferenceChoice(
            self.index,
            list(piece.token_ids),
            logprobs,
            piece.ending.reason if piece.ending is not None else None,
            self._stop_reason(piece.ending),
            piece.text if self._has_text else UNSET,
        )

    def _stop_reason(self, ending: Ending | None) -> int | str | None:
        """Return the stop that the client chose: the model's own is none."""
        matched = ending.matched if ending is not None else None
        return None if matched in self._eos_token_ids else matched


class _Events(_Choice):
    """Sends one choice as events. A `StreamSink`."""

    def __init__(
        self, writer: InferenceWriter, events: EventStream, call: InferenceCall, index: int
    ) -> None:
        super().__init__(call, index)
        self._chunk, self._events, self.drain = writer.chunk, events, events.drain

    def write(self, piece: Piece) -> bool:
        """Send the event of a piece. One without news leaves the room as it is."""
        choice = self.take(piece)
        if not (choice.token_ids or choice.text or piece.ending):
            return True
        return self._events.put(self._chunk(choice))

    def write_failure(self, error: ErrorInfo) -> None:
        """Send the end of a choice that an error cut short."""
        choice = self.take(Piece("", (), ending=failed(error)))
        self._events.put(self._chunk(choice, error=error_body(error).error))
