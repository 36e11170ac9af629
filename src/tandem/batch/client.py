"""Sends requests and yields their results in order of completion. `command.py` writes the files.

| outcome | handling |
|---|---|
| 2xx, other 4xx | the result |
| 408, 5xx, a broken connection, a timeout | retry after a pause, at most `max_attempts` attempts |
| 429, 503, no connection | pause all requests; retry until the server has answered none for `patience_s` |
"""

import asyncio
import contextlib
import email.utils
import math
import random
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

import aiohttp
import msgspec

from tandem.batch.lines import BatchError, BatchRequest, BatchResult
from tandem.bench.config import json_object
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import checked_url, reason_of
from tandem.wire.options import Flag

CONNECT_TIMEOUT_S = 10.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
# A longer Retry-After is treated as a server error and cut to this.
MAX_RETRY_AFTER_S = 300.0
# Part of a body without JSON that is kept: enough to recognise it.
MAX_SHOWN_BYTES = 2000

Kind = Literal["answered", "broke", "full", "away"]
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError)


class BatchStopped(Exception):
    """No more requests can be sent; the results so far are valid."""


class KeyRefused(BatchStopped):
    """The server requires another API key."""


class ServerAway(BatchStopped):
    """The server has not answered for too long."""


class _Stopping(Exception):
    """`stop` was called while a request waited."""


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for sending requests."""

    api_key: Annotated[
        str,
        Flag(
            "--api-key",
            metavar="KEY",
            help="bearer token (default: TANDEM_API_KEY, then OPENAI_API_KEY, which `ps` does not show)",
        ),
    ] = ""
    extra_body: Annotated[
        dict[str, Any],
        Flag(
            "--extra-request-body",
            metavar="JSON",
            help="fields for requests that lack them, such as '{\"priority\": -1}'",
            parse=json_object,
        ),
    ] = {}
    max_concurrency: Annotated[
        int,
        Flag(
            "--max-concurrency",
            metavar="N",
            group="how many at once, and how often",
            ge=1,
            help="maximum number of requests at once",
        ),
    ] = 256
    max_attempts: Annotated[
        int,
        Flag(
            "--max-attempts",
            metavar="N",
            ge=1,
            help="how often to send a request that ends in 408, 5xx or a broken connection",
        ),
    ] = 5
    timeout_s: Annotated[
        float,
        Flag("--timeout-s", metavar="S", ge=0.001, help="time of one attempt, answer included"),
    ] = 600.0
    patience_s: Annotated[
        float,
        Flag(
            "--patience-s",
            metavar="S",
            ge=0,
            help="how long to retry after 429, 503 and without a connection while the server answers nothing",
        ),
    ] = 900.0

    def __post_init__(self) -> None:
        if min(self.max_concurrency, self.max_attempts) < 1 or self.timeout_s <= 0:
            raise ConfigInvalid(
                "max_concurrency and max_attempts are at least 1, timeout_s above 0"
            )


class BatchClient:
    """A client of one server, for one `run`.

    Args:
        url: A router, or any server with OpenAI's API.

    Attributes:
        num_at_server: The number of requests at the server now.
        problem: The reason of the last rejection; empty after an answer.

    Raises:
        ConfigInvalid: The URL is malformed.
    """

    def __init__(self, url: str, settings: BatchSettings | None = None) -> None:
        self._url = checked_url("--url", url.rstrip("/").removesuffix("/v1"))
        self._settings = settings or BatchSettings()
        self._stopping = asyncio.Event()
        # No request is sent before `_retry_at`. Rejections of requests sent before `_rejected_at` count as one round.
        self._retry_at = self._answered_at = self._rejected_at = -math.inf
        self._num_rounds = 0
        self._was_reached = False
        self.num_at_server, self.problem = 0, ""

    def stop(self) -> None:
        """Send no more requests; `run` ends when the requests at the server have ended."""
        self._stopping.set()

    async def run(self, requests: Iterable[BatchRequest]) -> AsyncGenerator[BatchResult, None]:
        """Send requests and yield their results in order of completion.

        `requests` is read only as slots become free, so it may be endless. To stop before the last
        result, close the iterator (`contextlib.aclosing`), which cancels the requests.

        Raises:
            ServerAway: The server was never reached, or has answered nothing for `patience_s`.
            KeyRefused: The server requires another API key.
        """
        results: asyncio.Queue[BatchResult | None] = asyncio.Queue()
        # A slot is held until the caller takes the result, so memory is bounded.
        places = asyncio.Semaphore(self._settings.max_concurrency)

        async def work(session: aiohttp.ClientSession) -> None:
            with contextlib.suppress(_Stopping):
                await places.acquire()
                for request in shared:
                    results.put_nowait(await self._carry(session, request))
                    await places.acquire()

        async def send_all() -> None:
            async with self._session() as session, asyncio.TaskGroup() as tasks:
                for _ in range(self._settings.max_concurrency):
                    tasks.create_task(work(session))

        shared = iter(requests)  # each worker takes the next one
        sending = asyncio.create_task(send_all())
        sending.add_done_callback(lambda _: results.put_nowait(None))
        try:
            while (result := await results.get()) is not None:
                yield result
                places.release()
            await sending
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def _session(self) -> aiohttp.ClientSession:
        headers = {"Content-Type": "application/json"}
        if key := self._settings.api_key:
            headers["Authorization"] = f"Bearer {key}"
        return aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0))

    async def _carry(self, session: aiohttp.ClientSession, request: BatchRequest) -> BatchResult:
        """Send a request until it has a result.

        Raises:
            _Stopping: `stop` was called while the request waited to be sent.
            BatchStopped: No request can succeed any more.
        """
        num_broken, rejected_at, retry_at = 0, math.inf, -math.inf
        while True:
            await self._wait_until(retry_at)
            sent_at = time.monotonic()
            self.num_at_server += 1
            try:
                kind, result, after_s = await self._send(session, request)
            finally:
                self.num_at_server -= 1
            now = time.monotonic()
            self._was_reached |= kind != "away"
            if result.status_code == 401:
                raise KeyRefused(f"{self._url} requires an API key, or another one: give --api-key")
            if kind == "answered":
                self.problem, self._answered_at, self._num_rounds = "", now, 0
                return result
            if kind == "broke":
                num_broken += 1
                if num_broken >= self._settings.max_attempts:
                    return result
                retry_at, rejected_at = now + pause_s(num_broken), math.inf
                continue
            rejected_at = min(rejected_at, now)
            if self._is_last_word(kind, result, rejected_at):
                return result
            if sent_at >= self._rejected_at:
                self._rejected_at, self._num_rounds = now, self._num_rounds + 1
            pause = min(after_s, MAX_RETRY_AFTER_S) or pause_s(self._num_rounds)
            self._retry_at = max(self._retry_at, now + pause)

    async def _wait_until(self, retry_at: float) -> None:
        """Wait until `retry_at` and `_retry_at`, which may grow during the wait."""
        while not self._stopping.is_set():
            wait_s = max(retry_at, self._retry_at) - time.monotonic()
            if wait_s <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)
        raise _Stopping

    def _is_last_word(self, kind: Kind, result: BatchResult, rejected_at: float) -> bool:
        """Return whether to give up on this request: the server answered others since, then none for `patience_s`.

        Args:
            rejected_at: The time of the request's first rejection.

        Raises:
            ServerAway: The server was never reached, or has answered no request for `patience_s`.
        """
        self.problem = (
            f"does not answer ({result.error.message})" if result.error else "has no room"
        )
        if not self._was_reached:
            raise ServerAway(f"{self._url} {self.problem}: start a server, or give another --url")
        silent_s = time.monotonic() - max(rejected_at, self._answered_at)
        if silent_s <= self._settings.patience_s:
            return False
        if kind == "full" and self._answered_at > rejected_at:
            return True
        raise ServerAway(
            f"{self._url} has answered nothing for {silent_s:.0f} s: it {self.problem}"
        )

    async def _send(
        self, session: aiohttp.ClientSession, request: BatchRequest
    ) -> tuple[Kind, BatchResult, float]:
        """Send a request once; return the outcome and the seconds of the server's Retry-After."""
        timeout = aiohttp.ClientTimeout(self._settings.timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        data = request.payload(self._settings.extra_body)
        try:
            async with session.post(
                self._url + request.url, data=data, timeout=timeout
            ) as response:
                result = _read(request, response, await response.read())
        except (aiohttp.ClientError, TimeoutError, *NOT_JSON) as error:
            kind, code, reason = _explain(error)
            return kind, BatchResult(request, error=BatchError(code, reason)), 0.0
        if response.status in (429, 503):
            return "full", result, retry_after_s(response.headers.get("Retry-After", ""))
        is_broken = response.status == 408 or response.status >= 500
        return ("broke" if is_broken else "answered"), result, 0.0


def _explain(error: Exception) -> tuple[Kind, str, str]:
    """Return the outcome, error code and reason of a request without a valid answer."""
    match error:
        case aiohttp.ConnectionTimeoutError():
            return "away", "no_connection", f"no connection within {CONNECT_TIMEOUT_S:g} s"
        case aiohttp.ClientSSLError():
            return "away", "no_connection", str(error)
        case aiohttp.ClientConnectorError():
            return "away", "no_connection", reason_of(error.os_error)
        case TimeoutError():
            return "broke", "timeout", "no complete answer in time"
        case msgspec.MsgspecError() | UnicodeDecodeError():
            return "broke", "bad_answer", f"status 2xx without a JSON object: {error}"
        case _:
            return "broke", "connection_broken", str(error) or "the connection broke"


class _Answer(msgspec.Struct):
    id: str | None = None


def _read(request: BatchRequest, response: aiohttp.ClientResponse, body: bytes) -> BatchResult:
    """Return a response as a result.

    Raises:
        MsgspecError, UnicodeDecodeError: The status is 2xx, but the body is not a JSON object.
    """
    answer = _Answer()
    try:
        answer = msgspec.json.decode(body, type=_Answer)
        # A body on one line stays unchanged; other bodies are joined into one line without parsing numbers.
        content = msgspec.json.format(body, indent=-1) if b"\n" in body or b"\r" in body else body
    except NOT_JSON:
        if response.ok:
            raise
        shown = body[:MAX_SHOWN_BYTES].decode(errors="replace")
        content = msgspec.json.encode({"error": {"message": shown}})
    request_id = response.headers.get("x-request-id") or answer.id or ""
    return BatchResult(request, response.status, request_id, content)


def retry_after_s(value: str) -> float:
    """Return the seconds of a Retry-After header, which holds seconds or a date; 0 if it is invalid."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def pause_s(num_failures: int) -> float:
    """Return the seconds to wait after consecutive failures: exponential backoff with up to 50 % jitter."""
    most_s: float = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_failures - 1, 16))
    return most_s * (0.5 + 0.5 * random.random())


def run_batch(
    requests: Iterable[BatchRequest], url: str, settings: BatchSettings | None = None
) -> list[BatchResult]:
    """Send requests, wait for all of them, and return their results in the order of the requests.

    It starts an event loop, and holds all requests and results in memory. It raises the same errors as `BatchClient`.
    """
    # Copies are distinct objects, so a request that occurs twice has two results.
    given = [replace(request) for request in requests]
    places = {id(request): place for place, request in enumerate(given)}

    async def run() -> list[BatchResult]:
        return [result async for result in BatchClient(url, settings).run(given)]

    return sorted(asyncio.run(run()), key=lambda result: places[id(result.request)])
