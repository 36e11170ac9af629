"""How much of what a cluster can do is left when twice as much is asked of it.

A router with real processes over simulated nodes, whose devices and not this machine's cores say what they
can do. First a closed loop finds the capacity. Then requests come as a Poisson stream at that rate and at
twice that rate; at the end twice as many without admission. A request is good when its first token came in
time and its answer was whole. With admission each says in its head how long it would wait; without, none
does, and all lines are the nodes'. Goodput counts those that came after the first seconds, beside the higher
of the closed loop's rate and the goodput at capacity. Run from the root: `python -m benchmarks.overload`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
from typing_extensions import override

from benchmarks.processes import Target, free_port, tandem
from benchmarks.verdict import result

GOAL = 0.95
PROMPT_TOKENS, ANSWER_TOKENS = 100, 8
NUM_DECODES, RUNNING_EACH = 2, 8
# Of devices: 25 ms a prompt, and 2 x 8 answers in 0.64 s: decode is what there is too little of. Few and
# long steps, so that the host of the simulation is not what is measured.
PROFILE = {
    "prefill": {"base_ms": 5, "per_token_ms": 0.2},
    "decode": {"base_ms": 76, "per_request_ms": 0.5},
}
# More streams than can run, so that every place is taken again at once.
CLOSED_STREAMS = 2 * NUM_DECODES * RUNNING_EACH
CLOSED_SECONDS = 8.0
# Of each load: until queues are what they stay.
WARM_UP_S = 3.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request.

    Attributes:
        came_s: After the start of the load.
        status: Of HTTP; 0 when the connection broke.
        first_s: To the first token; infinite when there was none.
        is_whole: Whether every token came.
    """

    came_s: float
    status: int
    first_s: float = float("inf")
    is_whole: bool = False
    retry_after_s: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One load, of those that came after the warm-up."""

    name: str
    rate: float
    goodput: float
    num_started: int
    refused: dict[int, int]
    p50_s: float
    p99_s: float
    retry_after_s: tuple[int, int]

    @override
    def __str__(self) -> str:
        refused = ", ".join(f"{count} x {status}" for status, count in self.refused.items())
        least, most = self.retry_after_s
        after = f", Retry-After {least} to {most} s" if most else ""
        return (
            f"{self.name:22}{self.rate:8.1f}{self.goodput:10.2f}{self.num_started:9}"
            f"{self.p50_s * 1000:9.0f}{self.p99_s * 1000:9.0f}   {refused or 'none'}{after}"
        )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, help included."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overload",
        description="Measure goodput at capacity and at twice that.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=12.0, help="counted of each load")
    add("--slo-ttft-ms", type=float, default=1000.0, metavar="MS", help="first token, at most")
    add("--factor", type=float, default=2.0, help="of the capacity, for the overload")
    add("--rounds", type=int, default=2, help="of all loads")
    add("--seed", type=int, default=0, help="of arrivals and prompts")
    return parser


@contextlib.contextmanager
def nodes() -> Iterator[list[str]]:
    """Run simulated nodes; yield the flags by which a router knows them."""
    with (
        tempfile.NamedTemporaryFile("w", suffix=".json") as profile,
        contextlib.ExitStack() as stack,
    ):
        json.dump(PROFILE, profile)
        profile.flush()
        sim = ["--engine", "simulated", "--sim-kv", "none", "--sim-profile", profile.name]
        bootstrap = str(free_port())
        argv = ["prefill", *sim, "--bootstrap-port", bootstrap]
        prefill = stack.enter_context(tandem("p", argv))
        flags = ["--prefill", prefill.url, bootstrap]
        for index in range(NUM_DECODES):
            argv = ["decode", *sim, "--max-running-requests", str(RUNNING_EACH)]
            decode = stack.enter_context(tandem(f"d{index}", argv))
            flags += ["--decode", decode.url]
        yield flags


class Client:
    """Sends requests and keeps how they went."""

    def __init__(self, session: aiohttp.ClientSession, url: str, slo_s: float, seed: int) -> None:
        self._session, self._url, self._slo_s = session, f"{url}/generate", slo_s
        self._rng = random.Random(seed)
        self.outcomes: list[Outcome] = []

    async def ask(self, started: float, *, has_deadline: bool = True) -> None:
        """Send one request and keep its outcome."""
        body = {
            "input_ids": [self._rng.randrange(3, 250) for _ in range(PROMPT_TOKENS)],
            "sampling_params": {"max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
            "stream": True,
        }
        headers = {"X-Request-Timeout-Ms": str(self._slo_s * 1000)} if has_deadline else {}
        sent = time.monotonic()
        outcome = Outcome(sent - started, 0)
        with contextlib.suppress(aiohttp.ClientError):
            async with self._session.post(self._url, json=body, headers=headers) as answer:
                outcome = await _read(answer, sent, started)
        self.outcomes.append(outcome)

    async def closed(self, seconds: float) -> float:
        """Keep every place taken; return the requests a second of the later part."""
        started = time.monotonic()

        async def stream() -> None:
            while time.monotonic() < started + seconds:
                await self.ask(started, has_deadline=False)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLOSED_STREAMS):
                tasks.create_task(stream())
        past_s = time.monotonic() - started
        # Of the answers in the last rounds fewer ran beside each other: by when they came, not ended.
        counted = [o for o in self.outcomes if seconds / 4 <= o.came_s < seconds]
        return sum(o.is_whole for o in counted) / (min(past_s, seconds) - seconds / 4)

    async def opened(self, rate: float, seconds: float, *, has_deadlines: bool) -> None:
        """Send a Poisson stream; return when all are answered."""
        started = time.monotonic()
        due_s = self._rng.expovariate(rate)
        async with asyncio.TaskGroup() as tasks:
            while due_s < seconds:
                await asyncio.sleep(started + due_s - time.monotonic())
                tasks.create_task(self.ask(started, has_deadline=has_deadlines))
                due_s += self._rng.expovariate(rate)


async def _read(answer: aiohttp.ClientResponse, sent: float, started: float) -> Outcome:
    came_s = sent - started
    if answer.status != 200:
        after = int(answer.headers.get("Retry-After", 0))
        return Outcome(came_s, answer.status, retry_after_s=after)
    first_s, last = float("inf"), b""
    async for line in answer.content:
        if line.startswith(b"data: {"):
            first_s = min(first_s, time.monotonic() - sent)
            last = line
    is_whole = b'"completion_tokens":%d' % ANSWER_TOKENS in last and b'"length"' in last
    return Outcome(came_s, 200, first_s, is_whole)


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session without a bound on connections."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as opened:
        yield opened


async def capacity(router: Target, seed: int) -> float:
    """Return the requests a second of a closed loop."""
    async with session() as opened:
        return await Client(opened, router.url, 60.0, seed).closed(CLOSED_SECONDS)


async def load(
    args: argparse.Namespace,
    router: Target,
    name: str,
    rate: float,
    seed: int,
    *,
    has_deadlines: bool = True,
) -> Row:
    """Run one open load."""
    slo_s = args.slo_ttft_ms / 1000
    async with session() as opened:
        client = Client(opened, router.url, slo_s, seed + 1000)
        await client.opened(rate, WARM_UP_S + args.seconds, has_deadlines=has_deadlines)
    counted = [outcome for outcome in client.outcomes if outcome.came_s >= WARM_UP_S]
    return summary(name, rate, counted, slo_s, args.seconds)


def summary(
    name: str, rate: float, counted: Sequence[Outcome], slo_s: float, seconds: float
) -> Row:
    """Sum up one load."""
    first = [o.first_s for o in counted if o.first_s < float("inf")]
    refused: dict[int, int] = {}
    for outcome in counted:
        if outcome.status != 200:
            refused[outcome.status] = refused.get(outcome.status, 0) + 1
    after = [o.retry_after_s for o in counted if o.retry_after_s]
    good = sum(o.is_whole and o.first_s <= slo_s for o in counted)
    p50, p99 = np.percentile(first, [50, 99]) if first else (0.0, 0.0)
    return Row(
        name=name,
        rate=rate,
        goodput=good / seconds,
        num_started=len(first),
        refused=refused,
        p50_s=float(p50),
        p99_s=float(p99),
        retry_after_s=(min(after, default=0), max(after, default=0)),
    )


def measure(args: argparse.Namespace, router: Target, seed: int) -> tuple[float, float]:
    """Run a round of loads and print each; return what can be had, and goodput when more is asked for."""
    most = asyncio.run(capacity(router, seed))
    print(f"capacity, by {CLOSED_STREAMS} streams in a closed loop: {most:.2f} requests/s")
    full = asyncio.run(load(args, router, "at capacity", most, seed))
    print(full, flush=True)
    over = f"at {args.factor:g} x"
    beyond = asyncio.run(load(args, router, over, args.factor * most, seed))
    print(beyond, flush=True)
    # A Poisson stream may have asked for less than its rate: the higher of the two can be had.
    return max(most, full.goodput), beyond.goodput


def measure_without(args: argparse.Namespace, router: Target, rate: float) -> None:
    """Run the overload and print how it went where nobody is refused and nobody says how long to wait."""
    name = f"at {args.factor:g} x, without"
    print(asyncio.run(load(args, router, name, rate, args.seed, has_deadlines=False)), flush=True)


def main() -> None:
    """Run the benchmark."""
    args = build_parser().parse_args()
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    print(
        f"{'load':22}{'asked/s':>8}{'goodput/s':>10}{'started':>9}{'p50 ms':>9}{'p99 ms':>9}   refused"
    )
    with nodes() as flags:
        with tandem("lb", ["lb", *flags]) as router:
            rounds = [measure(args, router, args.seed + number) for number in range(args.rounds)]
        with tandem("lb", ["lb", *flags, "--no-admission"]) as router:
            rate = args.factor * statistics.mean(most for most, _ in rounds)
            measure_without(args, router, rate)
    ratios = [goodput / most for most, goodput in rounds]
    print("each round:", ", ".join(f"{ratio:.3f}" for ratio in ratios))
    print(result("overload-goodput", statistics.mean(ratios), GOAL))


if __name__ == "__main__":
    main()
