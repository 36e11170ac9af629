"""Errors in the shape of Anthropic's API, and the routes that answer with them."""

from tandem.frontend.answers import AnthropicError, AnthropicErrorDetail
from tandem.wire.errors import ErrorInfo, Overloaded

ANTHROPIC_ROUTES = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
# A message may quote what a client sent.
MAX_MESSAGE_CHARS = 2000

# Others are `invalid_request_error` or `api_error`. Anthropic's own status of `overloaded_error`, 529,
# is unknown to proxies: ours stays.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: ErrorInfo, request_id: str | None = None) -> AnthropicError:
    """Return an error as clients of Anthropic's API see it."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _TYPES.get(error.status, fallback)
    if error.code == Overloaded.code:  # no key reached its limit: the cluster has no room
        kind = "overloaded_error"
    detail = AnthropicErrorDetail(type=kind, message=error.message[:MAX_MESSAGE_CHARS])
    return AnthropicError(error=detail, request_id=request_id)
