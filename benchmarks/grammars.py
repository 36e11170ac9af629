"""Time between the tokens of a plain stream while other requests bring random grammars, compared with the stream alone.

The grammars are those of the fuzzer: regular expressions, EBNF grammars and JSON schemas, most of which no person
would write. Each arrives with a random logit bias, after the one before it was answered. A server that is well may
answer it (200), refuse it (400) or ask to send it later (429, 503). The stream runs alone and beside them in turn.
"""

import argparse
import asyncio
import collections
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Iterator

import aiohttp
import numpy as np

from benchmarks.rig import Target, parse, parser_of, result, tandem
from tests.engine.random_grammars import random_grammar

GOAL_RATIO = 2.0
GOOD_STATUSES = {200, 400, 429, 503}
# The embedded model's token of 64 dashes, which takes a matcher through 64 characters at once.
DASHES = 15069


async def gaps_ms(client: aiohttp.ClientSession, seconds: float) -> AsyncIterator[float]:
    """Keep one plain stream open for `seconds`; yield the time between its tokens."""
    end_s = time.monotonic() + seconds
    sampling = {"max_new_tokens": 500, "ignore_eos": True, "temperature": 0}
    while time.monotonic() < end_s:
        body = {"text": "Once upon a time", "sampling_params": sampling, "stream": True}
        async with client.post("/generate", json=body, raise_for_status=True) as answer:
            before_s = None
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                now_s = time.monotonic()
                if before_s is not None:
                    yield (now_s - before_s) * 1000
                before_s = now_s
                if now_s > end_s:
                    break


async def disturb(
    client: aiohttp.ClientSession, rng: random.Random, statuses: collections.Counter[int]
) -> None:
    """Send grammars one after the other until cancelled; count the statuses of the answers."""
    while True:
        grammar = random_grammar(rng)
        tokens = [DASHES, *rng.sample(range(3, 40_000), 3)]
        bias = {str(token): rng.uniform(-100, 100) for token in tokens}
        sampling = {grammar.kind: grammar.text, "max_new_tokens": 16, "logit_bias": bias}
        body = {"text": "Once upon a time", "sampling_params": sampling}
        async with client.post("/generate", json=body) as answer:
            await answer.read()
            statuses[answer.status] += 1
            if answer.status not in GOOD_STATUSES:
                print(f"{answer.status} for the {grammar.kind} {grammar.text[:500]}", flush=True)


@contextlib.contextmanager
def running(tasks: list[asyncio.Task[None]]) -> Iterator[None]:
    """Cancel the tasks at the end."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def measure(args: argparse.Namespace, target: Target) -> tuple[list[float], list[float], int]:
    """Return the stream's gaps alone and beside grammars, in ms, and the number of answers that are failures."""
    rng = random.Random(args.seed)
    alone: list[float] = []
    beside: list[float] = []
    statuses: collections.Counter[int] = collections.Counter()
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(target.url, timeout=timeout) as client:
        body = {"text": "Once upon a time", "sampling_params": {"regex": "a"}}
        # The first grammar starts a process, which takes seconds.
        await client.post("/generate", json=body)
        end_s = time.monotonic() + args.minutes * 60
        while time.monotonic() < end_s:
            alone_now = [gap async for gap in gaps_ms(client, args.alone_s)]
            clients = [
                asyncio.create_task(disturb(client, rng, statuses)) for _ in range(args.clients)
            ]
            with running(clients):
                beside_now = [gap async for gap in gaps_ms(client, args.beside_s)]
            p99s = [float(np.percentile(gaps, 99)) for gaps in (alone_now, beside_now)]
            print(
                f"p99 alone {p99s[0]:.0f} ms, beside {p99s[1]:.0f} ms, longest {max(beside_now):.0f} ms, "
                f"tokens {len(alone_now)} and {len(beside_now)}, answers {dict(sorted(statuses.items()))}",
                flush=True,
            )
            alone += alone_now
            beside += beside_now
    return alone, beside, sum(statuses[status] for status in statuses.keys() - GOOD_STATUSES)


def main() -> None:
    """Run the benchmark."""
    parser = parser_of("grammars", "Measure the effect of random grammars on a plain stream.")
    add = parser.add_argument
    add("--minutes", type=float, default=4, help="duration")
    add("--alone-s", type=float, default=20, help="seconds of the stream alone, in turn with")
    add("--beside-s", type=float, default=60, help="seconds of the stream beside grammars")
    add("--clients", type=int, default=1, help="clients that send grammars")
    add("--seed", type=int, default=1, help="seed of the grammars")
    add("node_flags", nargs="*", default=[], help="flags for all nodes, after --")
    args = parse(parser, {"minutes": 0.05, "alone_s": 2, "beside_s": 4})
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    with tandem("cluster", ["up", *args.node_flags]) as cluster:
        alone, beside, num_failed = asyncio.run(measure(args, cluster))
    ratio = float(np.percentile(beside, 99) / np.percentile(alone, 99))
    print(f"{len(alone)} and {len(beside)} tokens; {num_failed} failed answers")
    goal = 0.0 if num_failed else GOAL_RATIO
    print(result("gap_p99_beside_grammars", ratio, goal, is_lower_better=True))


if __name__ == "__main__":
    main()
