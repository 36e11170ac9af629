"""Sends requests and yields their results as they end. Writes no file: `job.py` does.

```
 waiting for a place ─▶ sent ─▶ 2xx, 4xx ─────────────────────────────────────────────▶ result
      ▲                  │      408, 5xx, broken, timeout ─▶ pause ─▶ after `max_attempts`: result
      │                  │      429, 503 ─▶ half as many at this server ─▶ after `patience_s`: result
      └──────────────────┴───── no connection: another server, or this one later; costs no attempt
```

How many requests one server gets at once starts at `FIRST_LIMIT` and doubles with every round of answers. The
first refusal halves it, and so does every other; from then on it grows by one a round.
"""

import asyncio
import contextlib
import email.utils
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import msgspec

from tandem.batch.lines import BatchError, BatchRequest, BatchResult
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import checked_url, reason_of

CONNECT_TIMEOUT_S = 10.0
FIRST_LIMIT = 16
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
# A longer Retry-After is a mistake of the server.
MAX_RETRY_AFTER_S = 300.0
# In a row: one 5xx is the request's fault, three are the server's. A server that fails at once is
# always the least busy, and would get every request.
NUM_BROKEN = 3
# Of a body that is no JSON: enough to see what it is.
MAX_SHOWN_BYTES = 2000

Requests = Iterable[BatchRequest] | AsyncIterable[BatchRequest]
Kind = Literal["answered", "broke", "full", "away"]


class BatchStopped(Exception):
    """Nothing more can be sent; results so far are valid."""


class KeyRefused(BatchStopped):
    """A server requires another API key."""


class ServersAway(BatchStopped):
    """No server has answered for too long."""


class _Stopping(Exception):
    """`stop` was called while a request waited."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How requests are sent.

    Attributes:
        api_key: Bearer token; empty for none.
        max_concurrency: Maximum number of requests at all servers together.
        min_concurrency: For each server: refusals do not lower its limit below this.
        max_attempts: How often to send a request that ends in 408, 5xx or a broken connection.
        timeout_s: Of one attempt, answer included.
        patience_s: How long to retry a request that is refused (429, 503), and how long to wait while
            no server answers.
        extra_body: Fields for requests that lack them.
    """

    api_key: str = ""
    max_concurrency: int = 1024
    min_concurrency: int = 1
    max_attempts: int = 5
    timeout_s: float = 600.0
    patience_s: float = 900.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_concurrency", "min_concurrency", "max_attempts"):
            if getattr(self, name) < 1:
                raise ConfigInvalid(f"{name} is {getattr(self, name)}: give at least 1")
        for name in ("timeout_s", "patience_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigInvalid(
                    f"{name} is {getattr(self, name)}: give more than 0, and no infinity"
                )


class Server:
    """One server: how many requests it may have, and when it may be asked again.

    Attributes:
        limit: Maximum number of our requests there; grows in fractions.
        problem: Why the last request failed; empty after an answer.
        retry_at: Send nothing before this time.
    """

    def __init__(self, url: str, settings: BatchSettings) -> None:
        self.url, self._settings = url, settings
        self.limit = float(max(FIRST_LIMIT, settings.min_concurrency))
        self.in_flight = 0
        self.problem = ""
        self.retry_at = self._failed_at = -math.inf
        self._num_failures = self._num_broken = 0

    @property
    def has_room(self) -> bool:
        """Whether it may get a request now."""
        return self.in_flight < int(self.limit) and time.monotonic() >= self.retry_at

    def succeed(self) -> None:
        """Count an answer."""
        self.problem, self._num_failures, self._num_broken = "", 0, 0
        self.limit += 1 if self._failed_at < 0 else 1 / self.limit
        self.limit = min(self.limit, self._settings.max_concurrency)

    def break_off(self, sent_at: float) -> None:
        """Count a 5xx or a broken connection."""
        self._num_broken += 1
        if self._num_broken >= NUM_BROKEN:
            self.fail("fails", sent_at)

    def fail(self, problem: str, sent_at: float, retry_after_s: float = 0.0) -> None:
        """Halve the limit and pause; requests sent before the last failure belong to that one."""
        now, self.problem = time.monotonic(), problem
        if sent_at >= self._failed_at:
            self._failed_at = now
            self._num_failures += 1
            half = min(self.limit, self.in_flight) / 2
            self.limit = max(half, self._settings.min_concurrency)
            self.retry_at = now + pause_s(self._num_failures)
        self.retry_at = max(self.retry_at, now + min(retry_after_s, MAX_RETRY_AFTER_S))


class BatchClient:
    """An asynchronous context manager over servers; one `run` at a time.

    Args:
        urls: Routers or any OpenAI servers; each request goes to the least busy one.

    Raises:
        ConfigInvalid: There is no URL, or one is malformed.
    """

    def __init__(self, urls: Iterable[str], settings: BatchSettings | None = None) -> None:
        given = [checked_url("--url", url.rstrip("/").removesuffix("/v1")) for url in urls]
        if not given:
            raise ConfigInvalid("no URL: name at least one server")
        self._settings = settings or BatchSettings()
        self.servers = [Server(url, self._settings) for url in dict.fromkeys(given)]
        self._was_reached = False
        self._answered_at = 0.0

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

    @property
    def in_flight(self) -> int:
        """Requests at servers now."""
        return sum(server.in_flight for server in self.servers)

    def stop(self) -> None:
        """Start nothing more: `run` ends when the requests at servers have ended."""
        self._is_stopping.set()
        self._has_changed.set()

    async def run(self, requests: Requests) -> AsyncGenerator[BatchResult, None]:
        """Send requests and yield their results as they end.

        Requests are taken when there is room for them, so there may be any number. To leave before the
        last result, close the iterator (`contextlib.aclosing`), which cancels the requests.

        Raises:
            ServersAway: No server answers, or none has for `patience_s`.
            KeyRefused: A server requires another API key.
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
        """
        began_at, num_attempts, num_broken = time.monotonic(), 0, 0
        while True:
            server, sent_at = await self._take(), time.monotonic()
            try:
                kind, result, retry_after = await self._send(server, request)
                self._count(server, kind, result, sent_at, retry_after)
            finally:
                server.in_flight -= 1
                self._has_changed.set()
            num_attempts += kind != "away"
            num_broken += kind == "broke"
            is_late = time.monotonic() - began_at > self._settings.patience_s
            if (
                kind == "answered"
                or (kind == "broke" and num_broken >= self._settings.max_attempts)
                # If nobody was answered since, the servers refuse all requests, not this one.
                or (kind == "full" and is_late and self._answered_at > began_at)
            ):
                return replace(result, num_attempts=num_attempts)
            if kind == "broke":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_stopping.wait(), pause_s(num_broken))

    async def _take(self) -> Server:
        """Wait for a place at a server, the least busy one first, and take it."""
        async with self._line:
            while not self._is_stopping.is_set():
                if open_ones := [server for server in self.servers if server.has_room]:
                    server = min(open_ones, key=lambda each: each.in_flight / each.limit)
                    server.in_flight += 1
                    return server
                self._has_changed.clear()
                pauses = [server.retry_at - time.monotonic() for server in self.servers]
                next_s = min((pause for pause in pauses if pause > 0), default=None)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_changed.wait(), next_s)
            raise _Stopping

    def _count(
        self, server: Server, kind: Kind, result: BatchResult, sent_at: float, retry_after: str
    ) -> None:
        """Let an attempt count for its server.

        Raises:
            KeyRefused: The server requires another key.
            ServersAway: No server has answered for too long.
        """
        self._was_reached |= result.status_code > 0
        if result.status_code == 401:
            raise KeyRefused(f"{server.url} requires an API key, or another one: give --api-key")
        match kind:
            case "answered":
                self._answered_at = time.monotonic()
                return server.succeed()
            case "broke":
                return server.break_off(sent_at)
            case "full":
                server.fail("has no room", sent_at, retry_after_s(retry_after))
            case "away":
                assert result.error is not None
                server.fail(f"does not answer ({result.error.message})", sent_at)
        if all(each.problem for each in self.servers):
            problems = "; ".join(f"{each.url} {each.problem}" for each in self.servers)
            silent_s = time.monotonic() - self._answered_at
            if not self._was_reached:
                raise ServersAway(f"{problems}: start a server, or give another --url")
            if silent_s > self._settings.patience_s:
                raise ServersAway(f"no server has answered for {silent_s:.0f} s: {problems}")
        return None

    async def _send(self, server: Server, request: BatchRequest) -> tuple[Kind, BatchResult, str]:
        """Send a request once; return the outcome and the server's Retry-After."""
        timeout = aiohttp.ClientTimeout(self._settings.timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.post(
                server.url + request.url,
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
    requests: Iterable[BatchRequest],
    urls: Iterable[str],
    settings: BatchSettings | None = None,
) -> list[BatchResult]:
    """Send requests, wait for all of them, and return their results in the order of the requests.

    For code without an event loop. Requests and results have to fit into memory. Raises as `BatchClient`.
    """
    # A copy of each: a request that is given twice has two results.
    given = [replace(request) for request in requests]
    places = {id(request): place for place, request in enumerate(given)}

    async def run() -> list[BatchResult]:
        async with BatchClient(urls, settings) as client:
            return [result async for result in client.run(given)]

    return sorted(asyncio.run(run()), key=lambda result: places[id(result.request)])
