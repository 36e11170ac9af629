"""Sends requests and gives their results as they come. Writes nothing: `job.py` does, for files.

```
 waiting for a place ─▶ sent ─▶ an answer: 2xx, 4xx ─────────────────────────────────▶ result
      ▲                  │      408, 5xx, broken, too late ─▶ pause ─▶ after `max_attempts`: result
      │                  │      429, 503 ─▶ pause, and so does the server ─▶ after `patience_s`: result
      └──────────────────┴───── no connection: the server pauses; costs no attempt
```
"""

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import aiohttp

from tandem.batch.attempt import CONNECT_TIMEOUT_S, KEY_REFUSED, Outcome, send
from tandem.batch.looks import Watcher
from tandem.batch.pace import Pace
from tandem.batch.servers import KeyRefused, Server, Servers, ServersAway, Stopping, pause_s
from tandem.batch.values import BatchRequest, BatchResult
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import checked_url

LOOK_INTERVAL_S = 0.25
Requests = Iterable[BatchRequest] | AsyncIterable[BatchRequest]


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How requests are sent.

    Attributes:
        api_key: Sent as a bearer token; empty: none is sent.
        max_concurrency: Requests under way at all servers together, at most. A request under way is held in
            memory with its answer, and has a connection.
        min_concurrency: At each server that is there, at least, whatever waits at it.
        max_attempts: How often a request is sent that ends in 408, 5xx or a broken connection.
        timeout_s: Of one attempt, answer included; OpenAI's clients have the same.
        patience_s: For how long a request that finds no room (429, 503) is tried again, and for how long
            no server at all may answer.
        extra_body: Fields of requests that have none of that name.
    """

    api_key: str = ""
    max_concurrency: int = 1024
    min_concurrency: int = 1
    max_attempts: int = 5
    timeout_s: float = 600.0
    patience_s: float = 900.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check them.

        Raises:
            ConfigInvalid: One cannot work.
        """
        for name in ("max_concurrency", "min_concurrency", "max_attempts"):
            if getattr(self, name) < 1:
                raise ConfigInvalid(f"{name} is {getattr(self, name)}: give at least 1")
        for name in ("timeout_s", "patience_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigInvalid(
                    f"{name} is {getattr(self, name)}: give more than 0, and no infinity"
                )


class BatchClient:
    """An asynchronous context manager over servers; one `run` at a time.

    Args:
        urls: Of routers, or of any OpenAI servers; each request goes to the least busy one.

    Raises:
        ConfigInvalid: There is no URL, or one is none.
    """

    def __init__(self, urls: Iterable[str], settings: BatchSettings | None = None) -> None:
        self._urls = dict.fromkeys(_server(url) for url in urls)
        if not self._urls:
            raise ConfigInvalid("no URL: name at least one server")
        self._settings = settings or BatchSettings()
        self._chance = random.Random()

    async def __aenter__(self) -> Self:
        """Look at the servers' queues from now on; connections are opened as they are needed."""
        settings, loop = self._settings, asyncio.get_running_loop()
        key = settings.api_key
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connector=aiohttp.TCPConnector(limit=0),
        )
        most = settings.max_concurrency
        servers = [
            Server(url, Pace(settings.min_concurrency, most), loop.time) for url in self._urls
        ]
        self._servers = Servers(servers, most, self._chance)
        self._clock, self._heard_s = loop.time, loop.time()
        self._watching = [loop.create_task(self._watch(server)) for server in servers]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all connections."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._servers.stop()
        await self._session.close()

    @property
    def servers(self) -> Sequence[Server]:
        """The servers, to be looked at."""
        return self._servers.all

    @property
    def in_flight(self) -> int:
        """Requests that are at servers now."""
        return self._servers.in_flight

    def stop(self) -> None:
        """Begin nothing more: `run` ends when what is under way has ended."""
        self._servers.stop()

    async def check(self) -> Mapping[str, str]:
        """Ask each server for its models; return what is wrong with those that do not answer, by URL.

        Raises:
            KeyRefused: One wants another API key.
            ServersAway: None answers.
        """
        said = await asyncio.gather(*(self._check(server) for server in self.servers))
        problems = {server.url: why for server, why in zip(self.servers, said, strict=True) if why}
        if len(problems) == len(self.servers):
            lines = "; ".join(f"{url} does not answer ({why})" for url, why in problems.items())
            raise ServersAway(f"{lines}: start a server, or give another --url")
        return problems

    async def _check(self, server: Server) -> str:
        timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
        try:
            async with self._session.get(f"{server.url}/v1/models", timeout=timeout) as response:
                self._refuse_key(server, response.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            server.lose(why := str(error) or type(error).__name__, self._chance)
            return why
        return ""

    async def run(self, requests: Requests) -> AsyncGenerator[BatchResult, None]:
        """Send requests and give their results as they end, in no order.

        Requests are taken as there is room for them, so there may be any number. Whoever leaves before the
        last result closes the iterator (`contextlib.aclosing`), which ends what is under way.

        Raises:
            ServersAway: No server has answered for `patience_s`.
            KeyRefused: A server wants another API key.
        """
        results: asyncio.Queue[BatchResult | None] = asyncio.Queue()
        # Bounds what is held in memory: requests that pause and results that nobody has taken yet count.
        places = asyncio.Semaphore(self._settings.max_concurrency)
        sending = asyncio.create_task(self._send_all(requests, places, results))
        sending.add_done_callback(lambda _: results.put_nowait(None))
        try:
            while (result := await results.get()) is not None:
                yield result
                places.release()
            await sending
        except ExceptionGroup as group:
            raise _first(group) from group
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send_all(
        self,
        requests: Requests,
        places: asyncio.Semaphore,
        results: asyncio.Queue[BatchResult | None],
    ) -> None:
        async def carry(request: BatchRequest, server: Server) -> None:
            try:
                results.put_nowait(await self._carry(request, server))
            except Stopping:
                places.release()

        self._heard_s = self._clock()
        async with asyncio.TaskGroup() as tasks:
            guard = tasks.create_task(self._end_when_away())
            async with (
                asyncio.TaskGroup() as carrying,
                contextlib.aclosing(_each(requests)) as each,
            ):
                with contextlib.suppress(Stopping):
                    async for request in each:
                        await places.acquire()
                        server = await self._servers.take(is_first=False)
                        carrying.create_task(carry(request, server))
            guard.cancel()

    async def _carry(self, request: BatchRequest, server: Server) -> BatchResult:
        """Send a request until it has a result.

        Raises:
            Stopping: It was stopped before there was one.
        """
        settings, began_s = self._settings, self._clock()
        num_attempts = num_pauses = 0
        while True:
            sent_s = self._clock()
            try:
                outcome = await send(
                    self._session, server.url, request, settings.extra_body, settings.timeout_s
                )
            finally:
                self._servers.give_back(server)
            num_attempts += outcome.kind != "away"
            self._note(server, outcome, self._clock() - sent_s)
            if self._is_last(outcome, num_attempts, began_s):
                return outcome.result(request, num_attempts)
            if outcome.kind != "away":  # else the server pauses, and another may have room at once
                num_pauses += 1
                await self._servers.pause(pause_s(num_pauses, self._chance))
            server = await self._servers.take(is_first=True)

    def _is_last(self, outcome: Outcome, num_attempts: int, began_s: float) -> bool:
        """Whether this is the request's result, for good or bad."""
        match outcome.kind:
            case "answered":
                return True
            case "broke":
                return num_attempts >= self._settings.max_attempts
            case "full":
                # Where nobody was answered since, it is not this request's fault: all of it ends, unwritten.
                has_waited = self._clock() - began_s > self._settings.patience_s
                return has_waited and self._heard_s > began_s
            case "away":
                return False

    def _note(self, server: Server, outcome: Outcome, took_s: float) -> None:
        """Let what came of an attempt count for its server."""
        self._refuse_key(server, outcome.status_code)
        match outcome.kind:
            case "answered":
                self._heard_s = self._clock()
                server.hear()
                if outcome.told.output_tokens:
                    server.pace.answer(took_s / outcome.told.output_tokens)
            case "broke":
                server.fail(self._chance)
            case "full":
                server.refuse(outcome.retry_after_s, self._chance)
            case "away":
                server.lose(outcome.error.message if outcome.error else "", self._chance)
        self._servers.wake()

    @staticmethod
    def _refuse_key(server: Server, status: int) -> None:
        if status == KEY_REFUSED:
            raise KeyRefused(
                f"{server.url} asks for an API key, or for another one: give one that it takes with --api-key"
            )

    async def _end_when_away(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            silent_s = self._clock() - self._heard_s
            if silent_s > self._settings.patience_s and all(each.problem for each in self.servers):
                lines = "; ".join(f"{each.url}: {each.problem}" for each in self.servers)
                raise ServersAway(f"no server has answered for {silent_s:.0f} s ({lines})")

    async def _watch(self, server: Server) -> None:
        """Look at a server's queue from time to time, and let its pace follow."""
        watcher = Watcher(self._session, server.url)
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            if server.is_shut:
                watcher.begin_again()  # another server may come up there
                continue
            queued = await watcher.look()
            server.pace.look(server.in_flight, server.take_peak(), queued)
            self._servers.wake()


def run_batch(
    requests: Iterable[BatchRequest],
    urls: Iterable[str],
    settings: BatchSettings | None = None,
) -> list[BatchResult]:
    """Send requests, wait for all of them, and return their results in the order of the requests.

    For code without an event loop, and for as many requests as fit into memory.

    Raises:
        ServersAway: No server answers, or none has for `patience_s`.
        KeyRefused: A server wants another API key.
        ConfigInvalid: A URL cannot be one.
    """
    given = list(requests)

    async def run() -> list[BatchResult]:
        numbered = (replace(request, number=number) for number, request in enumerate(given))
        async with BatchClient(urls, settings) as client:
            await client.check()
            return [result async for result in client.run(numbered)]

    ended = sorted(asyncio.run(run()), key=lambda result: result.request.number)
    return [replace(result, request=given[result.request.number]) for result in ended]


async def _each(requests: Requests) -> AsyncGenerator[BatchRequest, None]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request


def _server(url: str) -> str:
    return checked_url("--url", url.rstrip("/").removesuffix("/v1"))


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that ended all others."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
