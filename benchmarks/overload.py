"""How much of what a cluster can do is left when twice as much is asked of it.

A router with real processes over simulated nodes, whose devices and not this machine's cores bound what they can
do. First a closed loop finds the capacity. Then requests come as a Poisson stream at that rate and at twice that
rate; at the end twice as many without admission. A request is good when its first token came in time and its answer
was whole. With admission each asks for a deadline; without, none does, and all queues are the nodes'. Goodput counts
requests sent after the first seconds, beside the higher of the closed loop's rate and the goodput at capacity.
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
from collections import Counter
from collections.abc import Iterator

import aiohttp
import numpy as np

from benchmarks.rig import Target, free_port, parse, parser_of, result, tandem
from benchmarks.streams import Answer, ask, client

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
            flags += ["--decode", stack.enter_context(tandem(f"d{index}", argv)).url]
        yield flags


class Load:
    """Requests to one router, and their answers."""

    def __init__(self, router: Target, seed: int, slo_s: float = 0.0) -> None:
        self._url, self._rng = router.url, random.Random(seed)
        self._headers = {"X-Request-Timeout-Ms": str(slo_s * 1000)} if slo_s else {}
        self.answers: list[Answer] = []

    async def closed(self, seconds: float) -> float:
        """Keep every place taken; return the requests a second of the later part."""
        began_s = time.monotonic()
        async with client() as session:

            async def stream() -> None:
                while time.monotonic() < began_s + seconds:
                    self.answers.append(await self._ask(session))

            await asyncio.gather(*(stream() for _ in range(CLOSED_STREAMS)))
        # Beside the last answers fewer ran: count by when requests were sent, not answered.
        counted = [a for a in self.answers if seconds / 4 <= a.sent_s - began_s < seconds]
        return sum(a.num_tokens == ANSWER_TOKENS for a in counted) / (seconds * 3 / 4)

    async def opened(self, rate: float, seconds: float) -> None:
        """Send a Poisson stream; return when all are answered."""
        began_s, due_s = time.monotonic(), self._rng.expovariate(rate)
        async with client() as session, asyncio.TaskGroup() as tasks:
            sent = []
            while due_s < seconds:
                await asyncio.sleep(began_s + due_s - time.monotonic())
                sent.append(tasks.create_task(self._ask(session)))
                due_s += self._rng.expovariate(rate)
        self.answers += [task.result() for task in sent]

    async def _ask(self, session: aiohttp.ClientSession) -> Answer:
        prompt = [self._rng.randrange(3, 250) for _ in range(PROMPT_TOKENS)]
        return await ask(session, self._url, prompt, ANSWER_TOKENS, headers=self._headers)


def goodput(
    args: argparse.Namespace, router: Target, name: str, rate: float, *, seed: int, slo_s: float
) -> float:
    """Run one open load, print it, and return the good requests a second."""
    load = Load(router, seed, slo_s)
    began_s = time.monotonic()
    asyncio.run(load.opened(rate, args.warm_up + args.seconds))
    counted = [each for each in load.answers if each.sent_s >= began_s + args.warm_up]
    first_ms = [each.ttft_s * 1000 for each in counted if each.event_s] or [0.0]
    limit_s = args.slo_ttft_ms / 1000
    good = sum(a.num_tokens == ANSWER_TOKENS and a.ttft_s <= limit_s for a in counted)
    refused = Counter(each.status for each in counted if each.status != 200)
    after = [each.retry_after_s for each in counted if each.retry_after_s]
    shown = ", ".join(f"{count} x {status}" for status, count in refused.items()) or "none"
    shown += f", Retry-After {min(after)} to {max(after)} s" if after else ""
    p50, p99 = np.percentile(first_ms, [50, 99])
    print(
        f"{name:22}{rate:8.1f}{good / args.seconds:10.2f}{p50:9.0f}{p99:9.0f}   {shown}", flush=True
    )
    return float(good / args.seconds)


def measure(args: argparse.Namespace, router: Target, seed: int) -> tuple[float, float]:
    """Run a round of loads; return what can be had, and goodput when more is asked for."""
    most = asyncio.run(Load(router, seed).closed(args.closed_seconds))
    print(f"capacity, by {CLOSED_STREAMS} streams in a closed loop: {most:.2f} requests/s")
    slo_s, over = args.slo_ttft_ms / 1000, f"at {args.factor:g} x"
    full = goodput(args, router, "at capacity", most, seed=seed, slo_s=slo_s)
    beyond = goodput(args, router, over, args.factor * most, seed=seed, slo_s=slo_s)
    # A Poisson stream may have asked for less than its rate: the higher of the two can be had.
    return max(most, full), beyond


def main() -> None:
    """Run the benchmark."""
    parser = parser_of("overload", "Measure goodput at capacity and at twice that.")
    add = parser.add_argument
    add("--seconds", type=float, default=12.0, help="counted of each load")
    add("--warm-up", type=float, default=3.0, help="seconds before, until queues are steady")
    add("--closed-seconds", type=float, default=8.0, help="of the closed loop")
    add("--slo-ttft-ms", type=float, default=1000.0, metavar="MS", help="first token, at most")
    add("--factor", type=float, default=2.0, help="of the capacity, for the overload")
    add("--rounds", type=int, default=2, help="of all loads")
    add("--seed", type=int, default=0, help="of arrivals and prompts")
    args = parse(parser, {"seconds": 3.0, "warm_up": 1.0, "closed_seconds": 4.0, "rounds": 1})
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    print(f"{'load':22}{'asked/s':>8}{'goodput/s':>10}{'p50 ms':>9}{'p99 ms':>9}   refused")
    with nodes() as flags:
        with tandem("lb", ["lb", *flags]) as router:
            rounds = [measure(args, router, args.seed + number) for number in range(args.rounds)]
        with tandem("lb", ["lb", *flags, "--no-admission"]) as router:
            rate = args.factor * statistics.mean(most for most, _ in rounds)
            goodput(args, router, f"at {args.factor:g} x, without", rate, seed=args.seed, slo_s=0.0)
    ratios = [beyond / most for most, beyond in rounds]
    print("each round:", ", ".join(f"{ratio:.3f}" for ratio in ratios))
    print(result("overload_goodput", statistics.mean(ratios), GOAL))


if __name__ == "__main__":
    main()
