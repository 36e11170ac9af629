"""What conditional disaggregation does to the time to first token, and what that costs running answers.

    python -m benchmarks.conditional [--real] [--sizes 16 64 128 256] [--rounds 40]

One prefill and one decode node with two routers, of which one leaves short prompts to decode (`on`) and one
none (`off`), and `tandem serve` (`colocated`). A prompt at a time goes to each in turn, in an order that is
drawn anew each round; `again` is a second `tandem serve`, so what it differs by is the machine's noise.

    idle      nothing else runs
    answers   streams of answers run on each
    prompts   besides, long prompts keep coming, the same to each
    turn      the second turn of a conversation: all but the last tokens were computed before

The nodes are simulated by default (docs/simulation.md): their forwards take the time of a profile and no core,
so that prefill and decode have a device each on a machine of two cores. `--real` takes the embedded model on
one thread a node. The ratio of each kind of case is that of medians, over all sizes; a ratio over 1.0 counts as
1.0 if `again` differs from `colocated` by as much. The last line has the worst kind.
"""

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec
import numpy as np

from benchmarks.processes import free_port, get, tandem

PROFILE = "docs/profiles/llama-70b-8xh100.json"
SIMULATED = ("--engine", "simulated", "--sim-kv", "none", "--sim-profile", PROFILE)
REAL = ("--num-threads", "1")
GOAL = 1.0
ARMS = ("on", "off", "colocated", "again")
# Of the arms, one of each cluster: what runs beside goes there.
SERVERS = ("off", "colocated", "again")
# Longer than the half second in which routers hear what a node has cached.
THINK_TIME_S = 1.2


@dataclass
class Arms:
    """What is compared.

    Attributes:
        urls: By the name of the arm.
        ttft_ms: By case, then by arm.
        busy: Which arm was asked from when to when, of the case under way.
        gaps: Of answers on the cluster: when a token came, and how long after the one before.
    """

    urls: dict[str, str]
    session: aiohttp.ClientSession
    rng: random.Random
    vocab_size: int
    ttft_ms: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    busy: list[tuple[str, float, float]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)

    def prompt(self, num_tokens: int) -> list[int]:
        """Return a prompt that nobody has seen."""
        return [self.rng.randrange(100, self.vocab_size) for _ in range(num_tokens)]

    async def tokens(self, arm: str, prompt: list[int], num_new: int) -> AsyncIterator[list[int]]:
        """Yield the answer so far, whenever there is more of it."""
        params = {"max_new_tokens": num_new, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "stream": True}
        async with self.session.post(f"{self.urls[arm]}/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = msgspec.json.decode(line[6:])
                    if "output_ids" not in event:
                        raise SystemExit(f"{arm}: {event}")
                    yield event["output_ids"]

    async def answer(self, arm: str, prompt: list[int], num_new: int) -> list[int]:
        """Return a whole answer."""
        return [ids async for ids in self.tokens(arm, prompt, num_new)][-1]

    async def ask(self, case: str, arm: str, prompt: list[int]) -> None:
        """Measure one time to first token."""
        sent_s, first_s = time.perf_counter(), 0.0
        async for _ in self.tokens(arm, prompt, 2):
            first_s = first_s or time.perf_counter()
        times = self.ttft_ms.setdefault(case, {name: [] for name in ARMS})
        times[arm].append((first_s - sent_s) * 1e3)
        self.busy.append((arm, sent_s, time.perf_counter()))

    async def ask_all(self, case: str, num_tokens: int, rounds: int) -> None:
        """Ask every arm in each round, one at a time, in an order of its own."""
        for _ in range(rounds):
            for arm in self.rng.sample(ARMS, len(ARMS)):
                await self.ask(case, arm, self.prompt(num_tokens))

    async def stream_for_ever(self, arm: str) -> None:
        """Keep one answer running; note the gaps of those on the cluster."""
        while True:
            last_s = 0.0
            async for _ in self.tokens(arm, self.prompt(32), 400):
                now_s = time.perf_counter()
                if last_s and arm == "off":
                    self.gaps.append((now_s, (now_s - last_s) * 1e3))
                last_s = now_s

    async def prompt_for_ever(self, num_tokens: int, pause_s: float) -> None:
        """Keep sending a long prompt to all at the same time."""
        while True:
            prompt = self.prompt(num_tokens)
            await asyncio.gather(*(self.answer(arm, prompt, 1) for arm in SERVERS))
            await asyncio.sleep(pause_s)

    def gaps_by_arm(self) -> dict[str, list[float]]:
        """Return the gaps that ended while an arm was asked; `quiet` when none on the cluster was."""
        found: dict[str, list[float]] = defaultdict(list)
        ends = np.array([end for _, _, end in self.busy])
        for at_s, gap_ms in self.gaps:
            index = int(np.searchsorted(ends, at_s))
            if index < len(self.busy):
                arm, start_s, _ = self.busy[index]
                is_asked = arm in ("on", "off") and start_s <= at_s
                found[arm if is_asked else "quiet"].append(gap_ms)
        return found


@contextlib.asynccontextmanager
async def beside(*jobs: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run jobs that have no end beside the block."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        await asyncio.sleep(0.5)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def turns(arms: Arms, args: argparse.Namespace) -> None:
    """Measure second turns: the first ones of all arms before, as long ago as people think."""
    told: list[tuple[str, list[int]]] = []
    for _ in range(args.rounds):
        for arm in arms.rng.sample(ARMS, len(ARMS)):
            prompt = arms.prompt(args.history)
            told.append((arm, prompt + await arms.answer(arm, prompt, 32)))
    await asyncio.sleep(THINK_TIME_S)
    for arm, history in told:
        await arms.ask("turn", arm, history + arms.prompt(32))


async def measure(arms: Arms, args: argparse.Namespace) -> None:
    """Measure all cases."""
    for arm in ARMS:  # what is made at the first use
        await arms.answer(arm, arms.prompt(max(args.sizes)), 8)
    for size in args.sizes:
        await arms.ask_all(f"idle {size}", size, args.rounds)
    print("idle measured", flush=True)
    streams = [arms.stream_for_ever(arm) for arm in SERVERS * args.streams]
    async with beside(*streams):
        arms.busy.clear()
        arms.gaps.clear()
        for size in args.sizes:
            await arms.ask_all(f"answers {size}", size, args.rounds)
        print_gaps(arms)
        async with beside(arms.prompt_for_ever(args.long, args.pause_ms / 1e3)):
            for size in args.sizes:
                await arms.ask_all(f"prompts {size}", size, args.rounds)
    print("beside answers and prompts measured", flush=True)
    await turns(arms, args)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile."""
    return float(np.percentile(values, percent))


def print_gaps(arms: Arms) -> None:
    """Print what prompts did to the answers that ran on the cluster."""
    print("time between tokens of the cluster's answers, ms    p50      p99")
    names = {
        "quiet": "no prompt",
        "off": "while a prompt is handed off",
        "on": "while a prompt is computed on decode",
    }
    gaps = arms.gaps_by_arm()
    for name, words in names.items():
        if gaps[name]:
            p50, p99 = percentile(gaps[name], 50), percentile(gaps[name], 99)
            print(f"  {words:<44}{p50:>9.2f}{p99:>9.2f}", flush=True)


def print_times(arms: Arms) -> None:
    """Print all cases."""
    heads = "".join(f"{name + ' p50/p99':>20}" for name in ARMS)
    print(f"{'TTFT, ms':<14}{heads}")
    for case, times in arms.ttft_ms.items():
        cells = "".join(
            f"{percentile(times[arm], 50):>12.2f} {percentile(times[arm], 99):>7.1f}"
            for arm in ARMS
        )
        print(f"{case:<14}{cells}")


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of one kind of case, over all sizes: medians over those of both measures of `colocated`.

    Attributes:
        noise: What `again` and `colocated` differ by, at least 1.
    """

    kind: str
    on: float
    off: float
    noise: float

    @property
    def is_reached(self) -> bool:
        """Whether `on` is no worse than `colocated`, as far as can be told."""
        return self.on <= max(GOAL, self.noise)


def ratios(arms: Arms) -> list[Ratio]:
    """Return the geometric means over the sizes of each kind."""
    logs: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for case, times in arms.ttft_ms.items():
        base = statistics.median(times["colocated"] + times["again"])
        medians = {arm: statistics.median(times[arm]) for arm in ARMS}
        of_arms = (medians["on"] / base, medians["off"] / base)
        logs[case.split()[0]].append(
            tuple(np.log((*of_arms, medians["again"] / medians["colocated"])))
        )
    means = {kind: np.mean(each, axis=0) for kind, each in logs.items()}
    return [
        Ratio(kind, float(np.exp(on)), float(np.exp(off)), float(np.exp(abs(noise))))
        for kind, (on, off, noise) in means.items()
    ]


@contextlib.contextmanager
def servers(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Run the nodes, both routers and `tandem serve`; yield the arms' URLs."""
    flags = [*(REAL if args.real else SIMULATED), *args.node_flags]
    bootstrap = str(free_port())
    with (
        tandem("prefill", ["prefill", *flags, "--bootstrap-port", bootstrap]) as prefill,
        tandem("decode", ["decode", *flags, *args.decode_flags]) as decode,
        tandem("colocated", ["serve", *flags]) as colocated,
        # A process of its own, so that each is asked as often, and is as warm.
        tandem("again", ["serve", *flags]) as again,
    ):
        lb = ["lb", "--prefill", prefill.url, bootstrap, "--decode", decode.url]
        on_flags = [] if args.threshold is None else ["--local-prefill-threshold", args.threshold]
        with (
            tandem("on", [*lb, *on_flags]) as on,
            tandem("off", [*lb, "--local-prefill-threshold", "0"]) as off,
        ):
            urls = {"on": on.url, "off": off.url}
            yield urls | {"colocated": colocated.url, "again": again.url}


async def run(args: argparse.Namespace, urls: dict[str, str]) -> None:
    """Measure and report."""
    size: int = msgspec.json.decode(get(f"{urls['colocated']}/model_info"))["vocab_size"]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        arms = Arms(urls, session, random.Random(args.seed), size)
        await measure(arms, args)
    print_times(arms)
    print(f"{'to colocated':<14}{'on':>8}{'off':>8}{'noise':>8}")
    found = ratios(arms)
    for each in found:
        print(f"{each.kind:<14}{each.on:>8.3f}{each.off:>8.3f}{each.noise:>8.3f}")
    print(f"load average at the end {os.getloadavg()}")
    worst = max(found, key=lambda each: each.on / max(GOAL, each.noise))
    print(f"the worst: {worst.kind}, with {worst.noise:.3f} of noise")
    verdict = "reached" if all(each.is_reached for each in found) else "short"
    print(f"result: conditional-ttft {worst.on:.3g} ratio-to-colocated (goal {GOAL}) {verdict}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, help included."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conditional",
        description=(__doc__ or "").splitlines()[0],
        epilog="Flags after -- go to every node, such as: -- --chunked-prefill-size 2048",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--real", action="store_true", help="the embedded model instead of a profile's times")
    add("--sizes", type=int, nargs="+", default=[16, 64, 128, 256], help="tokens of short prompts")
    add("--rounds", type=int, default=40, help="of each case; in each, every arm is asked once")
    add("--streams", type=int, default=4, help="answers that run beside, on each")
    add("--long", type=int, default=2000, help="tokens of long prompts")
    add("--pause-ms", type=int, default=50, help="between one long prompt and the next")
    add("--history", type=int, default=512, help="tokens of a conversation's first prompt")
    add("--threshold", default=None, help="--local-prefill-threshold of `on`; nothing: the default")
    add("--decode-flags", nargs="*", default=[], help=argparse.SUPPRESS)
    add("--seed", type=int, default=0, help="of the prompts and orders")
    add("node_flags", nargs="*", default=[], help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Run the benchmark."""
    args = build_parser().parse_args()
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}", flush=True)
    with servers(args) as urls:
        asyncio.run(run(args, urls))


if __name__ == "__main__":
    main()
