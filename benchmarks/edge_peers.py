"""What passing a streamed token on costs routers of SGLang's, beside the whole of our edge.

`tandem lb`, sglang-router and SGLang's mini load balancer, one after the other, each on a core of its own
in front of the same simulated prefill and decode nodes. Ours takes ids over our wire, detokenises and makes
the events; theirs pass on events that the nodes made (which cost the node what they cost our edge).
Run from the root: `python -m benchmarks.edge_peers --peers-python DIR/bin/python`, of an environment
with sglang-router and what its mini load balancer wants: aiohttp, fastapi, orjson, uvicorn.
"""

import argparse
import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.edge import CORES, MIN_STEP_S, bodies, event_us, lb, measure, nodes
from benchmarks.processes import Target, free_port, running
from benchmarks.routers import Missing, program_of
from benchmarks.verdict import result

# Theirs over ours.
GOAL_MINI_LB, GOAL_RUST = 5.0, 1.0
# Passing a stream on takes the mini load balancer so long that more would not come through a core.
TOKENS_PER_S = 3_000


@dataclass(frozen=True, slots=True)
class Nodes:
    """A prefill and a decode node that serve."""

    prefill: Target
    bootstrap_port: str
    decode: Target


Start = Callable[[Nodes], contextlib.AbstractContextManager[Target]]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, help included."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.edge_peers",
        description="Measure what a streamed token costs our edge and routers of SGLang's.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--peers-python", type=Path, default=None, help="of an environment with sglang-router")
    add("--streams", type=int, default=256, help="open at once")
    add("--rounds", type=int, default=3, help="how often each is measured, turn about")
    add("--window", type=float, default=4.0, metavar="SECONDS", help="counted in each round")
    return parser


@contextlib.contextmanager
def ours(given: Nodes) -> Iterator[Target]:
    """Run `tandem lb`."""
    with lb(given.prefill, given.bootstrap_port, given.decode) as target:
        yield target


def sglang(python: Path | None, *flags: str) -> Start:
    """Return what runs a router of the package sglang-router."""

    @contextlib.contextmanager
    def start(given: Nodes) -> Iterator[Target]:
        port, metrics = free_port(), free_port()
        pin = ["taskset", "-c", CORES[0]] if CORES[0] else []
        command = [
            *(*pin, program_of(python, "python", "sglang_router"), "-m"),
            *("sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
            *("--pd-disaggregation", *flags, "--prefill", given.prefill.url),
            *(given.bootstrap_port, "--decode", given.decode.url, "--log-level", "error"),
            *("--prometheus-port", str(metrics), "--prometheus-host", "127.0.0.1"),
        ]
        with running("router", command, port, dict(os.environ)) as target:
            yield target

    return start


def measure_all(args: argparse.Namespace, starts: dict[str, Start]) -> dict[str, float]:
    """Return CPU microseconds for each event of each router that is there: medians."""
    step_s = max(MIN_STEP_S, args.streams / TOKENS_PER_S)
    found: dict[str, list[float]] = {}
    with nodes(step_s) as (prefill, bootstrap, decode):
        for _ in range(args.rounds):
            for name, start in starts.items():
                try:
                    with start(Nodes(prefill, bootstrap, decode)) as target:
                        reading = measure(args, target, bodies()["generate"], args.streams)
                except Missing as missing:
                    print(f"{name}: left out; {missing}")
                    continue
                found.setdefault(name, []).append(event_us(reading))
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    """Run the benchmark."""
    args = build_parser().parse_args()
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    starts = {
        "tandem lb": ours,
        "sglang-router": sglang(args.peers_python, "--policy", "round_robin"),
        "mini load balancer": sglang(args.peers_python, "--mini-lb", "--policy", "random"),
    }
    measured = measure_all(args, starts)
    for name, each in measured.items():
        print(f"{name:20}{each:8.2f} us of CPU for each event, {args.streams} streams")
    own = measured["tandem lb"]
    for name, goal in (("sglang-router", GOAL_RUST), ("mini load balancer", GOAL_MINI_LB)):
        if name in measured:
            label = name.replace(" ", "_").replace("-", "_")
            print(result(f"edge_vs_{label}", measured[name] / own, goal))


if __name__ == "__main__":
    main()
