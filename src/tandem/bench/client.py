"""Sends the jobs of a load over aiohttp, reads the streamed answers and times their tokens.

One read of the socket is one arrival. Token counts are the server's: `meta_info.completion_tokens` of the native
API, or `usage.completion_tokens` in every event of an OpenAI API (`continuous_usage_stats`). If the events carry
neither, each event with text counts as one token, and the last `usage` gives the total.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from tandem.bench.config import BenchConfig
from tandem.bench.workload import Job, prompt_ids, prompt_text

PATHS = {"native": "/generate", "completions": "/v1/completions", "chat": "/v1/chat/completions"}
UNFINISHED = "unfinished"
MAX_SHOWN = 300


def body_of(config: BenchConfig, job: Job) -> bytes:
    """Return the body of a request."""
    if config.api == "native":
        sampling = {"max_new_tokens": job.output_tokens, "temperature": 0}
        body: dict[str, object] = {
            "input_ids": prompt_ids(config, job),
            "sampling_params": sampling | {"ignore_eos": config.is_eos_ignored},
        }
    else:
        body = {
            "model": config.model,
            "max_tokens": job.output_tokens,
            "temperature": 0,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if config.is_eos_ignored:  # servers that do not know the field reject it
            body["ignore_eos"] = True
        if config.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt_text(config, job)}]
        else:
            body["prompt"] = prompt_ids(config, job)
    return msgspec.json.encode({**body, "stream": True, **config.extra_body})


@dataclass(slots=True, kw_only=True)
class Sample:
    """The measurements of one request.

    Attributes:
        sent_s: The time of sending, on the monotonic clock.
        times: Seconds from `sent_s` to each arrival that brought tokens.
        counts: The total number of tokens received by each of `times`.
        output_tokens: The server's count for the answer; the tokens received so far if the request failed.
        prompt_tokens: The server's count, or `Job.input_tokens` if the server reports none.
        failure: The kind of failure; empty for a success, `unfinished` for a cancelled request.
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


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: Any = None

    @property
    def has_text(self) -> bool:
        delta = self.delta or _Delta()
        return bool(self.text or delta.content or delta.reasoning_content or delta.reasoning)


class _Event(msgspec.Struct):
    meta_info: _Usage | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str = ""


_decoder = msgspec.json.Decoder(_Event)


class Broken(Exception):
    """A request failed; reports count failures by `kind`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Answer:
    """Parses one streamed answer into its sample."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._partial = b""
        self._num_tokens = 0
        self._has_counts = self._is_ended = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Parse the bytes of one read, which arrived at `now_s` (monotonic).

        Raises:
            Broken: An event is an error, an abort or invalid JSON.
        """
        # Lines may end in CRLF. JSON escapes CR, so removing CR changes no data.
        *whole, self._partial = (self._partial + data.replace(b"\r", b"")).split(b"\n\n")
        before = self._num_tokens
        for block in whole:
            self._take(block)
        if self._num_tokens > before:
            self._sample.times.append(now_s - self._sample.sent_s)
            self._sample.counts.append(self._num_tokens)

    def finish(self) -> None:
        """Parse the rest after the end of the body.

        Raises:
            Broken: The stream ended before its last event, or the rest is invalid (see `feed`).
        """
        self._take(self._partial)
        if not self._is_ended:
            raise Broken("cut off", f"the stream ended early, after {self._num_tokens} tokens")

    def _take(self, block: bytes) -> None:
        for line in block.split(b"\n"):
            if not line.startswith(b"data:"):
                continue
            if (content := line[5:].strip()) == b"[DONE]":
                self._is_ended = True
                continue
            try:
                event = _decoder.decode(content)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise Broken("bad event", f"{error}: {content[:200]!r}") from error
            if event.error is not None or event.object == "error":
                raise Broken("error event", content[:MAX_SHOWN].decode(errors="replace"))
            self._count(event)

    def _count(self, event: _Event) -> None:
        usage = event.meta_info or event.usage or _Usage()
        total, is_last_usage = usage.completion_tokens or 0, not (event.meta_info or event.choices)
        if total and not is_last_usage:
            self._has_counts = True
            self._num_tokens = max(self._num_tokens, total)
        elif not self._has_counts:
            self._num_tokens += any(choice.has_text for choice in event.choices)
        sample = self._sample
        sample.output_tokens = total or self._num_tokens
        sample.prompt_tokens = usage.prompt_tokens or sample.prompt_tokens
        details = usage.prompt_tokens_details or _Cached()
        sample.cached_tokens = usage.cached_tokens or details.cached_tokens or sample.cached_tokens
        for reason in (usage.finish_reason, *(choice.finish_reason for choice in event.choices)):
            kind = reason.get("type") if isinstance(reason, dict) else reason
            if kind == "abort":
                raise Broken("aborted", str(reason))
            self._is_ended |= bool(kind)


async def drive(
    config: BenchConfig,
    jobs: Sequence[Job],
    concurrency: int = 0,
    *,
    ended: Callable[[Sample], None] = lambda _sample: None,
    stop: asyncio.Event | None = None,
) -> list[Sample]:
    """Send each job once it is due and a slot is free; return the samples after the last request ended.

    Args:
        concurrency: The maximum number of requests at once; 0: no limit.
        ended: Called with each sample when its request has ended.
        stop: Once it is set, requests in flight are cancelled and count as unfinished.
    """
    samples: list[Sample] = []
    places = asyncio.Semaphore(concurrency or max(len(jobs), 1))

    async def send(job: Job, body: bytes) -> None:
        sample = Sample(sent_s=time.monotonic(), prompt_tokens=job.input_tokens)
        samples.append(sample)
        try:
            await _exchange(session, config, body, sample)
            _check_length(config, sample, job)
        except Broken as broken:
            sample.failure, sample.error = broken.kind, str(broken)
        except asyncio.CancelledError:
            sample.failure = UNFINISHED
            raise
        finally:
            places.release()
            ended(sample)

    async def send_all() -> None:
        start_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for job in jobs:
                body = body_of(config, job)  # before it is due: encoding is slower than sending
                await asyncio.sleep(max(start_s + job.due_s - time.monotonic(), 0))
                await places.acquire()
                tasks.create_task(send(job, body))

    timeout = aiohttp.ClientTimeout(sock_read=config.timeout_s, sock_connect=config.timeout_s)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers=headers_of(config), timeout=timeout
    ) as session:
        sending = asyncio.create_task(send_all())
        stopping = asyncio.create_task((stop or asyncio.Event()).wait())
        try:
            await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            sending.cancel()  # no-op if it is done
            with contextlib.suppress(asyncio.CancelledError):
                await sending
    return samples


def headers_of(config: BenchConfig) -> dict[str, str]:
    """Return the headers of every request."""
    key = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    return {"Content-Type": "application/json", **key}


async def _exchange(
    session: aiohttp.ClientSession, config: BenchConfig, body: bytes, sample: Sample
) -> None:
    """Send a request and read its answer.

    Raises:
        Broken: The answer failed or is incomplete.
    """
    answer = Answer(sample)
    try:
        async with session.post(config.url + PATHS[config.api], data=body) as response:
            if response.status != 200:
                raise Broken(f"HTTP {response.status}", _sentence(await response.read()))
            async for data in response.content.iter_any():
                answer.feed(data, time.monotonic())
    except TimeoutError as error:
        raise Broken("timeout", f"nothing came for {config.timeout_s:g} s") from error
    except aiohttp.ClientConnectorError as error:
        raise Broken("no connection", str(error)) from error
    except aiohttp.ClientError as error:
        raise Broken("disconnected", str(error) or "the connection broke") from error
    answer.finish()


def _check_length(config: BenchConfig, sample: Sample, job: Job) -> None:
    if config.is_eos_ignored and sample.output_tokens < job.output_tokens:
        raise Broken(
            "short",
            f"ended after {sample.output_tokens} of {job.output_tokens} tokens: give --disable-ignore-eos if "
            "answers may end early, or a smaller --output-len if the context is too short",
        )


def _sentence(body: bytes) -> str:
    """Return the error message of a response body, at most `MAX_SHOWN` characters."""
    try:
        content = msgspec.json.decode(body)
        error = content.get("error", content)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:MAX_SHOWN]
    except (msgspec.MsgspecError, AttributeError, UnicodeDecodeError):
        return body.decode(errors="replace")[:MAX_SHOWN]
