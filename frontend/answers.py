"""What the routes answer, as msgspec structs. The OpenAPI document describes them from here.

A field that is `UNSET` is left out of the JSON.
"""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from tandem.frontend.timings import Report

# [log-probability, token id, text or null], as SGLang writes it.
Triple = list[float | int | str | None]
FinishReason = Literal["stop", "length", "tool_calls", "abort"] | None
Timings = Report | list[Report] | UnsetType
# Where the client asked for them, as vLLM sends them.
TokenIds = Sequence[int] | UnsetType


class ErrorDetail(Struct, frozen=True):
    """What went wrong, in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Struct, frozen=True):
    """An answer that is an error."""

    error: ErrorDetail


class MetaInfo(Struct):
    """SGLang's `meta_info`."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int = 0
    cached_tokens_details: dict[str, int] | UnsetType = UNSET
    input_token_logprobs: list[Triple] | UnsetType = UNSET
    output_token_logprobs: list[Triple] | UnsetType = UNSET
    input_top_logprobs: list[list[Triple] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Triple] | None] | UnsetType = UNSET
    e2e_latency: float | UnsetType = UNSET


class Generated(Struct):
    """One generation, as SGLang writes it: whole, or as an event so far or what is new of it.

    Attributes:
        index: Of an event's generation, where there are several.
    """

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    timings: Timings = UNSET
    index: int | UnsetType = UNSET


class Usage(Struct, frozen=True):
    """Tokens of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Tokenized(Struct, frozen=True):
    """The token ids of a text, or lists of these; their strings as the vocabulary has them."""

    tokens: Sequence[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: Sequence[str | list[str]] | None


class Detokenized(Struct, frozen=True):
    """The text of token ids as vLLM names it, with special tokens, and as SGLang does, without."""

    prompt: str | list[str]
    text: str | list[str]


# SGLang's name for what ended a choice, and vLLM's, which leaves the model's own end out. Only where it ended.
Matched = int | str | UnsetType | None


class CompletionChoice(Struct, frozen=True):
    """A choice of `/v1/completions`, or what is new of it."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET
    matched_stop: Matched = UNSET
    stop_reason: Matched = UNSET


class ChatChoice(Struct, frozen=True):
    """A choice of `/v1/chat/completions`."""

    index: int
    message: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    token_ids: TokenIds = UNSET
    matched_stop: Matched = UNSET
    stop_reason: Matched = UNSET


class ChatDelta(Struct, frozen=True):
    """What is new of a choice of `/v1/chat/completions`."""

    index: int
    delta: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    token_ids: TokenIds = UNSET
    matched_stop: Matched = UNSET
    stop_reason: Matched = UNSET


class InferenceChoice(Struct, frozen=True):
    """A choice of `/inference/v1/generate`, or what is new of it.

    Attributes:
        stop_reason: The stop string or token of the request that ended it.
    """

    index: int
    token_ids: list[int]
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    text: str | UnsetType = UNSET


class Inference(Struct, kw_only=True):
    """A whole answer of `/inference/v1/generate`."""

    request_id: str
    created: int
    model: str
    output_mode: str
    choices: Sequence[InferenceChoice]
    usage: Usage
    prompt_token_ids: TokenIds = UNSET
    timings: Timings = UNSET


class InferenceChunk(Struct, kw_only=True):
    """One event of `/inference/v1/generate`."""

    request_id: str
    output_mode: str
    choices: Sequence[InferenceChoice] = ()
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: TokenIds = UNSET
    error: ErrorDetail | UnsetType = UNSET
    timings: Timings = UNSET


class _Head(Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str


class Completion(_Head, kw_only=True):
    """A whole answer of `/v1/completions`."""

    choices: Sequence[CompletionChoice]
    usage: Usage
    timings: Timings = UNSET


class ChatCompletion(_Head, kw_only=True):
    """A whole answer of `/v1/chat/completions`."""

    choices: Sequence[ChatChoice]
    usage: Usage
    prompt_token_ids: TokenIds = UNSET
    timings: Timings = UNSET


class ResponseObject(Struct, frozen=True, kw_only=True):
    """The answer of `/v1/responses`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    model: str
    output: Sequence[dict[str, Any]]
    usage: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: Sequence[dict[str, Any]]
    top_p: float
    truncation: str = "disabled"
    background: bool = False
    service_tier: str = "default"


class ResponseEvent(Struct, frozen=True):
    """One event of `/v1/responses`: beside these, the fields of its type."""

    type: str
    sequence_number: int


class CompletionChunk(_Head, kw_only=True):
    """One event of `/v1/completions`."""

    choices: Sequence[CompletionChoice] = ()
    usage: Usage | Raw | UnsetType | None = UNSET
    error: ErrorDetail | UnsetType = UNSET
    timings: Timings = UNSET


class ChatCompletionChunk(_Head, kw_only=True):
    """One event of `/v1/chat/completions`."""

    choices: Sequence[ChatDelta] = ()
    prompt_token_ids: TokenIds = UNSET
    usage: Usage | Raw | UnsetType | None = UNSET
    error: ErrorDetail | UnsetType = UNSET
    timings: Timings = UNSET


class AnthropicErrorDetail(Struct, frozen=True):
    """What went wrong, in Anthropic's form."""

    type: str
    message: str


class AnthropicError(Struct, frozen=True, tag_field="type", tag="error"):
    """An answer of Anthropic's API that is an error, or the last event of a stream.

    Attributes:
        request_id: The id of the message that a stream began. Null in a whole answer.
    """

    error: AnthropicErrorDetail
    request_id: str | None = None


class AnthropicUsage(Struct, frozen=True):
    """Tokens of a message. Those of the prompt are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None


class AnthropicMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A whole answer of `/v1/messages`, or its beginning in a stream."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason = None
    stop_sequence: str | None = None
    usage: AnthropicUsage
    timings: Timings = UNSET


class AnthropicEvent(Struct, frozen=True, kw_only=True):
    """One event of `/v1/messages`. Its type is also the event's name. `error` is an `AnthropicError`."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: AnthropicMessage | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: dict[str, Any] | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    usage: AnthropicUsage | UnsetType = UNSET
    timings: Timings = UNSET


class TokenCount(Struct, frozen=True):
    """An answer of `/v1/messages/count_tokens`."""

    input_tokens: int
