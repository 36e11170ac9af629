"""Streamed requests over HTTP, timed token by token: the load of benchmarks that serve."""

import asyncio
import contextlib
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import aiohttp
import numpy as np

VOCAB_SIZE = 40_000
_NO_CHOICES = re.compile(rb'"choices": ?\[\]')
_COUNT = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(frozen=True, slots=True)
class Answer:
    """One request.

    Attributes:
        sent_s: By `time.monotonic`.
        status: Of HTTP; 0 when the connection broke.
        event_s: When each event with tokens came.
        retry_after_s: What a rejection asked for.
    """

    sent_s: float
    status: int = 0
    event_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    retry_after_s: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; infinite when there was none."""
        return self.event_s[0] - self.sent_s if self.event_s else float("inf")


@dataclass(frozen=True, slots=True)
class Served:
    """How a server dealt with a load; times in milliseconds, as (50th, 90th, 99th percentile)."""

    num_failed: int
    tokens_per_s: float
    ttft_ms: tuple[float, float, float]
    itl_ms: tuple[float, float, float]


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session without a bound on connections or time."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Sequence[int],
    num_new: int,
    *,
    model: str = "",
    headers: dict[str, str] | None = None,
) -> Answer:
    """Send one streamed request and read its answer.

    Args:
        model: Asked for over OpenAI's API; empty uses the native one.
    """
    if model:
        path, body = "/v1/completions", _completion(model, prompt, num_new)
    else:
        sampling = {"max_new_tokens": num_new, "temperature": 0, "ignore_eos": True}
        path, body = "/generate", {"input_ids": list(prompt), "sampling_params": sampling}
    sent_s = time.monotonic()
    answer = Answer(sent_s)
    with contextlib.suppress(aiohttp.ClientError):
        async with session.post(url + path, json=body | {"stream": True}, headers=headers) as reply:
            if reply.status != 200:
                after = int(reply.headers.get("Retry-After", 0))
                return Answer(sent_s, reply.status, retry_after_s=after)
            return await _read(reply, sent_s)
    return answer


async def _read(reply: aiohttp.ClientResponse, sent_s: float) -> Answer:
    event_s, num_tokens = [], 0
    async for line in reply.content:
        if line.startswith(b"data: {"):
            # OpenAI's last event has the usage, and no token.
            if not _NO_CHOICES.search(line):
                event_s.append(time.monotonic())
            if found := _COUNT.findall(line):
                num_tokens = int(found[-1])
    return Answer(sent_s, reply.status, event_s, num_tokens)


def _completion(model: str, prompt: Sequence[int], num_new: int) -> dict[str, object]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_new,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Return ids that every model under measurement has."""
    return [rng.randrange(9, VOCAB_SIZE) for _ in range(num_tokens)]


async def closed_loop(
    url: str,
    concurrency: int,
    num_requests: int,
    prompt_tokens: int,
    new_tokens: int,
    *,
    seed: int = 0,
    model: str = "",
) -> Served:
    """Keep `concurrency` requests open until `num_requests` are answered."""
    rng = random.Random(seed)
    prompts = [random_prompt(rng, prompt_tokens) for _ in range(num_requests)]
    answers: list[Answer] = []
    async with client() as session:

        async def stream() -> None:
            while prompts:
                prompt = prompts.pop()
                answers.append(await ask(session, url, prompt, new_tokens, model=model))

        begin_s = time.monotonic()
        await asyncio.gather(*(stream() for _ in range(concurrency)))
        elapsed_s = time.monotonic() - begin_s
    gaps = [gap for each in answers for gap in np.diff(each.event_s)]
    return Served(
        num_failed=sum(each.num_tokens != new_tokens for each in answers),
        tokens_per_s=sum(each.num_tokens for each in answers) / elapsed_s,
        ttft_ms=_percentiles([each.ttft_s for each in answers if each.event_s]),
        itl_ms=_percentiles(gaps),
    )


def _percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    if not seconds:
        return (0.0, 0.0, 0.0)
    p50, p90, p99 = np.percentile(seconds, [50, 90, 99]) * 1000
    return float(p50), float(p90), float(p99)
