"""The native API: `POST|PUT /generate`, with SGLang's body, answer and event formats.

```
 body ──▶ GenerateBody ──▶ prompts, sampling, n ──▶ a Generation for each ──▶ Generated
```
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta

from tandem.frontend.answers import MetaInfo
from tandem.frontend.apis import answering
from tandem.frontend.backend import ServedModel
from tandem.frontend.chat.body import (
    GenerationBody,
    PerPrompt,
    refuse_unknown,
    refuse_unsupported,
    validate,
)
from tandem.frontend.chat.generation import (
    Generation,
    Ids,
    PromptOptions,
    Prompts,
    Texts,
    create_generations,
    prompt_ids,
    read_prompts,
)
from tandem.frontend.chat.grammars import NativeGrammar, native_grammar
from tandem.frontend.chat.logprobs import MAX_TOP_LOGPROBS, NativeLogprobs
from tandem.frontend.chat.sampling import (
    MAX_STOP_PATTERNS,
    NativeSampling,
    read_sampling,
    require_tokens,
)
from tandem.frontend.http.sse import DONE, EventStream, encode
from tandem.frontend.options import FrontendOptions
from tandem.frontend.request_ids import RequestIdField, ids_of
from tandem.frontend.schemas.budget import Budget
from tandem.frontend.text.transcript import Ending, TextPiece, error_ending
from tandem.wire.errors import ErrorInfo, InvalidRequest
from tandem.wire.generation import LogprobOptions, new_request_id

# The last one is SGLang's, for tokenizers that are not from the `tokenizers` library.
PARAMETERS = NativeSampling.names() | NativeGrammar.names() | {"spaces_between_special_tokens"}


class GenerateBody(GenerationBody):
    """`/generate`, except sampling parameters, which are also accepted at the top level.

    `model` chooses one of several models or an adapter. A server of one model ignores unknown names, as SGLang does.
    """

    model: str = ""
    text: Texts | None = None
    input_ids: Ids | None = None
    sampling_params: PerPrompt[dict[str, Any]] | None = None
    rid: RequestIdField | list[RequestIdField] | None = None
    request_id: RequestIdField | list[RequestIdField] | None = None
    return_logprob: PerPrompt[bool] = False
    logprob_start_len: PerPrompt[Annotated[int, Meta(ge=-1)]] = -1
    top_logprobs_num: PerPrompt[Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]] = 0
    return_text_in_logprobs: bool = False

    def prompts(self) -> Prompts:
        """Return the prompts."""
        if self.text is not None and self.input_ids is not None:
            raise InvalidRequest("send either text or input_ids, not both")
        prompts = self.input_ids if self.text is None else self.text
        if prompts is None:
            raise InvalidRequest("the prompt is missing: send text or input_ids")
        return read_prompts(prompts)


@dataclass(slots=True)
class NativeCall:
    """One checked call of `/generate`.

    Attributes:
        is_list: Whether the answer is a list.
        has_text_in_logprobs: Whether log-probabilities include the text of their tokens.
    """

    generations: list[Generation]
    is_list: bool
    is_stream: bool
    has_text_in_logprobs: bool = False


def read_native(model: ServedModel, _options: FrontendOptions, data: dict[str, Any]) -> NativeCall:
    """Check a body and create its generations: n for each prompt, in order."""
    refuse_unsupported(data)
    body = validate(GenerateBody, data)
    prompts = body.prompts()
    count = len(prompts)
    fields, prefix = _sampling_fields(data, body, count)
    sent = [native_grammar(part) for part in fields]
    budget = Budget()
    parts = [
        (
            read_sampling(NativeSampling, part, model, prefix),
            None if grammar is None else grammar.served(budget),
        )
        for part, grammar in zip(fields, sent, strict=True)
    ]
    parts = parts * count if len(parts) == 1 else parts
    columns = [
        body.per_prompt(name, count, is_batch=prompts.is_batch)
        for name in ("return_logprob", "logprob_start_len", "top_logprobs_num")
    ]
    _check_counts([sampling for sampling, _ in parts])
    n = parts[0][0].n
    names = _request_ids(body.request_id if body.rid is None else body.rid, count, n)
    ids = prompt_ids(model, prompts)
    options = []
    for index, (token_ids, (sampling, grammar)) in enumerate(zip(ids, parts, strict=True)):
        has_logprobs, start, num_top = (column[index] for column in columns)
        logprobs = _logprobs(start, num_top, len(token_ids)) if has_logprobs else None
        if logprobs is None:
            require_tokens(sampling, "max_new_tokens")
        options.append(PromptOptions(sampling, grammar, logprobs))
    return NativeCall(
        create_generations(
            model,
            body,
            prompts,
            ids,
            options=options,
            request_ids=names,
            adapter=body.model if body.model in model.adapters else "",
        ),
        is_list=prompts.is_batch or n > 1,
        is_stream=body.stream,
        has_text_in_logprobs=body.return_text_in_logprobs,
    )


def _logprobs(start: int, num_top: int, num_prompt_tokens: int) -> LogprobOptions:
    if start > num_prompt_tokens:
        raise InvalidRequest(
            f"logprob_start_len: {start} is past the end of the prompt, which has {num_prompt_tokens} tokens"
        )
    return LogprobOptions(num_top=num_top, prompt_start=-1 if start == num_prompt_tokens else start)


def _sampling_fields(
    data: dict[str, Any], body: GenerateBody, count: int
) -> tuple[list[dict[str, Any]], str]:
    """Return the parameters of each prompt, or one set for all prompts, and their prefix in errors.

    Parameters in `sampling_params` override those at the top level.
    """
    params = body.sampling_params
    parts = [part or {} for part in params] if isinstance(params, list) else [params or {}]
    if len(parts) not in {1, count}:
        raise InvalidRequest(
            f"sampling_params: must be an object, or a list with one for each of {count} prompts"
        )
    for part in parts:
        refuse_unsupported(part, "sampling_params.")
        refuse_unknown(part, PARAMETERS)
    return [data | part for part in parts], "sampling_params" if params else ""


def _check_counts(samplings: list[NativeSampling]) -> None:
    n = samplings[0].n
    if any(sampling.n != n for sampling in samplings):
        raise InvalidRequest("sampling_params.n: must be the same for all prompts")
    different = {id(sampling): len(sampling.stop_regex) for sampling in samplings}
    if sum(different.values()) > MAX_STOP_PATTERNS:
        raise InvalidRequest(
            f"stop_regex: all prompts together may have at most {MAX_STOP_PATTERNS} patterns; send patterns "
            "that all prompts share only once, with sampling_params as an object"
        )


def _request_ids(rid: str | list[str] | None, count: int, n: int) -> list[str]:
    """Return an id for each generation: the client's id, numbered if it has several generations."""
    if rid is None:
        return [new_request_id() for _ in range(count * n)]
    names = rid if isinstance(rid, list) else [rid]
    if len(names) not in {1, count}:
        raise InvalidRequest(
            f"rid: must be a string, or a list with one for each of {count} prompts"
        )
    ids = [id_ for name in names for id_ in ids_of(name, count * n // len(names))]
    if len(set(ids)) < len(ids):
        raise InvalidRequest("rid: must be unique for each prompt")
    return ids


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer `/generate`."""
    return await answering.answer(request, read_native, NativeWriter)


class NativeWriter:
    """Writes the answer of one call. A `Writer`."""

    def __init__(self, call: NativeCall, options: FrontendOptions) -> None:
        self._call, self._is_incremental = call, options.incremental_streaming_output

    def body(self, pieces: Sequence[TextPiece]) -> bytes:
        """Return an object, or a list with one object per generation."""
        parts = [_GenerationJson(self._call, i).json(piece) for i, piece in enumerate(pieces)]
        return b"[%b]" % b",".join(parts) if self._call.is_list else parts[0]

    def sinks(self, events: EventStream) -> "list[_NativeEvents]":
        """Return one sink per generation."""
        indexes = range(len(self._call.generations))
        return [_NativeEvents(events, self._call, i, self._is_incremental) for i in indexes]

    def trailer(self) -> bytes:
        """Return `[DONE]`. The events of each generation already contain its token counts."""
        return DONE


def _meta(
    generation: Generation, cached_tokens: int, ending: Ending | None, num_tokens: int
) -> MetaInfo:
    meta = MetaInfo(
        id=generation.id,
        finish_reason=_finish_reason(ending, num_tokens),
        prompt_tokens=len(generation.request.prompt_ids),
        cached_tokens=cached_tokens,
        completion_tokens=num_tokens,
    )
    if by_tier := generation.timings.cached_by_tier:
        device = cached_tokens - sum(by_tier.values())
        meta.cached_tokens_details = {"device": device, **by_tier}
    if ending is not None and generation.timings.is_resampled:
        meta.is_resampled = True
    return meta


def _finish_reason(ending: Ending | None, num_tokens: int) -> dict[str, object] | None:
    """Return an ending in SGLang's format. None: the generation is still running."""
    if ending is None:
        return None
    if ending.reason == "stop":
        return {"type": "stop", "matched": ending.matched}
    if ending.reason == "length":
        return {"type": "length", "length": num_tokens}
    assert ending.error is not None
    return {
        "type": "abort",
        "message": ending.error.message,
        "status_code": ending.error.status,
        "err_type": ending.error.code,
    }


class _GenerationJson:
    """One generation as JSON: the full text so far, or only the new text.

    Repeated fields are kept as encoded bytes, so that an ordinary token only joins them.
    """

    __slots__ = (
        "_cached_tokens",
        "_ids",
        "_is_incremental",
        "_label",
        "_logprobs",
        "_meta",
        "_num_tokens",
        "_text",
        "generation",
    )

    def __init__(self, call: NativeCall, index: int, is_incremental: bool = False) -> None:
        self.generation, self._is_incremental = call.generations[index], is_incremental
        self._label = b""  # fields after `meta_info`
        # JSON without the quotes and brackets.
        self._text, self._ids = bytearray(), bytearray()
        self._num_tokens = self._cached_tokens = 0
        # The meta_info of an ordinary event: the bytes before and after its number of tokens.
        self._meta: tuple[bytes, bytes] | None = None
        self._logprobs: NativeLogprobs | None = None
        if (logprobs := self.generation.request.logprobs) is not None:
            has_text = call.has_text_in_logprobs
            self._logprobs = NativeLogprobs(self.generation, logprobs, has_text=has_text)

    def json(self, piece: TextPiece, prefix: bytes = b"", suffix: bytes = b"") -> bytes:
        """Add a piece and return the JSON, between `prefix` and `suffix`."""
        self._add(piece)
        if piece.cached_tokens > self._cached_tokens:
            self._cached_tokens, self._meta = piece.cached_tokens, None
        if self._logprobs is None and piece.ending is None:
            if self._meta is None:
                self._meta = self._running_meta()
            meta = b"%b%d%b" % (self._meta[0], self._num_tokens, self._meta[1])
        else:
            meta = self._full_meta(piece)
        return b"".join(
            (
                prefix,
                b'{"text":"',
                self._text,
                b'","output_ids":[',
                self._ids,
                b'],"meta_info":',
                meta,
                self._label,
                b"}",
                suffix,
            )
        )

    def _running_meta(self) -> tuple[bytes, bytes]:
        field = b'"completion_tokens":'
        before, _, after = encode(_meta(self.generation, self._cached_tokens, None, 0)).rpartition(
            field + b"0"
        )
        return before + field, after

    def _full_meta(self, piece: TextPiece) -> bytes:
        meta = _meta(self.generation, self._cached_tokens, piece.ending, self._num_tokens)
        if (logprobs := self._logprobs) is not None:
            if self._is_incremental:
                logprobs.clear()
            logprobs.add((piece.token_ids, piece.logprobs), piece.prompt_logprobs)
            logprobs.fill(meta)
        if piece.ending is not None:
            meta.e2e_latency = self.generation.timings.elapsed_s()
            if self.generation.timings.is_requested:
                self._label += b',"timings":%b' % encode(self.generation.report())
        return encode(meta)

    def _add(self, piece: TextPiece) -> None:
        if self._is_incremental:
            self._text.clear()
            self._ids.clear()
        self._text += encode(piece.text)[1:-1]
        if piece.token_ids:
            if self._ids:
                self._ids += b","
            # Encoded once here, because a complete answer may have a million tokens.
            self._ids += encode(list(piece.token_ids))[1:-1]
            self._num_tokens += len(piece.token_ids)


class _NativeEvents(_GenerationJson):
    """Sends one generation as events. A `StreamSink`."""

    __slots__ = ("_events", "drain")

    def __init__(
        self, events: EventStream, call: NativeCall, index: int, is_incremental: bool
    ) -> None:
        super().__init__(call, index, is_incremental)
        self._events, self.drain = events, events.drain
        self._label = b',"index":%d' % index if call.is_list else b""

    def write(self, piece: TextPiece) -> bool:
        """Send the event of a piece."""
        return self._events.put(self.json(piece, b"data: ", b"\n\n"))

    def write_failure(self, error: ErrorInfo) -> None:
        """Send the final event of a generation that failed."""
        self.write(TextPiece("", (), ending=error_ending(error)))
