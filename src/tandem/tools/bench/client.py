"""Sends the requests of a load over aiohttp, reads the streamed answers and times their tokens.

One read of the socket is one arrival. Token counts are the server's: `meta_info.completion_tokens` of the native
API, or `usage.completion_tokens` in every event of `/v1/completions` (`continuous_usage_stats`). If the events carry
neither, each event with text counts as one token, and the last `usage` gives the total.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from tandem.tools.bench.config import BenchConfig
from tandem.tools.bench.load import PlannedRequest, body_of
from tandem.tools.query import MAX_SHOWN, error_message

PATHS = {"native": "/generate", "completions": "/v1/completions"}
# A request fails if it receives nothing for this long.
TIMEOUT_S = 300.0


@dataclass(slots=True, kw_only=True)
class Sample:
    """The measurements of one request.

    Attributes:
        sent_s: The time of sending, on the monotonic clock.
        times: Seconds from `sent_s` to each arrival that brought tokens.
        counts: The total number of tokens received by each of `times`.
        output_tokens: The server's count for the answer; the tokens received so far if the request failed.
        failure: The kind of failure; empty for a success.
        error: The failure's message.
    """

    sent_s: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failure: str = ""
    error: str = ""


class _Cached(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    cached_tokens: int | None = 0
    prompt_tokens_details: _Cached | None = None
    finish_reason: Any = None


class _AnswerChoice(msgspec.Struct):
    text: str | None = None
    finish_reason: Any = None


class _Event(msgspec.Struct):
    meta_info: _Usage | None = None
    choices: list[_AnswerChoice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str = ""


_decoder = msgspec.json.Decoder(_Event)


class AnswerFailed(Exception):
    """A request failed; reports count failures by `kind`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class AnswerParser:
    """Parses one streamed answer into its sample."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._partial = b""
        self._num_tokens = 0
        self._has_counts = self._is_ended = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Parse the bytes of one read, which arrived at `now_s` (monotonic).

        Raises:
            AnswerFailed: An event is an error, an abort or invalid JSON.
        """
        *lines, self._partial = (self._partial + data).split(b"\n")
        before = self._num_tokens
        for line in lines:
            self._take(line.rstrip())
        if self._num_tokens > before:
            self._sample.times.append(now_s - self._sample.sent_s)
            self._sample.counts.append(self._num_tokens)

    def finish(self) -> None:
        """Check that the body, which has ended, was complete.

        Raises:
            AnswerFailed: The stream ended before its last event.
        """
        if not self._is_ended:
            raise AnswerFailed(
                "cut off", f"the stream ended early, after {self._num_tokens} tokens"
            )

    def _take(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        if (content := line[5:].strip()) == b"[DONE]":
            self._is_ended = True
            return
        try:
            event = _decoder.decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise AnswerFailed("bad event", f"{error}: {content[:200]!r}") from error
        if event.error is not None or event.object == "error":
            raise AnswerFailed("error event", content[:MAX_SHOWN].decode(errors="replace"))
        self._count(event)

    def _count(self, event: _Event) -> None:
        usage = event.meta_info or event.usage or _Usage()
        total, is_last_usage = usage.completion_tokens or 0, not (event.meta_info or event.choices)
        if total and not is_last_usage:
            self._has_counts = True
            self._num_tokens = max(self._num_tokens, total)
        elif not self._has_counts:
            self._num_tokens += any(choice.text for choice in event.choices)
        sample = self._sample
        sample.output_tokens = total or self._num_tokens
        sample.prompt_tokens = usage.prompt_tokens or sample.prompt_tokens
        details = usage.prompt_tokens_details or _Cached()
        sample.cached_tokens = usage.cached_tokens or details.cached_tokens or sample.cached_tokens
        for reason in (usage.finish_reason, *(choice.finish_reason for choice in event.choices)):
            kind = reason.get("type") if isinstance(reason, dict) else reason
            if kind == "abort":
                raise AnswerFailed("aborted", str(reason))
            self._is_ended |= bool(kind)


async def drive(
    config: BenchConfig, requests: Sequence[PlannedRequest], concurrency: int
) -> list[Sample]:
    """Send each request once it is due and a slot is free; return the samples after the last request ended.

    Args:
        concurrency: The maximum number of requests at once; 0: no limit.
    """
    samples: list[Sample] = []
    slots = asyncio.Semaphore(concurrency or max(len(requests), 1))
    start_s = time.monotonic()

    async def send(body: bytes) -> None:
        sample = Sample(sent_s=time.monotonic(), prompt_tokens=config.input_tokens)
        samples.append(sample)
        try:
            await _exchange(session, config, body, sample)
        except AnswerFailed as failed:
            sample.failure, sample.error = failed.kind, str(failed)
        slots.release()

    key = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Content-Type": "application/json", **key},
            timeout=aiohttp.ClientTimeout(sock_read=TIMEOUT_S, sock_connect=TIMEOUT_S),
        ) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for request in requests:
            body = body_of(config, request)  # before it is due: encoding is slower than sending
            await asyncio.sleep(max(start_s + request.due_s - time.monotonic(), 0))
            await slots.acquire()
            tasks.create_task(send(body))
    return samples


async def _exchange(
    session: aiohttp.ClientSession, config: BenchConfig, body: bytes, sample: Sample
) -> None:
    """Send a request and read its answer.

    Raises:
        AnswerFailed: The answer failed or is incomplete.
    """
    answer = AnswerParser(sample)
    try:
        async with session.post(config.url + PATHS[config.api], data=body) as response:
            if response.status != 200:
                reason = error_message(await response.read())
                raise AnswerFailed(f"HTTP {response.status}", reason)
            async for data in response.content.iter_any():
                answer.feed(data, time.monotonic())
    except TimeoutError as error:
        raise AnswerFailed("timeout", f"no data for {TIMEOUT_S:g} s") from error
    except aiohttp.ClientError as error:
        raise AnswerFailed("disconnected", str(error) or "the connection broke") from error
    answer.finish()
    if sample.output_tokens < config.output_tokens:
        raise AnswerFailed(
            "short",
            f"ended after {sample.output_tokens} of {config.output_tokens} tokens: use a smaller --output-len if "
            "the context is too short",
        )
