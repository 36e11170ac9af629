"""Serving, measured: a disaggregated cluster against one colocated engine, in the same run.

Starts `tandem up` and `tandem serve` on free ports (or takes --url and --baseline-url), drives both
with the same load, one after the other in alternating order, and
prints latencies, throughput and their ratio. Run from the root: `python -m benchmarks.serve`.

The baseline is run with one thread and with one for each core, and the ratio is to the better: with
a busy neighbour torch's threads wait for each other at every operation, and two of them were seen to
be 60 times slower than one. A ratio to that would say nothing of disaggregation.
"""

import argparse
import contextlib
import os
from collections.abc import Sequence

import msgspec

from benchmarks.processes import Target, get, tandem
from benchmarks.serve_load import load, table
from tandem.bench.report import LoadReport

GOAL_RATIO = 1.0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, help included."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve",
        description="Measure a disaggregated cluster against `tandem serve` under the same load.",
        epilog="Flags after -- go to every node of both, such as: -- --model DIR --dtype bfloat16",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="", help="of a running cluster, instead of starting `tandem up`")
    add("--baseline-url", default="", help="of a running baseline, not to start `tandem serve`")
    add("--prefills", type=int, default=1, help="prefill nodes of the cluster")
    add("--decodes", type=int, default=1, help="decode nodes of the cluster")
    add("--detokenizers", type=int, default=1, help="edge workers of the cluster's router")
    add(
        "--baseline-threads",
        type=int,
        nargs="+",
        default=sorted({1, os.cpu_count() or 1}),
        help="torch threads of each baseline; the ratio is to the best",
    )
    add("--concurrency", type=int, nargs="+", default=[1, 8], help="requests open at once")
    add("--requests-per-stream", type=int, default=4, help="requests of a round: times concurrency")
    add("--input-tokens", type=int, default=128, help="random ids in each prompt")
    add("--output-tokens", type=int, default=64, help="generated for each prompt")
    add("--rounds", type=int, default=1, help="how often both are measured, turn about")
    add("--seed", type=int, default=0, help="of the prompts")
    add("node_flags", nargs="*", default=[], help=argparse.SUPPRESS)
    return parser


def vocab_size(target: Target) -> int:
    """Ask a server for the size of its model's vocabulary."""
    size: int = msgspec.json.decode(get(f"{target.url}/model_info"))["vocab_size"]
    return size


def one_round(
    args: argparse.Namespace, target: Target, concurrency: int, round_: int
) -> LoadReport:
    """Drive a target once. Prompts differ between rounds."""
    return load(
        target,
        concurrency,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        num_requests=concurrency * args.requests_per_stream,
        vocab_size=args.vocab_size,
        seed=hash((args.seed, concurrency, round_)),
    )


def measure(args: argparse.Namespace, targets: Sequence[Target]) -> list[tuple[str, LoadReport]]:
    """Drive all targets at each concurrency, in an order that turns with each round."""
    reports = []
    for concurrency in args.concurrency:
        rounds: dict[str, list[LoadReport]] = {target.name: [] for target in targets}
        for round_ in range(args.rounds):
            for target in targets if round_ % 2 == 0 else reversed(targets):
                rounds[target.name].append(one_round(args, target, concurrency, round_))
        for name, of_target in rounds.items():
            # The median round by throughput: the machine may be shared and noisy.
            of_target.sort(key=lambda one: one.output_tokens_per_s)
            reports.append((name, of_target[len(of_target) // 2]))
    return reports


def print_result(reports: Sequence[tuple[str, LoadReport]], cluster: Target) -> None:
    """Print the table, and the ratio to the best baseline at the highest load as the last line."""
    print(table(reports))
    for name, one in reports:
        if one.num_failed:
            print(f"{one.num_failed} requests failed at {name}, {one.concurrency} streams")
    highest = max(one.concurrency for _, one in reports)
    last = {name: one for name, one in reports if one.concurrency == highest}
    ours = last.pop(cluster.name)
    best_name, best = max(last.items(), key=lambda each: each[1].output_tokens_per_s)
    print(f"{highest} streams; the best baseline is {best_name}; load average {os.getloadavg()}")
    best_speed = best.output_tokens_per_s
    ratio = ours.output_tokens_per_s / best_speed if best_speed else 0.0
    is_reached = ratio >= GOAL_RATIO and not ours.num_failed and not best.num_failed
    verdict = "reached" if is_reached else "short"
    print(f"result: serve_throughput_vs_colocated {ratio:.3f} ratio (goal {GOAL_RATIO}) {verdict}")


def start_targets(args: argparse.Namespace, stack: contextlib.ExitStack) -> list[Target]:
    """Start what was not given by its URL; return the cluster, then the baselines."""
    counts = ["--prefills", str(args.prefills), "--decodes", str(args.decodes)]
    up = ["up", *counts, "--detokenizers", str(args.detokenizers), *args.node_flags]
    cluster = (
        Target("cluster", args.url) if args.url else stack.enter_context(tandem("cluster", up))
    )
    if args.baseline_url:
        return [cluster, Target("colocated", args.baseline_url)]
    serve = ["serve", *args.node_flags, "--num-threads"]
    baselines = [
        stack.enter_context(tandem(f"colocated-{n}-threads", [*serve, str(n)]))
        for n in args.baseline_threads
    ]
    return [cluster, *baselines]


def main() -> None:
    """Run the benchmark."""
    args = build_parser().parse_args()
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    with contextlib.ExitStack() as stack:
        targets = start_targets(args, stack)
        args.vocab_size = vocab_size(targets[0])
        for target in targets:  # a first request pays for what is made lazily
            one_round(args, target, 1, -1)
        print_result(measure(args, targets), targets[0])


if __name__ == "__main__":
    main()
