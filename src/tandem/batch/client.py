"""Sends requests and yields their results as they end. Writes no file: `command.py` does.

```
 waiting for a place ─▶ sent ─▶ 2xx, 4xx ─────────────────────────────────────────────▶ result
      ▲                  │      408, 5xx, broken, timeout ─▶ pause ─▶ after `max_attempts`: result
      │                  │      429, 503 ─▶ half as many at once ─▶ after `patience_s`: result
      └──────────────────┴───── no connection ─▶ pause; costs no attempt
```

How many requests the server gets at once starts at `FIRST_LIMIT` and doubles with every round of answers. The
first rejection halves it, and so does every other; from then on it grows by one a round.
"""

import asyncio
import contextlib
import email.utils
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from dataclasses import replace
from types import TracebackType
from typing import Annotated, Any, Literal, Self

import aiohttp
import msgspec

from tandem.batch.lines import BatchError, BatchRequest, BatchResult
from tandem.bench.config import json_object
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import checked_url, reason_of
from tandem.wire.options import Flag

CONNECT_TIMEOUT_S = 10.0
FIRST_LIMIT = 16
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
# A longer Retry-After is a mistake of the server.
MAX_RETRY_AFTER_S = 300.0
# Of a body that is no JSON: enough to see what it is.
MAX_SHOWN_BYTES = 2000

Requests = Iterable[BatchRequest] | AsyncIterable[BatchRequest]
Kind = Literal["answered", "broke", "full", "away"]


class BatchStopped(Exception):
    """Nothing more can be sent; results so far are valid."""


class KeyRefused(BatchStopped):
    """The server requires another API key."""


class ServerAway(BatchStopped):
    """The server has not answered for too long."""


class _Stopping(Exception):
    """`stop` was called while a request waited."""


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are sent."""

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
    ] = 1024
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
            help="how long to retry a request after 429 and 503, and how long to wait while the server does not "
            "answer",
        ),
    ] = 900.0

    def __post_init__(self) -> None:
        if min(self.max_concurrency, self.max_attempts) < 1 or self.timeout_s <= 0:
            raise ConfigInvalid(
                "max_concurrency and max_attempts are at least 1, timeout_s above 0"
            )


class BatchClient:
    """An asynchronous context manager over a server; one `run` at a time.

    Args:
        url: A router, or any server with OpenAI's API.

    Attributes:
        in_flight: Requests at the server now.
        limit: Maximum number of requests there; grows in fractions.
        problem: Why the last request failed; empty after an answer.

    Raises:
        ConfigInvalid: The URL is malformed.
    """

    def __init__(self, url: str, settings: BatchSettings | None = None) -> None:
        self._url = checked_url("--url", url.rstrip("/").removesuffix("/v1"))
        self._settings = settings or BatchSettings()
        self.in_flight, self.limit, self.problem = 0, float(FIRST_LIMIT), ""
        self._num_failures = 0
        # Nothing is sent before `_retry_at`. `_answered_at` is None until the server was reached.
        self._retry_at = self._failed_at = -math.inf
        self._answered_at: float | None = None

    async def __aenter__(self) -> Self:
        key = self._settings.api_key
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connector=aiohttp.TCPConnector(limit=0),
        )
        # One request at a time waits for a place, the others in line behind it.
        self._line = asyncio.Lock()
        self._has_changed, self._is_stopping = asyncio.Event(), asyncio.Event()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    def stop(self) -> None:
        """Start nothing more: `run` ends when the requests at the server have ended."""
        self._is_stopping.set()
        self._has_changed.set()

    async def run(self, requests: Requests) -> AsyncGenerator[BatchResult, None]:
        """Send requests and yield their results as they end.

        Requests are taken when there is room for them, so there may be any number. To leave before the
        last result, close the iterator (`contextlib.aclosing`), which cancels the requests.

        Raises:
            ServerAway: The server cannot be reached, or has answered nothing for `patience_s`.
            KeyRefused: The server requires another API key.
        """
        results: asyncio.Queue[BatchResult | None] = asyncio.Queue()
        # Also bounds memory: requests that pause and results that nobody took yet count.
        places = asyncio.Semaphore(self._settings.max_concurrency)

        async def carry(request: BatchRequest) -> None:
            try:
                results.put_nowait(await self._carry(request))
            except _Stopping:
                places.release()

        async def send_all() -> None:
            async with asyncio.TaskGroup() as tasks, contextlib.aclosing(_each(requests)) as each:
                async for request in each:
                    await places.acquire()
                    if self._is_stopping.is_set():
                        return
                    tasks.create_task(carry(request))

        if self._answered_at is not None:
            self._answered_at = time.monotonic()
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

    async def _carry(self, request: BatchRequest) -> BatchResult:
        """Send a request until it has a result.

        Raises:
            _Stopping: `stop` was called before.
            BatchStopped: No request can have a result.
        """
        began_at, num_attempts, num_broken = time.monotonic(), 0, 0
        while True:
            await self._take_place()
            sent_at = time.monotonic()
            try:
                kind, result, retry_after = await self._send(request)
                self._count(kind, result, sent_at, retry_after)
            finally:
                self.in_flight -= 1
                self._has_changed.set()
            num_attempts += kind != "away"
            num_broken += kind == "broke"
            is_late = time.monotonic() - began_at > self._settings.patience_s
            # If nothing was answered since, the server rejects all requests, not this one.
            is_alone = is_late and (self._answered_at or 0.0) > began_at
            if (
                kind == "answered"
                or (kind == "broke" and num_broken >= self._settings.max_attempts)
                or (kind == "full" and is_alone)
            ):
                return replace(result, num_attempts=num_attempts)
            if kind == "broke":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_stopping.wait(), pause_s(num_broken))

    async def _take_place(self) -> None:
        """Wait until the server may get one more request."""
        async with self._line:
            while not self._is_stopping.is_set():
                wait_s = self._retry_at - time.monotonic()
                if self.in_flight < int(self.limit) and wait_s <= 0:
                    self.in_flight += 1
                    return
                self._has_changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_changed.wait(), wait_s if wait_s > 0 else None)
            raise _Stopping

    def _count(self, kind: Kind, result: BatchResult, sent_at: float, retry_after: str) -> None:
        """Let an attempt change the pace.

        Raises:
            KeyRefused: The server requires another key.
            ServerAway: It has not answered for too long.
        """
        now, was_reached = time.monotonic(), self._answered_at is not None
        if result.status_code == 401:
            raise KeyRefused(f"{self._url} requires an API key, or another one: give --api-key")
        if result.status_code and not was_reached:
            self._answered_at = now
        if kind == "answered":
            self.problem, self._num_failures, self._answered_at = "", 0, now
            self.limit += 1 if self._failed_at < 0 else 1 / self.limit
            self.limit = min(self.limit, self._settings.max_concurrency)
        elif kind in ("full", "away"):
            why = f"does not answer ({result.error.message})" if result.error else "has no room"
            self.problem = why
            self._slow_down(sent_at, retry_after_s(retry_after))
            if self._answered_at is None:
                raise ServerAway(f"{self._url} {why}: start a server, or give another --url")
            if now - self._answered_at > self._settings.patience_s:
                silent = f"has answered nothing for {now - self._answered_at:.0f} s"
                raise ServerAway(f"{self._url} {silent}: it {why}")

    def _slow_down(self, sent_at: float, after_s: float) -> None:
        """Halve the limit and pause; requests sent before the last failure belong to that one."""
        now = time.monotonic()
        if sent_at >= self._failed_at:
            self._failed_at = now
            self._num_failures += 1
            self.limit = max(min(self.limit, self.in_flight) / 2, 1.0)
            self._retry_at = now + pause_s(self._num_failures)
        self._retry_at = max(self._retry_at, now + min(after_s, MAX_RETRY_AFTER_S))

    async def _send(self, request: BatchRequest) -> tuple[Kind, BatchResult, str]:
        """Send a request once; return the outcome and the server's Retry-After."""
        timeout = aiohttp.ClientTimeout(self._settings.timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.post(
                self._url + request.url,
                data=request.payload(self._settings.extra_body),
                headers={"Content-Type": "application/json"},
                timeout=timeout,
            ) as response:
                result = _read(request, response, await response.read())
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            kind, reason = _explain(error)
            return kind, BatchResult(request, error=reason), ""
        if response.status in (429, 503):
            return "full", result, response.headers.get("Retry-After", "")
        is_broken = response.status == 408 or response.status >= 500
        return ("broke" if is_broken else "answered"), result, ""


def _explain(error: Exception) -> tuple[Kind, BatchError]:
    match error:
        case aiohttp.ConnectionTimeoutError():
            reason = f"no connection within {CONNECT_TIMEOUT_S:g} s"
            return "away", BatchError("no_connection", reason)
        case aiohttp.ClientSSLError():
            return "away", BatchError("no_connection", str(error))
        case aiohttp.ClientConnectorError():
            return "away", BatchError("no_connection", reason_of(error.os_error))
        case TimeoutError():
            return "broke", BatchError("timeout", "no complete answer in time")
        case msgspec.MsgspecError():
            return "broke", BatchError("bad_answer", f"status 2xx without a JSON object: {error}")
        case _:
            return "broke", BatchError("connection_broken", str(error) or "the connection broke")


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0


class _Answer(msgspec.Struct):
    id: str | None = None
    usage: _Usage | None = None


def _read(request: BatchRequest, response: aiohttp.ClientResponse, body: bytes) -> BatchResult:
    """Return a response as a result.

    Raises:
        msgspec.MsgspecError: The status is 2xx, and the body no JSON object.
    """
    answer = _Answer()
    try:
        answer = msgspec.json.decode(body, type=_Answer)
        # A body on one line stays as it is; in others, numbers keep their digits.
        content = msgspec.json.format(body, indent=-1) if b"\n" in body or b"\r" in body else body
    except msgspec.MsgspecError:
        if response.ok:
            raise
        shown = body[:MAX_SHOWN_BYTES].decode(errors="replace")
        content = msgspec.json.encode({"error": {"message": shown}})
    usage = answer.usage or _Usage()
    return BatchResult(
        request,
        response.status,
        response.headers.get("x-request-id") or answer.id or "",
        content,
        prompt_tokens=usage.prompt_tokens or 0,
        output_tokens=usage.completion_tokens or 0,
    )


def retry_after_s(value: str) -> float:
    """Read a Retry-After header, seconds or a date; 0 if it is neither."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def pause_s(num_failures: int) -> float:
    """Return how long to wait after failures in a row: doubling, and random in its upper half."""
    most_s: float = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_failures - 1, 16))
    return most_s * (0.5 + 0.5 * random.random())


async def _each(requests: Requests) -> AsyncGenerator[BatchRequest, None]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request


def run_batch(
    requests: Iterable[BatchRequest], url: str, settings: BatchSettings | None = None
) -> list[BatchResult]:
    """Send requests, wait for all of them, and return their results in the order of the requests.

    For code without an event loop. Requests and results have to fit into memory. Raises as `BatchClient`.
    """
    # A copy of each: a request that is given twice has two results.
    given = [replace(request) for request in requests]
    places = {id(request): place for place, request in enumerate(given)}

    async def run() -> list[BatchResult]:
        async with BatchClient(url, settings) as client:
            return [result async for result in client.run(given)]

    return sorted(asyncio.run(run()), key=lambda result: places[id(result.request)])
