"""Serving: a disaggregated cluster compared with one colocated engine in the same run.

The benchmark starts `tandem up` and `tandem serve` on free ports (or uses --url and --baseline-url). It drives both
with the same load in alternating order, and prints latencies, throughput and the ratio of throughputs.

The baseline runs once with one thread and once with one thread per core; the ratio uses the faster of them. On a busy
host torch's threads wait for each other at every operation: two threads have been 60 times slower than one. A ratio to
such a slow baseline would not measure disaggregation.
"""

import argparse
import asyncio
import contextlib
import os
from collections.abc import Sequence

from benchmarks.rig import Target, parse, parser_of, result, tandem
from benchmarks.streams import closed_loop
from tandem.tools.bench.report import LoadReport

GOAL_RATIO = 1.0


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = parser_of("serve", "Compare a cluster with `tandem serve` under the same load.")
    parser.epilog = "Flags after -- are passed to all nodes of both, for example: -- --model DIR"
    add = parser.add_argument
    add("--url", default="", help="URL of a running cluster; if not set, start `tandem up`")
    add(
        "--baseline-url",
        default="",
        help="URL of a running baseline; if not set, start `tandem serve`",
    )
    add("--prefills", type=int, default=1, help="number of prefill nodes")
    add("--decodes", type=int, default=1, help="number of decode nodes")
    threads = sorted({1, os.cpu_count() or 1})
    add(
        "--baseline-threads",
        type=int,
        nargs="+",
        default=threads,
        help="numbers of threads; one baseline each",
    )
    add("--concurrency", type=int, nargs="+", default=[1, 8], help="numbers of concurrent requests")
    add(
        "--requests-per-stream",
        type=int,
        default=4,
        help="requests per stream and round",
    )
    add("--input-tokens", type=int, default=128, help="tokens per prompt, random ids")
    add("--output-tokens", type=int, default=64, help="tokens to generate per prompt")
    add("--rounds", type=int, default=1, help="number of rounds; the targets alternate")
    add("node_flags", nargs="*", default=[], help=argparse.SUPPRESS)
    return parser


def one_round(
    args: argparse.Namespace, target: Target, concurrency: int, round_: int
) -> LoadReport:
    """Run one round of load against a target. Prompts differ between rounds."""
    return asyncio.run(
        closed_loop(
            target.url,
            concurrency,
            concurrency * args.requests_per_stream,
            args.input_tokens,
            args.output_tokens,
            seed=1000 * concurrency + round_,
        )
    )


def measure(
    args: argparse.Namespace, targets: Sequence[Target], concurrency: int
) -> dict[str, LoadReport]:
    """Load all targets, in reverse order every second round; print and return the median rounds."""
    rounds: dict[str, list[LoadReport]] = {target.name: [] for target in targets}
    for round_ in range(args.rounds):
        for target in targets if round_ % 2 == 0 else reversed(targets):
            rounds[target.name].append(one_round(args, target, concurrency, round_))
    medians = {}
    for name, served in rounds.items():
        served.sort(key=lambda one: one.output_tokens_per_s)
        one = medians[name] = served[len(served) // 2]
        times = "".join(
            f"{f'{times.p50:.0f}/{times.p90:.0f}/{times.p99:.0f}':>18}"
            for times in (one.ttft_ms, one.itl_ms)
        )
        print(
            f"{name:<22}{concurrency:>8}{one.num_failed:>7}{one.output_tokens_per_s:>10.1f}{times}",
            flush=True,
        )
    return medians


def start_targets(args: argparse.Namespace, stack: contextlib.ExitStack) -> list[Target]:
    """Start the servers that have no URL; return the cluster, then the baselines."""
    counts = ["--prefills", str(args.prefills), "--decodes", str(args.decodes)]
    up = ["up", *counts, *args.node_flags]
    cluster = (
        Target("cluster", args.url) if args.url else stack.enter_context(tandem("cluster", up))
    )
    if args.baseline_url:
        return [cluster, Target("serve", args.baseline_url)]
    serve = ["serve", *args.node_flags, "--num-threads"]
    names = {str(num): f"serve, {num} threads" for num in args.baseline_threads}
    baselines = [stack.enter_context(tandem(name, [*serve, num])) for num, name in names.items()]
    return [cluster, *baselines]


def main() -> None:
    """Run the benchmark."""
    quick = {"baseline_threads": [1], "concurrency": [1], "output_tokens": 8}
    args = parse(build_parser(), {**quick, "requests_per_stream": 1})
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    with contextlib.ExitStack() as stack:
        targets = start_targets(args, stack)
        for target in targets:  # warm up: the first request includes lazy initialization
            one_round(args, target, 1, 999)
        heads = "".join(f"{f'{name} p50/90/99 ms':>18}" for name in ("TTFT", "ITL"))
        print(f"{'server':<22}{'streams':>8}{'failed':>7}{'tokens/s':>10}{heads}")
        last: dict[str, LoadReport] = {}
        for concurrency in args.concurrency:
            last = measure(args, targets, concurrency)
    ours = last.pop(targets[0].name)
    best = max(last.values(), key=lambda one: one.output_tokens_per_s)
    ratio = ours.output_tokens_per_s / max(best.output_tokens_per_s, 1e-9)
    has_failures = ours.num_failed or best.num_failed
    print(result("serve_throughput_vs_colocated", 0.0 if has_failures else ratio, GOAL_RATIO))


if __name__ == "__main__":
    main()
