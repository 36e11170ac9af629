"""Inter-token latency while long prompts arrive: separate prefill and decode nodes compared with `tandem serve`.

Both run on the same two cores: separate nodes get one core each, `serve` gets both. A few streams generate while
prompts of 2,000 tokens arrive one after the other. The benchmark compares the 99th percentile of the streams'
inter-token latency.
"""

import argparse
import asyncio
import os
import statistics

from benchmarks.rig import Target, parse, parser_of, result, tandem, tandem_pair
from benchmarks.streams import closed_loop
from tandem.tools.bench.report import LoadReport

GOAL_RATIO = 3.0


async def disturbed(args: argparse.Namespace, target: Target, seed: int) -> LoadReport:
    """Return the streams' report while long prompts arrive."""
    seen, _ = await asyncio.gather(
        closed_loop(target.url, args.streams, args.streams, 32, args.output_tokens, seed=seed),
        closed_loop(target.url, 1, args.prompts, args.prompt_tokens, 1, seed=seed + 1000),
    )
    return seen


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(
        "interference",
        "Measure the effect of long prompts on the inter-token latency of running streams.",
    )
    add = parser.add_argument
    add("--streams", type=int, default=8, help="number of running streams")
    add("--output-tokens", type=int, default=256, help="tokens per answer")
    add("--prompt-tokens", type=int, default=2000, help="tokens per long prompt")
    add("--prompts", type=int, default=6, help="number of long prompts, sent one after the other")
    add(
        "--rounds", type=int, default=2, help="number of alternating rounds; the median is reported"
    )
    quick = {"streams": 2, "output_tokens": 16, "prompt_tokens": 200, "prompts": 1, "rounds": 1}
    args = parse(parser, quick)
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    worst: dict[str, list[float]] = {"apart": [], "together": []}
    with (
        tandem_pair(["--num-threads", "1"], "0", "1") as apart,
        tandem("together", ["serve", "--num-threads", "2"]) as together,
    ):
        for round_ in range(args.rounds + 1):
            for target in (apart, together) if round_ % 2 else (together, apart):
                one = asyncio.run(disturbed(args, target, round_))
                if round_:  # the first round warms up
                    worst[target.name].append(one.itl_ms.p99)
                print(
                    f"{target.name:<9} ITL p50 {one.itl_ms.p50:>7.1f} ms  p99 {one.itl_ms.p99:>7.1f} ms"
                    f"  {one.output_tokens_per_s:>7.1f} tokens/s  {one.num_failed} failed",
                    flush=True,
                )
    values = {name: statistics.median(found) for name, found in worst.items()}
    ratio = values["together"] / values["apart"]
    print(result("itl_p99_under_prompts_serve_over_apart", ratio, GOAL_RATIO))


if __name__ == "__main__":
    main()
