"""What a streamed token costs the edge, in CPU microseconds, beside the bare write that it ends in.

A simulated prefill and decode node (no KV, no forward) stream to `tandem lb`; counted is the CPU time of
all the router's processes over a window in which every stream runs: ZMQ in, detokenising with the
embedded model's byte-level vocabulary, stop check, event, socket. Beside it, in the same run and at the
same pace, the floor: a process that only writes events of the same size to as many sockets. The edge
has a core of its own where there are two. Run from the root: `python -m benchmarks.edge`.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.edge_load import EdgeLoad, EdgeReading
from benchmarks.processes import Target, free_port, running, tandem
from benchmarks.verdict import result

GOAL_RATIO = 1.6
GOAL_OURS_US = 3.5
# What 72 GPUs at 2,000 tokens/s each would stream.
POOL_TOKENS_PER_S = 144_000
# Slow enough that one core carries all the edge and another the engine and the clients.
TOKENS_PER_S = 8_000
MIN_STEP_S = 0.01
CORES = ("0", "1") if (os.cpu_count() or 1) > 1 else ("", "")


@dataclass(frozen=True, slots=True)
class Row:
    """One API at one number of streams: medians of the rounds.

    Attributes:
        edge_us, floor_us: CPU time for each event.
        ratio: Of the two, measured one right after the other.
    """

    api: str
    num_streams: int
    event_bytes: float
    edge_us: float
    floor_us: float
    ratio: float


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, help included."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.edge",
        description="Measure what a streamed token costs the edge beside a bare write.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--streams", type=int, nargs="+", default=[16, 256, 1024, 4096], help="open at once")
    add("--rounds", type=int, default=5, help="how often each is measured, turn about")
    add("--window", type=float, default=3.0, metavar="SECONDS", help="counted in each round")
    return parser


def bodies() -> dict[str, tuple[str, str]]:
    """Return path and body by the name of an API. A stop string is looked for in each."""
    common = {"ignore_eos": True, "temperature": 0, "stop": ["###"]}
    prompt = "Tell me something that takes long to tell."
    native = {"text": prompt, "sampling_params": common | {"max_new_tokens": 4000}, "stream": True}
    chat = {"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": True}
    return {
        "generate": ("/generate", json.dumps(native)),
        "chat": ("/v1/chat/completions", json.dumps(chat | common | {"max_tokens": 4000})),
    }


def family(pid: int) -> list[int]:
    """Return a process and those it started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(each) for task in tasks for each in (task / "children").read_text().split()]
    return [pid, *(one for child in children for one in family(child))]


@contextlib.contextmanager
def nodes(step_s: float) -> Iterator[tuple[Target, str, Target]]:
    """Run simulated nodes; yield prefill, its bootstrap port, decode."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as profile:
        json.dump({"decode": {"base_ms": step_s * 1000}}, profile)
        profile.flush()
        sim = ["--engine", "simulated", "--sim-kv", "none", "--sim-profile", profile.name]
        sim += ["--max-running-requests", "8192", "--max-waiting-requests", "8192"]
        sim += ["--max-total-tokens", str(32 << 20), "--served-model-name", "m"]
        bootstrap = str(free_port())
        with (
            tandem("p", ["prefill", *sim, "--bootstrap-port", bootstrap], CORES[1]) as prefill,
            tandem("d", ["decode", *sim], CORES[1]) as decode,
        ):
            yield prefill, bootstrap, decode


def lb(
    prefill: Target, bootstrap: str, decode: Target
) -> contextlib.AbstractContextManager[Target]:
    """Run the router."""
    flags = ["lb", "--prefill", prefill.url, bootstrap, "--decode", decode.url]
    return tandem("lb", flags, CORES[0])


@contextlib.contextmanager
def floor(step_s: float, event_bytes: int) -> Iterator[Target]:
    """Run the process that only writes."""
    port = free_port()
    pin = ["taskset", "-c", CORES[0]] if CORES[0] else []
    command = [*pin, sys.executable, "-m", "benchmarks.edge_floor"]
    command += [str(port), str(step_s), str(event_bytes)]
    with running("floor", command, port, dict(os.environ)) as target:
        yield target


def measure(
    args: argparse.Namespace, target: Target, call: tuple[str, str], streams: int
) -> EdgeReading:
    """Run the load process against a server."""
    path, body = call
    load = EdgeLoad(
        port=target.port,
        path=path,
        body=body,
        num_streams=streams,
        window_s=args.window,
        pids=family(target.pid),
    )
    pin = ["taskset", "-c", CORES[1]] if CORES[1] else []
    done = subprocess.run(
        [*pin, sys.executable, "-m", "benchmarks.edge_load"],
        input=msgspec.json.encode(load),
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.json.decode(done.stdout, type=EdgeReading)


def event_us(reading: EdgeReading) -> float:
    """Return the CPU time of one event."""
    return reading.cpu_s / reading.num_events * 1e6


def rows(args: argparse.Namespace, streams: int) -> Iterator[Row]:
    """Measure both APIs at one number of streams, and the floor after each."""
    step_s = max(MIN_STEP_S, streams / TOKENS_PER_S)
    with nodes(step_s) as served, lb(*served) as router:
        for api, call in bodies().items():
            edge, bare, sizes = [], [], []
            for _ in range(args.rounds):
                reading = measure(args, router, call, streams)
                edge.append(event_us(reading))
                sizes.append(reading.num_bytes / reading.num_events)
                with floor(step_s, round(sizes[-1])) as target:
                    bare.append(event_us(measure(args, target, call, streams)))
            median = statistics.median
            ratio = median(ours / theirs for ours, theirs in zip(edge, bare, strict=True))
            yield Row(api, streams, median(sizes), median(edge), median(bare), ratio)


def print_results(measured: list[Row]) -> None:
    """Print what was reached: at the worst of all rows."""
    worst = max(measured, key=lambda row: row.ratio)
    ours = max(row.edge_us - row.floor_us for row in measured)
    cores = POOL_TOKENS_PER_S * worst.edge_us / 1e6
    print(
        f"{POOL_TOKENS_PER_S} tokens/s take {cores:.1f} cores of edge workers at the worst row's cost"
    )
    print(result("edge_token_us", ours, GOAL_OURS_US, "us", is_lower_better=True))
    print(result("edge_vs_bare_write", worst.ratio, GOAL_RATIO, is_lower_better=True))


def main() -> None:
    """Run the benchmark."""
    args = build_parser().parse_args()
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    print(f"{'API':10}{'streams':>8}{'bytes':>8}{'edge us':>9}{'floor us':>9}{'ratio':>7}")
    measured = []
    for streams in args.streams:
        for row in rows(args, streams):
            numbers = f"{row.event_bytes:8.0f}{row.edge_us:9.2f}{row.floor_us:9.2f}{row.ratio:7.2f}"
            print(f"{row.api:10}{row.num_streams:8}{numbers}", flush=True)
            measured.append(row)
    print_results(measured)


if __name__ == "__main__":
    main()
