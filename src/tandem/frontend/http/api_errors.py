"""Errors as the clients of each API know them: by status, type, code and, if a prompt is too long, by its words.

Agents shorten the conversation when they recognise that error, and repeat the request otherwise.
"""

from collections.abc import Mapping
from typing import NamedTuple

from tandem.frontend.answers import AnthropicError, AnthropicErrorDetail, Error, ErrorDetail
from tandem.frontend.chat.generation import PromptTooLong
from tandem.wire.errors import ErrorInfo, OutOfPages, Overloaded, Unauthorized

ANTHROPIC_ROUTES = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
# The field with the prompt, on the routes of OpenAI's API.
_PROMPT_FIELDS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
}
# A message may quote client input of any length.
_MAX_MESSAGE_CHARS = 2000


class ErrorTypes(NamedTuple):
    """The types of errors with one status."""

    openai: str
    anthropic: str


_CLIENT, _SERVER = "invalid_request_error", "server_error"
ERROR_TYPES: Mapping[int, ErrorTypes] = {
    400: ErrorTypes(_CLIENT, "invalid_request_error"),
    401: ErrorTypes(_CLIENT, "authentication_error"),
    403: ErrorTypes(_CLIENT, "permission_error"),
    404: ErrorTypes(_CLIENT, "not_found_error"),
    405: ErrorTypes(_CLIENT, "invalid_request_error"),
    408: ErrorTypes(_CLIENT, "timeout_error"),
    409: ErrorTypes(_CLIENT, "conflict_error"),
    413: ErrorTypes(_CLIENT, "request_too_large"),
    415: ErrorTypes(_CLIENT, "invalid_request_error"),
    429: ErrorTypes("rate_limit_error", "rate_limit_error"),
    499: ErrorTypes(_SERVER, "api_error"),
    500: ErrorTypes(_SERVER, "api_error"),
    503: ErrorTypes(_SERVER, "overloaded_error"),
    504: ErrorTypes(_SERVER, "timeout_error"),
    529: ErrorTypes(_SERVER, "overloaded_error"),
}
# Codes for which OpenAI has its own name. The other codes are Tandem's.
OPENAI_CODES = {
    Unauthorized.code: "invalid_api_key",
    OutOfPages.code: PromptTooLong.code,
}
# Statuses that differ on Anthropic's routes: there 429 means that a key exceeded its limit.
ANTHROPIC_STATUSES = {Overloaded.code: 529}


def types_of(status: int) -> ErrorTypes:
    """Return the types of errors with this status."""
    return ERROR_TYPES.get(status) or ERROR_TYPES[400 if status < 500 else 500]


def error_answer(path: str, error: ErrorInfo) -> tuple[int, Error | AnthropicError]:
    """Return the status and the body of an error response on this route."""
    if path in ANTHROPIC_ROUTES:
        return ANTHROPIC_STATUSES.get(error.code, error.status), anthropic_error(error)
    is_too_long = error.code == PromptTooLong.code
    return error.status, error_body(error, _PROMPT_FIELDS.get(path) if is_too_long else None)


def error_body(error: ErrorInfo, param: str | None = None) -> Error:
    """Return the body of an error response in OpenAI's format.

    Args:
        param: The field that is wrong, if OpenAI's clients expect it.
    """
    code = OPENAI_CODES.get(error.code, error.code)
    message = error.message[:_MAX_MESSAGE_CHARS]
    return Error(ErrorDetail(message, type=types_of(error.status).openai, param=param, code=code))


def anthropic_error(error: ErrorInfo, request_id: str | None = None) -> AnthropicError:
    """Return the body of an error response in Anthropic's format."""
    status = ANTHROPIC_STATUSES.get(error.code, error.status)
    message = error.message[:_MAX_MESSAGE_CHARS]
    detail = AnthropicErrorDetail(type=types_of(status).anthropic, message=message)
    return AnthropicError(error=detail, request_id=request_id)


def response_error(error: ErrorInfo) -> dict[str, str]:
    """Return the error of a failed response of `/v1/responses`, which has few codes."""
    code = "rate_limit_exceeded" if error.status == 429 else _SERVER
    if error.status == 400:
        code = "invalid_prompt"
    return {"code": code, "message": error.message[:_MAX_MESSAGE_CHARS]}


def words_of(path: str, error: PromptTooLong) -> str:
    """Return the message of a prompt that is too long, in the words of the route's API."""
    limit, count = error.max_prompt_tokens, error.num_tokens
    if not count:
        return error.message
    bound = " (the count is a lower bound)" if error.is_lower_bound else ""
    if path in ANTHROPIC_ROUTES:
        return f"prompt is too long: {count} tokens > {limit} maximum{bound}"
    if path == "/generate":
        return (
            f"The input ({count} tokens) is longer than the model's context length ({limit + 1} tokens), "
            f"which includes the answer{bound}."
        )
    field = _PROMPT_FIELDS.get(path, "prompt")
    return (
        f"This model's maximum context length is {limit + 1} tokens. However, your {field} resulted in {count} tokens, "
        f"and the answer needs at least one{bound}. Please reduce the length of the {field}."
    )
