"""How well a plan's simulation foretells a real cluster on this machine, and how fast it is.

Two clusters of real processes are asked by the load client of `tandem bench`, over HTTP, as a Poisson stream; the
same requests go through `tandem.plan.simulation`. Compared are p50 and p99 of time to first token and of time
between tokens. What the edge takes of a request is calibrated on some requests one at a time, before the
load and none of it. Run from the root: `python -m benchmarks.plan`.

1. Two prefills and two decodes whose devices only take time: the nodes, their loop, the router and the wire are real.
2. One prefill and one decode of the embedded model, computed by this machine's cores. How long its forwards
   take is fitted to the calibration, of prompts and streams of other sizes than the load's. Each of the two has a
   core, which it shares with the router, the client and whatever else the machine does.

Last, 512 simulated nodes, by the clock.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.mooncake import made_up
from benchmarks.processes import Target, get, tandem
from benchmarks.verdict import result
from tandem.bench.arrivals import arrival_times
from tandem.bench.processes import drive
from tandem.bench.records import ClientPlan, Job, PromptRules, Sample, Server, Turn
from tandem.bench.statistics import gaps
from tandem.engine.profile import DecodeTimes, PrefillTimes, Profile, read_profile
from tandem.plan.seam import BLOCK_TOKENS, Fleet, NodeKind, Outcome, Overheads, PlannedRequest
from tandem.plan.simulation import simulate

GOAL = 0.15
GOAL_LARGE_S = 60.0
# Devices as slow as this leave the cores of a small machine idle most of the time.
PROFILE = Profile(
    prefill=PrefillTimes(base_ms=10, per_token_ms=0.15, per_context_token_ms=0.005),
    decode=DecodeTimes(base_ms=40, per_request_ms=1.0, per_context_token_ms=0.0002),
)
# Prompts are made from the number of a job: the load's are none of the calibration's.
FIRST_JOB = 10_000
# Of the real model: how busy its prefill is to be, and how long a request takes at the edge.
MODEL_LOAD, EDGE_MS = 0.5, 8.0
# A large fleet: its prefills, if nothing were cached, are busy for so much of the time; pages are counted by so many.
LARGE_LOAD, LARGE_PAGE = 0.8, 512
# Between tokens, of a median.
LEAST_STEPS = 6
# Of the embedded model: 30 layers, 3 heads of 64, two bytes, K and V.
KV_BYTES = 2 * 30 * 3 * 64 * 2
LARGE_PROFILE = Path("docs/profiles/llama-70b-8xh100.json")

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Seen:
    """How a load was served, in milliseconds."""

    ttft_ms: Array
    itl_ms: Array

    def points(self) -> dict[str, float]:
        """Return what is compared."""
        return {
            f"{name} p{percent}": float(np.percentile(times, percent))
            for name, times in (("TTFT", self.ttft_ms), ("ITL", self.itl_ms))
            for percent in (50, 99)
        }


def measured(samples: Sequence[Sample]) -> Seen:
    """Sum up what the client saw.

    Raises:
        SystemExit: A request failed: nothing can be compared.
    """
    failed = [sample for sample in samples if sample.failure]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(samples)} requests failed: {failed[0].error}")
    firsts = [sample.times()[0] for sample in samples]
    return Seen(np.array(firsts) * 1e3, np.concatenate([gaps(each) for each in samples]) * 1e3)


def foretold(outcome: Outcome) -> Seen:
    """Sum up what the simulation says."""
    incomplete = [each for each in outcome.requests if not each.is_complete]
    assert not incomplete, incomplete[0].error
    ttfts = [each.ttft_s for each in outcome.requests]
    itls = [each.itls_s for each in outcome.requests]
    return Seen(np.array(ttfts) * 1e3, np.concatenate(itls) * 1e3)


def load(
    seed: int, count: int, rate: float, *, prompt: tuple[int, int], answer: tuple[int, int]
) -> list[Job]:
    """Return requests as they come; every third has two blocks in common with others."""
    rng = random.Random(seed)
    jobs = []
    for index, due_s in enumerate(arrival_times(rate, 1.0, count, seed)):
        turn = Turn(rng.randint(*prompt), rng.randint(*answer))
        group = rng.randrange(4)
        shared = [2 * group, 2 * group + 1] if index % 3 == 0 else []
        jobs.append(Job(index=FIRST_JOB + index, turns=[turn], due_s=due_s, block_ids=shared))
    return jobs


def planned(jobs: Sequence[Job]) -> list[PlannedRequest]:
    """Return the same requests as the simulation takes them."""
    return [
        PlannedRequest(
            arrival_s=job.due_s,
            num_prompt=job.turns[0].input_tokens,
            num_output=job.turns[0].output_tokens,
            blocks=job.block_ids[: job.turns[0].input_tokens // BLOCK_TOKENS],
        )
        for job in jobs
    ]


def ask(target: Target, jobs: Sequence[Job], concurrency: int = 0) -> list[Sample]:
    """Send requests when they are due, or so many at a time; return their samples by when they were due."""
    vocab_size = json.loads(get(f"{target.url}/model_info"))["vocab_size"]
    plan = ClientPlan(
        server=Server(url=target.url, api="native"),
        rules=PromptRules(vocab_size=vocab_size, seed=1),
        jobs=list(jobs),
        concurrency=concurrency,
    )
    samples = asyncio.run(drive([plan])).samples
    return sorted(samples, key=lambda sample: sample.due_s)


def one_by_one(lengths: Sequence[tuple[int, int]], first: int) -> list[Job]:
    """Return requests of these lengths, to be sent one after the other."""
    return [Job(index=first + i, turns=[Turn(*each)]) for i, each in enumerate(lengths)]


def calibrated(fleet: Fleet, jobs: Sequence[Job], samples: Sequence[Sample]) -> Fleet:
    """Return the fleet with what the edge was seen to take of requests that met nobody else."""
    alone = [replace(each, arrival_s=1000.0 * i) for i, each in enumerate(planned(jobs))]
    bare = replace(fleet, overheads=replace(fleet.overheads, edge_s=0.0))
    said = simulate(bare, alone)
    over_s = [
        sample.times()[0] - each.ttft_s for sample, each in zip(samples, said.requests, strict=True)
    ]
    edge_s = max(0.0, statistics.median(over_s))
    print(f"calibrated: the edge takes {edge_s * 1e3:.1f} ms of a request")
    return replace(fleet, overheads=replace(fleet.overheads, edge_s=edge_s))


def compare(name: str, real: Seen, said: Seen) -> list[str]:
    """Print a table; return the verdicts."""
    print(f"\n{name}: {len(real.ttft_ms)} requests, {len(real.itl_ms)} times between tokens")
    print(f"{'':<10} {'cluster':>10} {'plan':>10} {'error':>8}")
    errors = {}
    for point, value in real.points().items():
        plan = said.points()[point]
        errors[point] = plan / value - 1
        print(f"{point:<10} {value:>7.1f} ms {plan:>7.1f} ms {errors[point]:>+8.1%}")
    return [
        result(
            f"{name}_{point.lower().replace(' ', '_')}_error",
            abs(error),
            GOAL,
            is_lower_better=True,
        )
        for point, error in errors.items()
    ]


def with_simulated_devices(args: argparse.Namespace) -> list[str]:
    """Compare two prefills and two decodes that only take time."""
    chunk, pool = 1024, 200_000
    kind = NodeKind(
        name="simulated",
        profile=PROFILE,
        num_tokens=pool,
        kv_bytes_per_token=2,
        link_bytes_per_s=1e9,
        num_layers=1,
        chunked_prefill_size=chunk,
        context_length=8192,
    )
    fleet = Fleet(prefill=kind, num_prefill=2, decode=kind, num_decode=2, policy=args.policy)
    jobs = load(args.seed, args.requests, args.rate, prompt=(64, 2000), answer=(8, 96))
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "profile.json"
        file.write_bytes(msgspec.json.encode(PROFILE))
        flags = (
            f"up --prefills 2 --decodes 2 --policy {args.policy} --engine simulated --sim-kv none"
        )
        flags += f" --sim-profile {file} --max-total-tokens {pool} --chunked-prefill-size {chunk}"
        with tandem("cluster", flags.split()) as target:
            ask(target, one_by_one([(300, 4)] * 4, first=1), 1)
            alone = one_by_one([(200, 12), (700, 12), (1500, 12)] * 4, first=20)
            fleet = calibrated(fleet, alone, ask(target, alone, 1))
            real = measured(ask(target, jobs))
    return compare("simulated_devices", real, foretold(simulate(fleet, planned(jobs))))


@dataclass(slots=True)
class Points:
    """What was seen of a cluster of one pair, to fit a profile to.

    Attributes:
        first_s: (tokens of a prompt, time to first token) of prompts that waited for no other.
        slowest_s: What a prompt of 1,000 tokens takes at most, about.
        step_s: (answers at a time, tokens of all of them, median time between tokens).
    """

    slowest_s: float
    first_s: list[tuple[int, float]] = field(default_factory=list)
    step_s: list[tuple[int, float, float]] = field(default_factory=list)


def look_at(target: Target, points: Points, first: int) -> None:
    """Measure requests one at a time beside an answer, and answers beside prompts that come.

    The two nodes share cores with each other and the router, so neither is measured with the others idle.
    """
    jobs = [Job(index=first, turns=[Turn(160, 120)])]
    lengths, before_s = (200, 400, 700, 1000), 0.0
    for number, length in enumerate(lengths, 1):
        before_s += 1.0 + points.slowest_s * length / lengths[-1]
        jobs.append(Job(index=first + number, turns=[Turn(length, 2)], due_s=before_s))
    jobs += [
        Job(index=first + 20 + i, turns=[Turn(160, 40)], due_s=before_s + points.slowest_s + i)
        for i in range(4)
    ]
    samples = ask(target, jobs)
    points.first_s += [
        (each.prompt_tokens, float(each.times()[0])) for each in samples[1 : 1 + len(lengths)]
    ]
    points.step_s += steps_of(samples)


def steps_of(samples: Sequence[Sample]) -> list[tuple[int, float, float]]:
    """Return the median time between tokens, by how many answers ran at that time."""
    times = [each.times() + each.sent_s for each in samples]
    found: dict[int, list[tuple[float, float]]] = {}
    for mine, sample in zip(times, samples, strict=True):
        # The first gap is the hand-off's, too.
        each_s = np.repeat(mine[1:], np.diff(sample.counts()))
        for at_s, gap_s in zip(each_s[1:], gaps(sample)[1:], strict=True):
            running = [
                each.prompt_tokens + float((those <= at_s).sum())
                for those, each in zip(times, samples, strict=True)
                if those[1] < at_s <= those[-1]
            ]
            found.setdefault(len(running), []).append((sum(running), float(gap_s)))
    return [
        (count, statistics.mean(read for read, _ in seen), statistics.median(s for _, s in seen))
        for count, seen in found.items()
        if len(seen) >= LEAST_STEPS
    ]


def fitted(points: Points, chunk: int) -> tuple[Profile, float]:
    """Return a profile, and what the edge takes; least squares of relative errors."""
    rows, seen = [], []
    for length, first_s in points.first_s:
        starts = range(0, length, chunk)
        rows.append([1.0, len(starts), length, sum(starts)])
        seen.append(first_s * 1e3)
    # What the edge takes and what a chunk takes are hardly told apart: as much as a node's answer to nothing.
    edge_ms = EDGE_MS
    base, token, context = _least_squares(np.array(rows)[:, 1:], np.array(seen) - edge_ms)
    steps = np.array([[1.0, count, read] for count, read, _ in points.step_s])
    step, each, read = _least_squares(steps, np.array([s for *_, s in points.step_s]) * 1e3)
    return Profile(
        prefill=PrefillTimes(base_ms=base, per_token_ms=token, per_context_token_ms=context),
        decode=DecodeTimes(base_ms=step, per_request_ms=each, per_context_token_ms=read),
    ), edge_ms / 1e3


def _least_squares(rows: Array, seen: Array) -> list[float]:
    """Return coefficients that are not negative: those that would be are left out."""
    scaled, used = rows / seen[:, None], list(range(rows.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(scaled[:, used], np.ones(len(seen)), rcond=None)
        if (found >= 0).all():
            out = np.zeros(rows.shape[1])
            out[used] = found
            return [float(each) for each in out]
        del used[int(found.argmin())]


def give_cores(pid: int) -> None:
    """Give the engines below a process a core each, as nodes have their devices to themselves."""
    cores = sorted(os.sched_getaffinity(0))
    for child in below(pid):
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        for number, module in enumerate((b"tandem.prefill.engine", b"tandem.decode.engine")):
            for thread in Path(f"/proc/{child}/task").iterdir() if module in command else ():
                os.sched_setaffinity(int(thread.name), {cores[number % len(cores)]})


def below(pid: int) -> list[int]:
    """Return the processes that a process started, and theirs."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    children = [int(i) for thread in threads for i in (thread / "children").read_text().split()]
    return [*children, *(each for child in children for each in below(child))]


def with_a_model(args: argparse.Namespace) -> list[str]:
    """Compare one prefill and one decode of the embedded model."""
    chunk, pool = 512, 20_000
    flags = f"up --num-threads 1 --max-total-tokens {pool} --chunked-prefill-size {chunk}"
    with tandem("cluster", flags.split()) as target:
        give_cores(target.pid)
        # The first compiles; the last says how far apart others have to be to meet none.
        warm = ask(target, one_by_one([(300, 4), (1000, 4)], first=1), 1)
        points = Points(1.5 * float(warm[-1].times()[0]))
        look_at(target, points, first=10)
        rate = MODEL_LOAD / fitted(points, chunk)[0].prefill.forward_s(chunk, 0)
        prompt, answer = (160, 2 * chunk - 324), (8, 32)
        jobs = load(args.seed, args.model_requests, rate, prompt=prompt, answer=answer)
        samples = ask(target, jobs)
        # Again: what else the machine does changes from one minute to the next.
        look_at(target, points, first=1000)
    profile, edge_s = fitted(points, chunk)
    print(f"\nfitted before and after the load, which is {rate:.2f} requests/s: {profile}")
    kind = NodeKind(
        name="embedded",
        profile=profile,
        num_tokens=pool,
        kv_bytes_per_token=KV_BYTES,
        link_bytes_per_s=1e9,
        num_layers=30,
        chunked_prefill_size=chunk,
        context_length=8192,
        is_overlapped=False,
    )
    overheads = replace(Overheads(), edge_s=edge_s)
    fleet = Fleet(prefill=kind, num_prefill=1, decode=kind, num_decode=1, overheads=overheads)
    said = foretold(simulate(fleet, planned(jobs)))
    return compare("embedded_model", measured(samples), said)


def large(args: argparse.Namespace) -> list[str]:
    """Time a large fleet, which is busy."""
    count, nodes = args.large_requests, args.large_nodes
    profile = read_profile(LARGE_PROFILE)
    sample = made_up(1, 20_000, 1.0, 1e6)
    prefill_s = statistics.mean(profile.prefill.forward_s(each.num_prompt, 0) for each in sample)
    duration_s = count * prefill_s / (nodes // 2 * LARGE_LOAD)
    requests = [
        PlannedRequest(
            arrival_s=each.at_s,
            num_prompt=each.num_prompt,
            num_output=each.num_output,
            blocks=each.blocks,
            session=str(each.session),
        )
        for each in made_up(args.seed, count, duration_s, 10)
    ]
    kind = NodeKind(
        name="large",
        profile=profile,
        num_tokens=1_000_000,
        kv_bytes_per_token=327_680,
        link_bytes_per_s=50e9,
        host_step_s=0.001,
        num_layers=80,
    )
    fleet = Fleet(prefill=kind, num_prefill=nodes // 2, decode=kind, num_decode=nodes // 2)
    began = time.perf_counter(), time.process_time()
    outcome = simulate(fleet, requests, page_size=LARGE_PAGE)
    wall_s, cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
    busy_s = np.array(outcome.busy_s) / duration_s
    seen = foretold(outcome).points()
    print(
        f"\n{nodes} nodes, half of them prefills, {len(requests)} requests in {duration_s:.0f} s of virtual time, "
        f"{sum(each.num_prompt for each in requests) / 1e6:.0f} M prompt and "
        f"{sum(each.num_output for each in requests) / 1e6:.1f} M answer tokens: prefills busy "
        f"{busy_s[: nodes // 2].mean():.0%} of that time, decodes {busy_s[nodes // 2 :].mean():.0%}\n"
        f"simulated in {wall_s:.1f} s by the clock, {cpu_s:.1f} s of one core; "
        + ", ".join(f"{name} {value:.0f} ms" for name, value in seen.items())
    )
    return [result("large_fleet", wall_s, GOAL_LARGE_S, "s", is_lower_better=True)]


def main() -> int:
    """Compare, and print the verdicts; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    parser.add_argument("--policy", default="cache_aware")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-requests", type=int, default=40, help="0: leave the model out")
    parser.add_argument("--large-nodes", type=int, default=512)
    parser.add_argument("--large-requests", type=int, default=8_000, help="0: leave it out")
    args = parser.parse_args()
    lines = with_simulated_devices(args) if args.requests else []
    if args.model_requests:
        lines += with_a_model(args)
    if args.large_requests:
        lines += large(args)
    print("\n" + "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
