"""One request sent once: what came of it, and whether it may come out better another time."""

import email.utils
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from tandem.batch.values import BatchError, BatchRequest, BatchResult, Told, read_told
from tandem.wire.hosts import reason_of

CONNECT_TIMEOUT_S = 10.0
KEY_REFUSED = 401
# Too many requests; no node to serve it now: the server asks for time.
FULL = frozenset({429, 503})
REQUEST_TIMEOUT = 408
# Of a body that is no JSON: enough to see what it is about.
MAX_SHOWN_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an attempt.

    Attributes:
        kind: `answered`: it is the result; `broke`: it may succeed if sent again; `full`: the server had no
            room; `away`: nothing could be sent.
        retry_after_s: When the server wants to hear from us again; 0: it did not say.
    """

    kind: Literal["answered", "broke", "full", "away"]
    status_code: int = 0
    request_id: str = ""
    content: bytes = b"null"
    told: Told = field(default_factory=Told)
    error: BatchError | None = None
    retry_after_s: float = 0.0

    def result(self, request: BatchRequest, num_attempts: int) -> BatchResult:
        """Return it as the last word on a request."""
        return BatchResult(
            request=request,
            status_code=self.status_code,
            request_id=self.request_id,
            content=self.content,
            error=self.error,
            told=self.told,
            num_attempts=num_attempts,
        )


def body_of(request: BatchRequest, extra: Mapping[str, Any]) -> bytes:
    """Return what is posted, with the extra fields that the request does not have."""
    body = request.body
    if isinstance(body, bytes):
        if not extra:
            return body
        body = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**extra, **body})


async def send(
    session: aiohttp.ClientSession,
    url: str,
    request: BatchRequest,
    extra: Mapping[str, Any],
    timeout_s: float,
) -> Outcome:
    """Send a request to a server once."""
    try:
        async with session.post(
            url + request.url,
            data=body_of(request, extra),
            headers={"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
        ) as response:
            return judge(response.status, response.headers, await response.read())
    except aiohttp.ConnectionTimeoutError:
        return _failed("away", "no_connection", f"no connection within {CONNECT_TIMEOUT_S:g} s")
    except aiohttp.ClientConnectorError as error:
        reason = error if isinstance(error, aiohttp.ClientSSLError) else reason_of(error.os_error)
        return _failed("away", "no_connection", str(reason))
    except TimeoutError:
        return _failed("broke", "timeout", f"no whole answer within {timeout_s:g} s")
    except aiohttp.ClientError as error:
        return _failed("broke", "connection_broken", str(error) or "the connection broke")


def _failed(kind: Literal["broke", "away"], code: str, message: str) -> Outcome:
    return Outcome(kind, error=BatchError(code, message))


def judge(status: int, headers: Mapping[str, str], body: bytes) -> Outcome:
    """Return what an answer over HTTP means."""
    content, told, is_json = _read(body)
    kind: Literal["answered", "broke", "full"] = "answered"
    if status in FULL:
        kind = "full"
    elif status == REQUEST_TIMEOUT or status >= 500:
        kind = "broke"
    elif 200 <= status < 300 and not is_json:
        return _failed("broke", "bad_answer", f"status {status}, and a body that is no JSON object")
    return Outcome(
        kind,
        status_code=status,
        request_id=headers.get("x-request-id") or told.id or "",
        content=content,
        told=told,
        retry_after_s=retry_after_s(headers.get("Retry-After", "")),
    )


def _read(body: bytes) -> tuple[bytes, Told, bool]:
    """Return a body as JSON on one line, what it tells, and whether it was JSON."""
    try:
        told = read_told(body)
        # Numbers stay as they are written; what has no line ends is passed on as it is.
        is_long = b"\n" in body or b"\r" in body
        return (msgspec.json.format(body, indent=-1) if is_long else body), told, True
    except (msgspec.MsgspecError, UnicodeDecodeError):
        shown = body[:MAX_SHOWN_BYTES].decode(errors="replace")
        return msgspec.json.encode({"error": {"message": shown}}), Told(), False


def retry_after_s(value: str) -> float:
    """Return what a Retry-After header asks for, in seconds or as a date; 0: nothing that can be read."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return 0.0
