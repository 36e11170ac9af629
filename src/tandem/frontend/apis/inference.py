"""vLLM's token-id API: `/inference/v1/generate`, as one body or streamed.

```
 body ──▶ InferenceBody ──▶ one prompt, sampling, n ──▶ a Generation for each ──▶ Inference, InferenceChunk
```
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from aiohttp import web
from msgspec import UNSET, Meta, field

from tandem.frontend.answers import (
    Inference,
    InferenceChoice,
    InferenceChunk,
    OptionalTokenIds,
    Usage,
)
from tandem.frontend.apis import answering
from tandem.frontend.apis.openai import timings_of
from tandem.frontend.backend import ServedModel
from tandem.frontend.chat.body import (
    UNSUPPORTED_IN_INFERENCE,
    refuse_unknown,
    refuse_unsupported,
)
from tandem.frontend.chat.generation import (
    Generation,
    PromptOptions,
    Prompts,
    create_generations,
    prompt_ids,
    require_tokenizer,
)
from tandem.frontend.chat.grammars import OpenAIGrammar, openai_grammar
from tandem.frontend.chat.logprobs import ChatLogprobs, IdLogprobs
from tandem.frontend.chat.openai_body import NumTop, OpenAIBody, read_body
from tandem.frontend.chat.sampling import OpenAISampling, read_sampling
from tandem.frontend.http.api_errors import error_body
from tandem.frontend.http.sse import DONE, EventStream, encode, event
from tandem.frontend.options import FrontendOptions
from tandem.frontend.request_ids import ids_of
from tandem.frontend.schemas.budget import Budget
from tandem.frontend.text.transcript import Ending, TextPiece, error_ending
from tandem.wire.errors import ErrorInfo, InvalidRequest
from tandem.wire.generation import LogprobOptions, new_request_id

# Sampling parameters of vLLM that clients may send and that do not change the answer.
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


class InferenceBody(OpenAIBody, kw_only=True):
    """`/inference/v1/generate`."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    sampling_params: dict[str, Any] = field(default_factory=dict)
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
    sent = openai_grammar(params)
    if sent is not None and body.reasoning_ended is False:
        raise InvalidRequest(
            "reasoning_ended: must not be false with a grammar, which applies from the first token; leave it out"
        )
    if body.output_mode == "text":
        require_tokenizer(model)
    grammar = None if sent is None else sent.served(Budget())
    prompts = Prompts(is_batch=False, ids=[body.token_ids])
    num_top = sampling.logprobs
    logprobs = None if num_top is None else LogprobOptions(num_top=num_top)
    request_id, adapter = body.client_id or new_request_id(), model.resolve_adapter(body.model)
    generations = create_generations(
        model,
        body,
        prompts,
        prompt_ids(model, prompts),
        options=[PromptOptions(sampling, grammar, logprobs)],
        request_ids=ids_of(request_id, sampling.n),
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
        self._choices: Sequence[_InferenceChoiceMaker] = ()
        # Sent with the first event only.
        self._prompt_ids = _prompt_ids(call)

    def body(self, pieces: Sequence[TextPiece]) -> bytes:
        """Return the answer with one choice per generation."""
        self._choices = [_InferenceChoiceMaker(self._call, index) for index in range(len(pieces))]
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

    def sinks(self, events: EventStream) -> "list[_InferenceEvents]":
        """Return one sink per choice."""
        indexes = range(len(self._call.generations))
        self._choices = sinks = [
            _InferenceEvents(self, events, self._call, index) for index in indexes
        ]
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

    def trailer(self) -> bytes:
        """Return the usage and the timings if the client requested them, then `[DONE]`."""
        events = b""
        if self._call.body.stream_options.include_usage:
            events = self.chunk(usage=self._usage())
        if (timings := timings_of(self._call.generations)) is not UNSET:
            events += self.chunk(timings=timings)
        return events + DONE

    def _usage(self) -> Usage:
        num_prompt = len(self._call.body.token_ids)
        num_output = sum(choice.num_tokens for choice in self._choices)
        num_cached = sum(choice.cached_tokens for choice in self._choices)
        return Usage(num_prompt, num_output, num_prompt + num_output, {"cached_tokens": num_cached})


def _prompt_ids(call: InferenceCall) -> OptionalTokenIds:
    return call.body.token_ids if call.body.return_token_ids else UNSET


class _InferenceChoiceMaker:
    """Converts the pieces of one generation to a choice.

    Attributes:
        num_tokens, cached_tokens: Counts for the usage.
    """

    def __init__(self, call: InferenceCall, index: int) -> None:
        self.generation, self.index = call.generations[index], index
        self.num_tokens = self.cached_tokens = 0
        self._eos_token_ids = call.model.eos_token_ids
        self._has_text = call.body.output_mode == "text"
        self._logprobs: ChatLogprobs | IdLogprobs | None = None
        if (logprobs := self.generation.request.logprobs) is not None:
            self._logprobs = (
                ChatLogprobs(
                    self.generation.tokenizer,
                    logprobs.num_top,
                    has_ids_as_tokens=call.body.return_tokens_as_token_ids,
                )
                if self._has_text
                else IdLogprobs(logprobs.num_top)
            )

    def take(self, piece: TextPiece) -> InferenceChoice:
        """Convert a piece to a choice; for a complete answer, all pieces joined into one."""
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
        """Return the stop token or string that matched. None: none matched, or the model's own did."""
        matched = ending.matched if ending is not None else None
        return None if matched in self._eos_token_ids else matched


class _InferenceEvents(_InferenceChoiceMaker):
    """Sends one choice as events. A `StreamSink`."""

    def __init__(
        self, writer: InferenceWriter, events: EventStream, call: InferenceCall, index: int
    ) -> None:
        super().__init__(call, index)
        self._chunk, self._events, self.drain = writer.chunk, events, events.drain

    def write(self, piece: TextPiece) -> bool:
        """Send the event of a piece. An empty piece sends nothing and returns True."""
        choice = self.take(piece)
        if not (choice.token_ids or choice.text or piece.ending):
            return True
        return self._events.put(self._chunk(choice))

    def write_failure(self, error: ErrorInfo) -> None:
        """Send the final event of a choice that failed."""
        choice = self.take(TextPiece("", (), ending=error_ending(error)))
        self._events.put(self._chunk(choice, error=error_body(error).error))
