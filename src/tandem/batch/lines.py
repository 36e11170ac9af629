"""Requests and results of a batch, and their lines in OpenAI's batch format."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

CHAT = "/v1/chat/completions"
# Tandem has no embeddings and answers 404; other servers may have them.
URLS = (CHAT, "/v1/completions", "/v1/embeddings")


class LineInvalid(Exception):
    """A line of the input is no request, or a line of the output no result."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request.

    Attributes:
        custom_id: The caller's name for the request, copied to the result.
        body: A JSON object, as a mapping or as JSON text.
        url: The route to post to.
    """

    custom_id: str
    body: Mapping[str, Any] | bytes
    url: str = CHAT

    def payload(self, extra: Mapping[str, Any]) -> bytes:
        """Return the bytes to post: the body, plus the `extra` fields that the body lacks."""
        body = self.body
        if isinstance(body, bytes):
            if not extra:
                return body
            body = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return msgspec.json.encode({**extra, **body})


class BatchError(msgspec.Struct, frozen=True):
    """The reason for a missing HTTP response."""

    code: str
    message: str


@dataclass(frozen=True)
class BatchResult:
    """The outcome of a request: an HTTP response of any status, or an error.

    Attributes:
        status_code: The response's status; 0 without a response, in which case `error` has the reason.
        request_id: The server's id of the request.
        content: The response body: JSON on one line.
    """

    request: BatchRequest
    status_code: int = 0
    request_id: str = ""
    content: bytes = b"null"
    error: BatchError | None = None

    @property
    def custom_id(self) -> str:
        """The caller's name for the request."""
        return self.request.custom_id

    @property
    def is_ok(self) -> bool:
        """Whether the status is 2xx."""
        return not self.failure

    @property
    def failure(self) -> str:
        """The kind of failure, such as `HTTP 400` or `timeout`; empty for a success."""
        return failure_of(self.status_code, self.error)

    @cached_property
    def body(self) -> Any:
        """The decoded response body; None without a response."""
        return msgspec.json.decode(self.content)

    @property
    def text(self) -> str:
        """The text of the first choice; empty if there is none."""
        [choice, *_] = (self.body or {}).get("choices") or [{}]
        return str(choice.get("text") or (choice.get("message") or {}).get("content") or "")

    def line(self) -> bytes:
        """Return the result as a line of an output file, newline included."""
        response = {
            "status_code": self.status_code,
            "request_id": self.request_id,
            "body": msgspec.Raw(self.content),
        }
        fields = {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": self.custom_id,
            "response": response if self.status_code else None,
            "error": self.error,
        }
        return msgspec.json.encode(fields) + b"\n"


def failure_of(status_code: int, error: BatchError | None) -> str:
    """Return the kind of failure that a result counts as; empty for a success."""
    if 200 <= status_code < 300:
        return ""
    return error.code if error else f"HTTP {status_code}"


class _Input(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: bool | None = None


_input, _body = msgspec.json.Decoder(_Input), msgspec.json.Decoder(_Body)


def read_request(line: bytes) -> BatchRequest:
    """Parse a line of an input file.

    Raises:
        LineInvalid: The line is no valid request.
    """
    try:
        found = _input.decode(line)
        body = _body.decode(found.body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LineInvalid(str(error)) from error
    if not found.custom_id:
        raise LineInvalid("custom_id is empty: give each request a name of its own")
    if found.method != "POST":
        raise LineInvalid(f"method is {found.method!r}: give POST")
    if found.url not in URLS:
        raise LineInvalid(f"url is {found.url!r}: give {', '.join(URLS[:-1])} or {URLS[-1]}")
    if body.stream:
        raise LineInvalid("stream is true: leave it out, an answer is one line")
    return BatchRequest(found.custom_id, bytes(found.body), found.url)
