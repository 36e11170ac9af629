"""A request, what came of it, and the lines of OpenAI's batch format that both are written as."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

CHAT = "/v1/chat/completions"
# Our servers have no embeddings and answer 404; others' do.
URLS = (CHAT, "/v1/completions", "/v1/embeddings")


class LineInvalid(Exception):
    """A line is no request; the sentence says what it lacks."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request.

    Attributes:
        custom_id: The caller's name for it, given back with the result.
        body: As the server takes it: an object, or the JSON text of one, which is sent as it is.
        url: The route it is posted to.
        number: The caller's own, given back with the result and used for nothing else.
    """

    custom_id: str
    body: Mapping[str, Any] | bytes
    url: str = CHAT
    number: int = 0


class BatchError(msgspec.Struct, frozen=True):
    """Why there is no answer over HTTP."""

    code: str
    message: str


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0


class Told(msgspec.Struct, frozen=True):
    """What is read of every answer.

    Attributes:
        id: By which the server knows the request, where it said so.
    """

    id: str | None = None
    usage: _Usage | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 where it does not say."""
        return (self.usage and self.usage.prompt_tokens) or 0

    @property
    def output_tokens(self) -> int:
        """Tokens generated; 0 where it does not say."""
        return (self.usage and self.usage.completion_tokens) or 0


_told = msgspec.json.Decoder(Told)


def read_told(body: bytes) -> Told:
    """Return what an answer says of itself.

    Raises:
        msgspec.MsgspecError: It is no JSON object.
    """
    return _told.decode(body)


@dataclass(frozen=True)
class BatchResult:
    """What came of a request: an answer over HTTP, good or bad, or an error.

    Attributes:
        request: The one that it is of.
        status_code: Of the answer; 0: there was none, and `error` says why.
        request_id: By which the server knows it.
        content: The answer's body: JSON on one line.
        num_attempts: How often it was sent.
    """

    request: BatchRequest
    status_code: int = 0
    request_id: str = ""
    content: bytes = b"null"
    error: BatchError | None = None
    told: Told = field(default_factory=Told)
    num_attempts: int = 0

    @property
    def custom_id(self) -> str:
        """The caller's name for the request."""
        return self.request.custom_id

    @property
    def is_ok(self) -> bool:
        """Whether it was answered as asked."""
        return 200 <= self.status_code < 300

    @property
    def failure(self) -> str:
        """Under which it is counted; empty when it is well."""
        if self.is_ok:
            return ""
        return self.error.code if self.error else f"HTTP {self.status_code}"

    @cached_property
    def body(self) -> Any:
        """The answer's body; None where there was none."""
        return msgspec.json.decode(self.content)

    @property
    def text(self) -> str:
        """What the first choice says; empty where there is none."""
        choices = (self.body or {}).get("choices") or [{}]
        said = choices[0].get("message") or {}
        return str(choices[0].get("text") or said.get("content") or "")

    def line(self, run: str) -> bytes:
        """Return it as a line of an output file.

        Args:
            run: Makes the line's id unique among runs.
        """
        response = None
        if self.status_code:
            response = _Response(self.status_code, self.request_id, msgspec.Raw(self.content))
        return _encoder.encode(
            _Out(
                id=f"batch_req_{run}{self.request.number:08x}",
                custom_id=self.custom_id,
                response=response,
                error=self.error,
            )
        )


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Out(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: BatchError | None


class _In(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: bool | None = None


_encoder = msgspec.json.Encoder()
_in = msgspec.json.Decoder(_In)
_body = msgspec.json.Decoder(_Body)


def read_request(line: bytes, number: int = 0) -> BatchRequest:
    """Read a line of an input file.

    Raises:
        LineInvalid: It is no request.
    """
    try:
        told = _in.decode(line)
        body = _body.decode(told.body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LineInvalid(str(error)) from error
    if not told.custom_id:
        raise LineInvalid("custom_id is empty: give each request a name of its own")
    if told.method != "POST":
        raise LineInvalid(f"method is {told.method!r}: give POST")
    if told.url not in URLS:
        raise LineInvalid(f"url is {told.url!r}: give {', '.join(URLS[:-1])} or {URLS[-1]}")
    if body.stream:
        raise LineInvalid("stream is true: leave it out, an answer is one line")
    return BatchRequest(told.custom_id, bytes(told.body), told.url, number)


class _OutBody(msgspec.Struct):
    usage: _Usage | None = None


class _OutResponse(msgspec.Struct):
    status_code: int
    body: _OutBody | None = None


class _OutTold(msgspec.Struct):
    response: _OutResponse | None = None
    error: BatchError | None = None


_out = msgspec.json.Decoder(_OutTold)


class Totals:
    """What the lines of an output come to.

    Attributes:
        failures: By what is said of them, how many.
    """

    def __init__(self) -> None:
        self.num_ok = self.prompt_tokens = self.output_tokens = 0
        self.failures: Counter[str] = Counter()

    @property
    def num_failed(self) -> int:
        """All that were not answered as asked."""
        return self.failures.total()

    def take(self, line: bytes) -> bool:
        """Count a line; return whether it was answered as asked."""
        told = _out.decode(line)
        response = told.response or _OutResponse(0)
        if not 200 <= response.status_code < 300:
            self.failures[told.error.code if told.error else f"HTTP {response.status_code}"] += 1
            return False
        usage = (response.body and response.body.usage) or _Usage()
        self.num_ok += 1
        self.prompt_tokens += usage.prompt_tokens or 0
        self.output_tokens += usage.completion_tokens or 0
        return True
