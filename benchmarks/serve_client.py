"""One process of the load client of `benchmarks/serve.py`: sends streamed requests, times tokens.

Run with a `LoadPlan` as JSON on standard input; writes a list of `Sample` as JSON. Times are of the
system's monotonic clock, which all processes of a machine share.
"""

import asyncio
import random
import sys
import time
from collections.abc import Iterator

import aiohttp
import msgspec
import uvloop

# A stream without a byte for so long has failed; a loaded CPU engine may take a minute to a first token.
READ_TIMEOUT_S = 300.0


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one client process does.

    Attributes:
        concurrency: Requests open at once, always, until none is left.
        input_tokens: Ids of each prompt, drawn uniformly from the vocabulary by `seed`.
        output_tokens: Of each answer; the end of sequence is ignored.
        model: Asked for over OpenAI's API; empty drives the native one.
    """

    url: str
    model: str = ""
    num_requests: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    vocab_size: int
    seed: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it was sent, and when how many of its tokens had arrived.

    Attributes:
        arrivals: (time, tokens so far), one for each event that brought tokens.
        error: Why it failed; empty when it did not.
    """

    sent_s: float
    arrivals: list[tuple[float, int]]
    error: str = ""


class _Meta(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    """What of an event counts tokens: in the native API the one, in OpenAI's the other."""

    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    usage: _Meta | None = None


def bodies(plan: LoadPlan) -> Iterator[dict[str, object]]:
    """Yield the body of each request."""
    rng = random.Random(plan.seed)
    for _ in range(plan.num_requests):
        prompt = [rng.randrange(plan.vocab_size) for _ in range(plan.input_tokens)]
        yield _openai_body(plan, prompt) if plan.model else _native_body(plan, prompt)


def _native_body(plan: LoadPlan, prompt: list[int]) -> dict[str, object]:
    sampling = {"max_new_tokens": plan.output_tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "stream": True}


def _openai_body(plan: LoadPlan, prompt: list[int]) -> dict[str, object]:
    return {
        "model": plan.model,
        "prompt": prompt,
        "max_tokens": plan.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        # A count with every event: a token whose text is empty is one, too.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


async def measure(
    session: aiohttp.ClientSession, plan: LoadPlan, body: dict[str, object]
) -> Sample:
    """Send one request and time its tokens."""
    path = "/v1/completions" if plan.model else "/generate"
    sent_s, arrivals = time.monotonic(), list[tuple[float, int]]()
    decoder = msgspec.json.Decoder(_Event)
    try:
        async with session.post(plan.url + path, json=body) as response:
            if response.status != 200:
                error = f"{response.status}: {(await response.text())[:200]}"
                return Sample(sent_s=sent_s, arrivals=[], error=error)
            async for line in response.content:
                if line.startswith(b"data: {"):
                    told = decoder.decode(line[6:])
                    num_tokens = (told.usage or told.meta_info).completion_tokens
                    if num_tokens > (arrivals[-1][1] if arrivals else 0):
                        arrivals.append((time.monotonic(), num_tokens))
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        return Sample(sent_s=sent_s, arrivals=arrivals, error=f"{type(error).__name__}: {error}")
    return Sample(sent_s=sent_s, arrivals=arrivals)


async def run(plan: LoadPlan) -> list[Sample]:
    """Keep `plan.concurrency` requests open until all were sent; return what was measured."""
    samples: list[Sample] = []
    waiting = bodies(plan)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)

    async def send_all(session: aiohttp.ClientSession) -> None:
        samples.extend([await measure(session, plan, body) for body in waiting])

    async with (
        aiohttp.ClientSession(
            connector=connector, timeout=timeout, read_bufsize=1 << 20
        ) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(plan.concurrency):
            tasks.create_task(send_all(session))
    return samples


def main() -> None:
    """Do one plan."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadPlan)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(run(plan))))


if __name__ == "__main__":
    main()
