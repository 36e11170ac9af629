"""Sends the requests of a batch and passes on their results. `command.py` reads and writes the files.

| outcome | handling |
|---|---|
| 2xx, other 4xx | the result |
| 408, 5xx, a broken connection, a timeout | sent again after a pause; the result after `MAX_ATTEMPTS` attempts |
| 429, 503, no connection | sent again after `Retry-After` or a pause, until the server has answered no request for `PATIENCE_S` |
"""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Literal

import aiohttp
import msgspec

from tandem.tools.query import KeyRefused, QueryFailed, error_message
from tandem.wire.hosts import reason_of

CONNECT_TIMEOUT_S = 10.0
MAX_ATTEMPTS = 5
PATIENCE_S = 900.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
# A longer Retry-After is assumed to be a mistake of the server, and is cut to this.
MAX_RETRY_AFTER_S = 300.0
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError)


class _Body(msgspec.Struct):
    stream: bool | None = None


class BatchRequest(msgspec.Struct, frozen=True):
    """A line of the input, in OpenAI's batch format. Tandem answers embeddings with 404; other servers may have them."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    body: msgspec.Raw

    def __post_init__(self) -> None:
        if msgspec.json.decode(self.body, type=_Body).stream:
            raise ValueError("stream is true: leave it out, because an answer is one line")


class BatchResponse(msgspec.Struct, frozen=True):
    """An HTTP response of any status. The body is JSON on one line."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, frozen=True):
    """The reason for a missing HTTP response."""

    code: str
    message: str


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the output: a response, or an error."""

    id: str
    custom_id: str
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def failure(self) -> str:
        """The kind of failure, such as `HTTP 400` or `timeout`; empty for a success."""
        if self.response is None:
            return self.error.code if self.error else "no response"
        status = self.response.status_code
        return "" if 200 <= status < 300 else f"HTTP {status}"


Outcome = BatchResponse | BatchError
Handling = Literal["result", "broken", "rejected"]


class BatchClient:
    """A client of one server.

    Args:
        url: A router, or any server with OpenAI's API.
        max_concurrency: The maximum number of requests at the server.
        timeout_s: The time limit of one attempt, response included.
    """

    def __init__(
        self, url: str, *, api_key: str = "", max_concurrency: int = 256, timeout_s: float = 600.0
    ) -> None:
        self._url = url
        self._slots = asyncio.Semaphore(max_concurrency)
        self._timeout = aiohttp.ClientTimeout(timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._answered_s, self._was_reached = -math.inf, False

    async def run(
        self, requests: Iterable[BatchRequest], on_outcome: Callable[[BatchRequest, Outcome], None]
    ) -> None:
        """Send requests, and call `on_outcome` with each outcome in order of completion.

        Raises:
            QueryFailed: The server was never reached, or has answered nothing for `PATIENCE_S`.
            KeyRefused: The server requires a different API key.
            OSError: `on_outcome` raised it.
        """

        async def process(request: BatchRequest) -> None:
            on_outcome(request, await self._outcome_of(session, request))
            self._slots.release()

        connector = aiohttp.TCPConnector(limit=0)
        try:
            async with (
                aiohttp.ClientSession(
                    headers=self._headers, connector=connector, timeout=self._timeout
                ) as session,
                asyncio.TaskGroup() as tasks,
            ):
                for request in requests:
                    await self._slots.acquire()
                    tasks.create_task(process(request))
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _outcome_of(self, session: aiohttp.ClientSession, request: BatchRequest) -> Outcome:
        """Send a request until its outcome is final, and return it.

        Raises:
            QueryFailed: No request can succeed any more.
        """
        num_broken = num_rejected = 0
        rejected_s = math.inf
        while True:
            handling, outcome, after_s = await self._send(session, request)
            now_s = time.monotonic()
            self._was_reached |= handling != "rejected" or isinstance(outcome, BatchResponse)
            if handling == "result":
                self._answered_s = now_s
                return outcome
            if handling == "broken":
                num_broken, num_rejected, rejected_s = num_broken + 1, 0, math.inf
                if num_broken == MAX_ATTEMPTS:
                    return outcome
            else:
                num_rejected, rejected_s = num_rejected + 1, min(rejected_s, now_s)
                self._check_patience(outcome, now_s - max(rejected_s, self._answered_s))
            await asyncio.sleep(after_s or pause_s(num_rejected or num_broken))

    def _check_patience(self, rejection: Outcome, silent_s: float) -> None:
        """Raise `QueryFailed` if the server was never reached, or has answered no request for too long."""
        problem = "has no room"
        if isinstance(rejection, BatchError):
            problem = f"does not answer ({rejection.message})"
        if not self._was_reached:
            raise QueryFailed(f"{self._url} {problem}: start a server, or set --url")
        if silent_s > PATIENCE_S:
            raise QueryFailed(
                f"{self._url} has answered nothing for {silent_s:.0f} s: it {problem}"
            )

    async def _send(
        self, session: aiohttp.ClientSession, request: BatchRequest
    ) -> tuple[Handling, Outcome, float]:
        """Send a request once; return what to do, the outcome, and the seconds of the server's Retry-After.

        Raises:
            KeyRefused: The server requires a different API key.
        """
        try:
            async with session.post(self._url + request.url, data=bytes(request.body)) as response:
                body = await response.read()
                if response.status == 401:
                    raise KeyRefused(self._url, error_message(body))
                outcome = _read(response, body)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return "rejected", BatchError("no_connection", _reason(error)), 0.0
        except TimeoutError:
            return "broken", BatchError("timeout", "no complete response in time"), 0.0
        except NOT_JSON as error:
            reason = f"status 2xx without a JSON object: {error}"
            return "broken", BatchError("bad_answer", reason), 0.0
        except aiohttp.ClientError as error:
            reason = str(error) or "the connection broke"
            return "broken", BatchError("connection_broken", reason), 0.0
        if response.status in (429, 503):
            return "rejected", outcome, retry_after_s(response.headers.get("Retry-After", ""))
        is_broken = response.status == 408 or response.status >= 500
        return ("broken" if is_broken else "result"), outcome, 0.0


def _reason(error: aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection within {CONNECT_TIMEOUT_S:g} s"
    return str(error) if isinstance(error, aiohttp.ClientSSLError) else reason_of(error.os_error)


class _Answer(msgspec.Struct):
    id: str | None = None


def _read(response: aiohttp.ClientResponse, body: bytes) -> BatchResponse:
    """Return a response with its body on one line.

    Raises:
        MsgspecError, UnicodeDecodeError: The status is 2xx, but the body is not a JSON object.
    """
    answer = _Answer()
    try:
        answer = msgspec.json.decode(body, type=_Answer)
        content = msgspec.json.format(body, indent=-1)
    except NOT_JSON:
        if response.ok:
            raise
        content = msgspec.json.encode({"error": {"message": error_message(body)}})
    request_id = response.headers.get("x-request-id") or answer.id or ""
    return BatchResponse(response.status, request_id, msgspec.Raw(content))


def retry_after_s(value: str) -> float:
    """Return the seconds of a Retry-After header, at most `MAX_RETRY_AFTER_S`; 0 if it is not a number."""
    with contextlib.suppress(ValueError):
        return min(max(0.0, float(value)), MAX_RETRY_AFTER_S)
    return 0.0


def pause_s(num_failures: int) -> float:
    """Return the seconds to wait after consecutive failures: exponential backoff with up to 50 % jitter."""
    longest_s: float = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_failures - 1, 16))
    return longest_s * (0.5 + 0.5 * random.random())
