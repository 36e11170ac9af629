"""The answers of the routes, as msgspec structs. The OpenAPI document is generated from them.

A field that is `UNSET` is omitted from the JSON.
"""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from tandem.frontend.timings import RequestReport

# [log-probability, token id, text or null], in SGLang's format.
Triple = list[float | int | str | None]
FinishReason = Literal["stop", "length", "tool_calls", "abort"] | None
TimingsField = RequestReport | list[RequestReport] | UnsetType
# Present if the client requested token ids, as in vLLM.
OptionalTokenIds = Sequence[int] | UnsetType


class ErrorDetail(Struct, frozen=True):
    """An error in OpenAI's format."""

    message: str
    type: str
    param: str | None
    code: str


class Error(Struct, frozen=True):
    """The body of an error response."""

    error: ErrorDetail


class MetaInfo(Struct):
    """SGLang's `meta_info`.

    Attributes:
        is_resampled: True if a node was lost and another one continued with other random draws; not SGLang's.
    """

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
    is_resampled: bool | UnsetType = UNSET


class Generated(Struct):
    """One generation in SGLang's format: complete, or as an event with all text so far or the new text only.

    Attributes:
        index: Index of the generation in a stream of several.
    """

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    timings: TimingsField = UNSET
    index: int | UnsetType = UNSET


class Usage(Struct, frozen=True):
    """Token counts of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Tokenized(Struct, frozen=True):
    """The token ids of a text, or a list of ids for each text. `token_strs` are the vocabulary's strings."""

    tokens: Sequence[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: Sequence[str | list[str]] | None


class Detokenized(Struct, frozen=True):
    """The text of token ids: vLLM's `prompt` with special tokens, SGLang's `text` without them."""

    prompt: str | list[str]
    text: str | list[str]


# What ended a choice: `matched_stop` is SGLang's field. `stop_reason` is vLLM's, which omits the model's own
# end-of-sequence token. Both are present only in the last chunk.
Matched = int | str | UnsetType | None


class CompletionChoice(Struct, frozen=True):
    """A choice of `/v1/completions`, complete or as a delta."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    token_ids: OptionalTokenIds = UNSET
    prompt_token_ids: OptionalTokenIds = UNSET
    matched_stop: Matched = UNSET
    stop_reason: Matched = UNSET


class ChatChoice(Struct, frozen=True):
    """A choice of `/v1/chat/completions`."""

    index: int
    message: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    token_ids: OptionalTokenIds = UNSET
    matched_stop: Matched = UNSET
    stop_reason: Matched = UNSET


class ChatDelta(Struct, frozen=True):
    """A delta of a choice of `/v1/chat/completions`."""

    index: int
    delta: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    token_ids: OptionalTokenIds = UNSET
    matched_stop: Matched = UNSET
    stop_reason: Matched = UNSET


class InferenceChoice(Struct, frozen=True):
    """A choice of `/inference/v1/generate`, complete or as a delta.

    Attributes:
        stop_reason: The request's stop string or stop token that ended the choice.
    """

    index: int
    token_ids: list[int]
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    text: str | UnsetType = UNSET


class Inference(Struct, kw_only=True):
    """A complete answer of `/inference/v1/generate`."""

    request_id: str
    created: int
    model: str
    output_mode: str
    choices: Sequence[InferenceChoice]
    usage: Usage
    prompt_token_ids: OptionalTokenIds = UNSET
    timings: TimingsField = UNSET


class InferenceChunk(Struct, kw_only=True):
    """One event of `/inference/v1/generate`."""

    request_id: str
    output_mode: str
    choices: Sequence[InferenceChoice] = ()
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: OptionalTokenIds = UNSET
    error: ErrorDetail | UnsetType = UNSET
    timings: TimingsField = UNSET


class _Head(Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str


class Completion(_Head, kw_only=True):
    """A complete answer of `/v1/completions`."""

    choices: Sequence[CompletionChoice]
    usage: Usage
    timings: TimingsField = UNSET


class ChatCompletion(_Head, kw_only=True):
    """A complete answer of `/v1/chat/completions`."""

    choices: Sequence[ChatChoice]
    usage: Usage
    prompt_token_ids: OptionalTokenIds = UNSET
    timings: TimingsField = UNSET


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
    previous_response_id: str | None = None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, str | None]
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: Sequence[dict[str, Any]]
    top_p: float
    truncation: str = "disabled"
    background: bool = False
    service_tier: str = "default"


class ResponseEvent(Struct, frozen=True):
    """One event of `/v1/responses`: these fields, and those of its type."""

    type: str
    sequence_number: int


class CompletionChunk(_Head, kw_only=True):
    """One event of `/v1/completions`."""

    choices: Sequence[CompletionChoice] = ()
    usage: Usage | Raw | UnsetType | None = UNSET
    error: ErrorDetail | UnsetType = UNSET
    timings: TimingsField = UNSET


class ChatCompletionChunk(_Head, kw_only=True):
    """One event of `/v1/chat/completions`."""

    choices: Sequence[ChatDelta] = ()
    prompt_token_ids: OptionalTokenIds = UNSET
    usage: Usage | Raw | UnsetType | None = UNSET
    error: ErrorDetail | UnsetType = UNSET
    timings: TimingsField = UNSET


class AnthropicErrorDetail(Struct, frozen=True):
    """An error in Anthropic's format."""

    type: str
    message: str


class AnthropicError(Struct, frozen=True, tag_field="type", tag="error"):
    """The body of an error response of Anthropic's API, or the last event of a failed stream.

    Attributes:
        request_id: The id of the streamed message. Null outside streams.
    """

    error: AnthropicErrorDetail
    request_id: str | None = None


class AnthropicUsage(Struct, frozen=True):
    """Token counts of a message. The prompt has `input_tokens` plus `cache_read_input_tokens` tokens."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None


class AnthropicMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A complete answer of `/v1/messages`, or the first event of a stream."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason = None
    stop_sequence: str | None = None
    usage: AnthropicUsage
    timings: TimingsField = UNSET


class AnthropicEvent(Struct, frozen=True, kw_only=True):
    """One event of `/v1/messages`. Its type is also the SSE event name. An `error` event is an `AnthropicError`."""

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
    timings: TimingsField = UNSET


class TokenCount(Struct, frozen=True):
    """An answer of `/v1/messages/count_tokens`."""

    input_tokens: int
