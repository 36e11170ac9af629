"""What long prompts do to running answers: prefill and decode apart against `tandem serve`.

On the same two cores: apart has one for each role, `serve` both. A few streams generate while prompts of
2,000 tokens arrive one after the other. What is compared is the 99th percentile of the time between two
tokens of the streams. Run from the root: `python -m benchmarks.interference`.
"""

import argparse
import os
import statistics
import threading

from benchmarks.peers import ours_apart, ours_together
from benchmarks.processes import Target
from benchmarks.serve_load import load
from benchmarks.verdict import result
from benchmarks.vllm_server import MODEL
from tandem.bench.report import LoadReport

GOAL_RATIO = 3.0
VOCAB_SIZE = 40_000


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, help included."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.interference",
        description="Measure how long prompts disturb running answers, apart and together.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--streams", type=int, default=8, help="answers under way")
    add("--output-tokens", type=int, default=256, help="of each answer")
    add("--prompt-tokens", type=int, default=2000, help="of each long prompt")
    add("--prompts", type=int, default=6, help="long prompts, one after the other")
    add("--rounds", type=int, default=2, help="turn about; the median counts")
    return parser


def disturbed(args: argparse.Namespace, target: Target, seed: int) -> LoadReport:
    """Return what the streams saw while the long prompts came."""

    def drive(
        num_requests: int, streams: int, input_tokens: int, output_tokens: int, part: int
    ) -> LoadReport:
        return load(
            target,
            streams,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            num_requests=num_requests,
            vocab_size=VOCAB_SIZE,
            seed=hash((seed, part)),
            model=MODEL,
        )

    long = (args.prompts, 1, args.prompt_tokens, 1, 1)
    disturber = threading.Thread(target=drive, args=long)
    disturber.start()
    seen = drive(args.streams, args.streams, 32, args.output_tokens, 0)
    disturber.join()
    return seen


def main() -> None:
    """Run the benchmark."""
    args = build_parser().parse_args()
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    worst: dict[str, list[float]] = {}
    with ours_apart() as apart, ours_together() as together:
        for round_ in range(args.rounds + 1):
            for target in (apart, together) if round_ % 2 else (together, apart):
                one = disturbed(args, target, round_)
                p50, p99 = one.itl_ms.p50, one.itl_ms.p99
                if round_:  # the first warms up
                    worst.setdefault(target.name, []).append(p99)
                print(
                    f"{target.name:<8} ITL p50 {p50:>7.1f} ms  p99 {p99:>7.1f} ms  "
                    f"{one.output_tokens_per_s:>7.1f} tokens/s  {one.num_failed} failed",
                    flush=True,
                )
    values = {name: statistics.median(found) for name, found in worst.items()}
    ratio = values[together.name] / values[apart.name]
    print(result("itl_p99_under_prompts_serve_over_apart", ratio, GOAL_RATIO))


if __name__ == "__main__":
    main()
