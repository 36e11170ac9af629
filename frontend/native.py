"""The native API: `POST|PUT /generate`, with SGLang's bodies, answers and events.

```
 body ──▶ GenerateBody ──▶ prompts, sampling, n ──▶ a Generation for each ──▶ Generated
```
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field

from tandem.frontend import answering
from tandem.frontend.answers import MetaInfo
from tandem.frontend.backend import ServedModel
from tandem.frontend.body import (
    UNSUPPORTED,
    GenerationBody,
    Many,
    PerPrompt,
    refuse_unsupported,
    validate,
    worded,
)
from tandem.frontend.generation import (
    Generation,
    Ids,
    Prompts,
    Texts,
    Wanted,
    generations_of,
    part_id,
    prompt_ids,
    read_prompts,
)
from tandem.frontend.grammars import NativeGrammar, native_grammar
from tandem.frontend.logprobs import MAX_TOP_LOGPROBS, NativeLogprobs
from tandem.frontend.options import FrontendOptions
from tandem.frontend.sampling import (
    MAX_STOP_PATTERNS,
    NativeSampling,
    read_sampling,
    require_tokens,
)
from tandem.frontend.sse import DONE, EventStream, encode
from tandem.frontend.transcript import Ending, Piece, failed
from tandem.wire.errors import ErrorInfo, InvalidRequest
from tandem.wire.generation import LogprobsWanted, RequestId, new_request_id

_MAX_ID_CHARS = 256
_RID_SENTENCE = f"must be a string of 1 to {_MAX_ID_CHARS} characters, or one for each prompt"
_RID = Annotated[str, Field(min_length=1, max_length=_MAX_ID_CHARS)]
_PARAMETERS = NativeSampling.names() | NativeGrammar.names()
# SGLang has it for tokenizers that are not those of the `tokenizers` library.
_WITHOUT_EFFECT = frozenset({"spaces_between_special_tokens"})
# Characters of an unknown name that an error repeats.
_MAX_NAME_CHARS = 64


class GenerateBody(GenerationBody):
    """`/generate`, without sampling parameters, which may also stand at the top level."""

    text: Texts | None = None
    input_ids: Ids | None = None
    sampling_params: PerPrompt[dict[str, Any]] | None = None
    rid: Annotated[_RID | Many[_RID], worded(_RID_SENTENCE)] | None = None
    return_logprob: PerPrompt[bool] = False
    logprob_start_len: PerPrompt[Annotated[int, Field(ge=-1)]] = -1
    top_logprobs_num: PerPrompt[Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]] = 0
    return_text_in_logprobs: bool = False

    def prompts(self) -> Prompts:
        """Return the prompts."""
        if self.text is not None and self.input_ids is not None:
            raise InvalidRequest("send either text or input_ids, not both")
        given = self.input_ids if self.text is None else self.text
        if given is None:
            raise InvalidRequest("there is no prompt: send text or input_ids")
        return read_prompts(given)


@dataclass(slots=True)
class NativeCall:
    """One checked call of `/generate`.

    Attributes:
        is_list: Whether it is answered by a list.
        has_text_in_logprobs: Whether log-probabilities have the text of their tokens.
    """

    generations: list[Generation]
    is_list: bool
    is_stream: bool
    has_text_in_logprobs: bool = False


def read_native(model: ServedModel, _options: FrontendOptions, data: dict[str, Any]) -> NativeCall:
    """Check a body and make its generations: n for each prompt, in order."""
    refuse_unsupported(data)
    body = validate(GenerateBody, data)
    prompts = body.prompts()
    count = len(prompts)
    fields, prefix = _sampling_fields(data, body, count)
    parts = [
        (read_sampling(NativeSampling, part, model, prefix), native_grammar(part))
        for part in fields
    ]
    parts = parts * count if len(parts) == 1 else parts
    columns = [
        body.per_prompt(name, count, is_batch=prompts.is_batch)
        for name in ("return_logprob", "logprob_start_len", "top_logprobs_num")
    ]
    _check_counts([sampling for sampling, _ in parts])
    n = parts[0][0].n
    names = _request_ids(body.rid, count, n)
    ids = prompt_ids(model, prompts)
    wanted = []
    for index, (token_ids, (sampling, grammar)) in enumerate(zip(ids, parts, strict=True)):
        has_logprobs, start, num_top = (column[index] for column in columns)
        logprobs = _logprobs_wanted(start, num_top, len(token_ids)) if has_logprobs else None
        if logprobs is None:
            require_tokens(sampling, "max_new_tokens")
        wanted.append(Wanted(sampling, grammar, logprobs))
    return NativeCall(
        generations_of(model, body, prompts, ids, wanted=wanted, names=names),
        is_list=prompts.is_batch or n > 1,
        is_stream=body.stream,
        has_text_in_logprobs=body.return_text_in_logprobs,
    )


def _logprobs_wanted(start: int, num_top: int, num_prompt_tokens: int) -> LogprobsWanted:
    if start > num_prompt_tokens:
        raise InvalidRequest(
            f"logprob_start_len: {start} is behind the prompt of {num_prompt_tokens} tokens"
        )
    return LogprobsWanted(num_top=num_top, prompt_start=-1 if start == num_prompt_tokens else start)


def _sampling_fields(
    data: dict[str, Any], body: GenerateBody, count: int
) -> tuple[list[dict[str, Any]], str]:
    """Return the parameters of each prompt, or one for all, and their prefix in errors.

    Those in `sampling_params` win over the top level.
    """
    given = body.sampling_params
    parts = [part or {} for part in given] if isinstance(given, list) else [given or {}]
    if len(parts) not in {1, count}:
        raise InvalidRequest(
            f"sampling_params: must be an object, or a list with one for each of {count} prompts"
        )
    for part in parts:
        refuse_unsupported(part, "sampling_params.")
        _check_names(part)
    return [data | part for part in parts], "sampling_params" if given else ""


def _check_names(params: dict[str, Any]) -> None:
    """Reject a name that is no sampling parameter, as SGLang does: most are misspelt."""
    for name, value in params.items():
        if value is None or name in _PARAMETERS or name in _WITHOUT_EFFECT or name in UNSUPPORTED:
            continue
        shown = name[:_MAX_NAME_CHARS]
        raise InvalidRequest(f"sampling_params.{shown}: is no sampling parameter")


def _check_counts(samplings: list[NativeSampling]) -> None:
    n = samplings[0].n
    if any(sampling.n != n for sampling in samplings):
        raise InvalidRequest("sampling_params.n: must be the same for all prompts")
    different = {id(sampling): len(sampling.stop_regex) for sampling in samplings}
    if sum(different.values()) > MAX_STOP_PATTERNS:
        raise InvalidRequest(
            f"stop_regex: all prompts together may have {MAX_STOP_PATTERNS}; patterns that hold "
            "for each prompt may be sent once, with sampling_params an object"
        )


def _request_ids(rid: str | list[str] | None, count: int, n: int) -> list[RequestId]:
    """Return an id for each generation: the client's own, with a number where it has several."""
    if rid is None:
        return [new_request_id() for _ in range(count * n)]
    names = rid if isinstance(rid, list) else [rid]
    if len(names) not in {1, count}:
        raise InvalidRequest(f"rid: {_RID_SENTENCE}")
    per_name = count * n // len(names)
    if per_name == 1:
        ids = [RequestId(name) for name in names]
    else:
        ids = [part_id(name, index) for name in names for index in range(per_name)]
    if len(set(ids)) < len(ids):
        raise InvalidRequest("rid: must be different for each prompt")
    return ids


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer `/generate`."""
    return await answering.answer(request, read_native, NativeWriter)


class NativeWriter:
    """Writes the answer of one call. A `Writer`."""

    def __init__(self, call: NativeCall, options: FrontendOptions) -> None:
        self._call, self._is_incremental = call, options.incremental_streaming_output

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        """Return an object, or a list with one for each generation."""
        parts = [_Generated(self._call, i).json(piece) for i, piece in enumerate(pieces)]
        return b"[%b]" % b",".join(parts) if self._call.is_list else parts[0]

    def sinks(self, events: EventStream) -> "list[_Events]":
        """Return what writes each generation to the stream."""
        indexes = range(len(self._call.generations))
        return [_Events(events, self._call, i, self._is_incremental) for i in indexes]

    def summary(self) -> bytes:
        """Return the end: each generation has its own counts."""
        return DONE


def _meta(
    generation: Generation, cached_tokens: int, ending: Ending | None, num_tokens: int
) -> MetaInfo:
    meta = MetaInfo(
        id=generation.request.request_id,
        finish_reason=_finish_reason(ending, num_tokens),
        prompt_tokens=len(generation.request.prompt_ids),
        cached_tokens=cached_tokens,
        completion_tokens=num_tokens,
    )
    if by_tier := generation.timings.cached_by_tier:
        device = cached_tokens - sum(by_tier.values())
        meta.cached_tokens_details = {"device": device, **by_tier}
    return meta


def _finish_reason(ending: Ending | None, num_tokens: int) -> dict[str, object] | None:
    """Return an ending as SGLang writes it; None while running."""
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


class _Generated:
    """One generation as JSON: all so far, or only what is new.

    What is repeated is kept as the bytes it is sent as. An ordinary token costs joining them.
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
        self._label = b""  # fields behind `meta_info`
        # JSON, without quotes and brackets.
        self._text, self._ids = bytearray(), bytearray()
        self._num_tokens = self._cached_tokens = 0
        # Of an ordinary event: before its number of tokens, and behind it.
        self._meta: tuple[bytes, bytes] | None = None
        self._logprobs: NativeLogprobs | None = None
        if (wanted := self.generation.request.logprobs) is not None:
            has_text = call.has_text_in_logprobs
            self._logprobs = NativeLogprobs(self.generation, wanted, has_text=has_text)

    def json(self, piece: Piece, prefix: bytes = b"", suffix: bytes = b"") -> bytes:
        """Add a piece and return the JSON, between `prefix` and `suffix`."""
        self._add(piece)
        if piece.cached_tokens > self._cached_tokens:
            self._cached_tokens, self._meta = piece.cached_tokens, None
        if self._logprobs is None and piece.ending is None:
            if self._meta is None:
                self._meta = self._running_meta()
            meta = b"%b%d%b" % (self._meta[0], self._num_tokens, self._meta[1])
        else:
            meta = self._whole_meta(piece)
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
        before, _, behind = encode(_meta(self.generation, self._cached_tokens, None, 0)).rpartition(
            field + b"0"
        )
        return before + field, behind

    def _whole_meta(self, piece: Piece) -> bytes:
        meta = _meta(self.generation, self._cached_tokens, piece.ending, self._num_tokens)
        if (logprobs := self._logprobs) is not None:
            if self._is_incremental:
                logprobs.clear()
            logprobs.add((piece.token_ids, piece.logprobs), piece.prompt_logprobs)
            logprobs.fill(meta)
        if piece.ending is not None:
            meta.e2e_latency = self.generation.timings.elapsed_s()
            if self.generation.timings.is_wanted:
                self._label += b',"timings":%b' % encode(self.generation.report())
        return encode(meta)

    def _add(self, piece: Piece) -> None:
        if self._is_incremental:
            self._text.clear()
            self._ids.clear()
        self._text += encode(piece.text)[1:-1]
        if piece.token_ids:
            if self._ids:
                self._ids += b","
            # A whole answer may have a million tokens.
            self._ids += encode(list(piece.token_ids))[1:-1]
            self._num_tokens += len(piece.token_ids)


class _Events(_Generated):
    """Sends one generation as events. A `StreamSink`."""

    __slots__ = ("_events", "drain")

    def __init__(
        self, events: EventStream, call: NativeCall, index: int, is_incremental: bool
    ) -> None:
        super().__init__(call, index, is_incremental)
        self._events, self.drain = events, events.drain
        self._label = b',"index":%d' % index if call.is_list else b""

    def write(self, piece: Piece) -> bool:
        """Send the event of a piece."""
        return self._events.put(self.json(piece, b"data: ", b"\n\n"))

    def write_failure(self, error: ErrorInfo) -> None:
        """Send the end of a generation that an error cut short."""
        self.write(Piece("", (), ending=failed(error)))
