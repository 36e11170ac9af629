"""`python -m benchmarks.batch`: does `tandem batch` follow the queue?

```
 interactive requests ─┐
 batch, N at once ─────┴─▶ router ─▶ prefill, 2 decodes (simulated: each has few places)
```

The best fixed number at once is found by a sweep: the least that is within `NEAR` of the highest throughput,
since a larger one only makes a line. Beside each load a client sends requests now and then, and reads in
their timings for how long each waited for room. Then that number and none, which follows the queue, take turns,
each from the beginning on and counted after the same warm-up.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
from typing_extensions import override

from benchmarks.processes import Target, free_port, tandem
from benchmarks.verdict import result
from tandem.batch import BatchClient, BatchRequest, BatchSettings

NUM_DECODES, RUNNING_EACH = 2, 12
# Of devices, in few and long steps, so that the host of the simulation is not what is measured. A prompt
# takes 15 ms and an answer 1 s: decode, and not prefill, is what there is too little of.
PROFILE = {
    "prefill": {"base_ms": 5, "per_token_ms": 0.1},
    "decode": {"base_ms": 38, "per_request_ms": 1},
}
PROMPT_TOKENS, LEAST_TOKENS, MOST_TOKENS = 100, 8, 32
SWEEP = (12, 18, 24, 32)
NEAR = 0.97
WARM_UP_S = 2.5
ROUNDS = 2
# Of the phases that a request's timings tell: what it waits for, and not what is computed.
WAITING = frozenset({"queue", "reserve", "prefill_queue"})


@dataclass(frozen=True, slots=True)
class Row:
    """One load, after the warm-up.

    Attributes:
        speed: Tokens a second of the batch.
        waits_s: Of the interactive requests.
        in_flight: Requests of the batch at once, on average.
    """

    name: str
    speed: float
    waits_s: list[float]
    in_flight: float

    @property
    def wait_ms(self) -> float:
        """The mean: few waits are long, and a median would not show them."""
        return statistics.mean(self.waits_s) * 1000

    @override
    def __str__(self) -> str:
        longest_ms = max(self.waits_s) * 1000
        return (
            f"{self.name:12}{self.in_flight:10.1f}{self.speed:12.0f}{self.wait_ms:12.0f}{longest_ms:12.0f}"
            f"{len(self.waits_s):8}"
        )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, help included."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batch",
        description="Compare `tandem batch` with the best fixed number of requests at once.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=5.0, help="counted of each load")
    add("--interactive-rate", type=float, default=6.0, help="requests a second beside the batch")
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    return parser


@contextlib.contextmanager
def cluster() -> Iterator[Target]:
    """Run simulated nodes and a router."""
    with (
        tempfile.NamedTemporaryFile("w", suffix=".json") as profile,
        contextlib.ExitStack() as stack,
    ):
        json.dump(PROFILE, profile)
        profile.flush()
        sim = ["--engine", "simulated", "--sim-kv", "none", "--sim-profile", profile.name]
        bootstrap = str(free_port())
        prefill = stack.enter_context(tandem("p", ["prefill", *sim, "--bootstrap-port", bootstrap]))
        flags = ["--prefill", prefill.url, bootstrap]
        for index in range(NUM_DECODES):
            argv = ["decode", *sim, "--max-running-requests", str(RUNNING_EACH)]
            flags += ["--decode", stack.enter_context(tandem(f"d{index}", argv)).url]
        yield stack.enter_context(
            tandem("router", ["lb", *flags, "--local-prefill-threshold", "0"])
        )


class Load:
    """A batch without an end, and interactive requests beside it."""

    def __init__(self, url: str, seed: int, rate: float) -> None:
        self._url, self._rate = url, rate
        self._rng = random.Random(seed)
        self._waits_s: list[float] = []
        self._tokens = 0

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(3, 250) for _ in range(PROMPT_TOKENS)]

    def _requests(self) -> Iterator[BatchRequest]:
        for number in itertools.count():
            most = self._rng.randint(LEAST_TOKENS, MOST_TOKENS)
            body = {"prompt": self._prompt(), "max_tokens": most, "ignore_eos": True}
            yield BatchRequest(str(number), body, "/v1/completions")

    async def run(self, name: str, settings: BatchSettings, seconds: float) -> Row:
        """Run until enough was counted."""
        async with BatchClient([self._url], settings) as client, asyncio.TaskGroup() as tasks:
            batch = tasks.create_task(self._batch(client))
            beside = tasks.create_task(self._beside())
            await asyncio.sleep(WARM_UP_S)
            self._tokens, began_s = 0, time.monotonic()
            self._waits_s.clear()
            in_flight = []
            while (past_s := time.monotonic() - began_s) < seconds:
                await asyncio.sleep(0.05)
                in_flight.append(client.in_flight)
            speed = self._tokens / past_s
            batch.cancel()
            beside.cancel()
        return Row(name, speed, self._waits_s, statistics.mean(in_flight))

    async def _batch(self, client: BatchClient) -> None:
        async with contextlib.aclosing(client.run(self._requests())) as results:
            async for each in results:
                if not each.is_ok:
                    raise RuntimeError(f"{each.failure}: {each.content!r} {each.error}")
                self._tokens += each.told.output_tokens

    async def _beside(self) -> None:
        async with aiohttp.ClientSession(self._url) as session, asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._rng.expovariate(self._rate))
                tasks.create_task(self._ask(session))

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        body = {"input_ids": self._prompt(), "max_new_tokens": 4}
        headers = {"X-Tandem-Timings": "1"}
        async with session.post("/generate", json=body, headers=headers) as response:
            phases = (await response.json())["timings"]["phases"]
        self._waits_s.append(
            sum(phase["duration_s"] for phase in phases if phase["name"] in WAITING)
        )


async def measure(args: argparse.Namespace, url: str) -> tuple[list[Row], list[Row]]:
    """Return rows of the best fixed number, and of the one that follows the queue."""
    print(f"{'at once':12}{'mean':>10}{'tokens/s':>12}{'wait ms':>12}{'longest':>12}{'asked':>8}")

    async def run(number: int | None) -> Row:
        settings = BatchSettings()
        if number is not None:
            settings = BatchSettings(min_concurrency=number, max_concurrency=number)
        load = Load(url, args.seed, args.interactive_rate)
        row = await load.run(str(number or "follows"), settings, args.seconds)
        print(row, flush=True)
        return row

    swept = {number: await run(number) for number in SWEEP}
    most = max(row.speed for row in swept.values())
    best = next(number for number in SWEEP if swept[number].speed >= NEAR * most)
    print(f"the best fixed number is {best}; now turn about")
    fixed, follows = [], []
    for _ in range(ROUNDS):
        follows.append(await run(None))
        fixed.append(await run(best))
    return fixed, follows


def speed(rows: list[Row]) -> float:
    return statistics.mean(row.speed for row in rows)


def wait_ms(rows: list[Row]) -> float:
    return statistics.mean(wait_s for row in rows for wait_s in row.waits_s) * 1000


def main() -> None:
    args = build_parser().parse_args()
    with cluster() as router:
        fixed, follows = asyncio.run(measure(args, router.url))
    print(
        result(
            "interactive_wait_beside_batch",
            wait_ms(follows) / wait_ms(fixed),
            1.0,
            "of the wait beside the best fixed number",
            is_lower_better=True,
        )
    )
    share = speed(follows) / speed(fixed)
    print(result("batch_throughput", share, 0.9, "of the best fixed number"))


if __name__ == "__main__":
    main()
