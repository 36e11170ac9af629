"""CPU microseconds of the edge per streamed token, compared with a bare socket write.

Stub nodes stream to `tandem lb`. The benchmark measures the CPU time of all the router's processes in a window in
which all streams run: ZMQ, detokenizing with the embedded model's vocabulary, stop check, event, socket. The floor
is a process that only writes events of the same size to as many sockets, at the same rate and in the same run.
The process under measurement gets a dedicated core if the machine has two.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.http_load import Measured, Plan, drive
from benchmarks.rig import (
    OTHER_CORES,
    OWN_CORE,
    Target,
    family,
    free_port,
    parse,
    parser_of,
    result,
    running,
    tandem,
)

GOAL_RATIO = 1.6
GOAL_OURS_US = 3.5
GOAL_PARSER = 1.3
# The rate of a pool of 72 GPUs at 2,000 tokens/s each.
POOL_TOKENS_PER_S = 144_000
# Low enough that the edge fits on one core, and nodes and clients together on another.
TOKENS_PER_S = 8_000
MIN_STEP_S = 0.01
NUM_NEW = 8000
WARM_EVENTS = 16


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds, for one API and one number of streams.

    Attributes:
        edge_us, floor_us: CPU time per event.
        ratio: Median ratio of the two, measured back to back.
    """

    edge_us: float
    floor_us: float
    ratio: float


def bodies() -> dict[str, tuple[str, str]]:
    """Return the path and body of a request for each API. Each body has a stop string."""
    common = {"ignore_eos": True, "temperature": 0, "stop": ["###"]}
    prompt = "Tell me something that takes long to tell."
    sampling = common | {"max_new_tokens": NUM_NEW}
    native = {"text": prompt, "sampling_params": sampling, "stream": True}
    chat = {"model": "stub", "messages": [{"role": "user", "content": prompt}], "stream": True}
    return {
        "generate": ("/generate", json.dumps(native)),
        "chat": ("/v1/chat/completions", json.dumps(chat | common | {"max_tokens": NUM_NEW})),
    }


@contextlib.contextmanager
def edge(step_s: float, *more_flags: str) -> Iterator[Target]:
    """Run the router in front of stub nodes."""
    ports = [str(free_port()), str(free_port())]
    command = [sys.executable, "-m", "benchmarks.stubs", "nodes", "--port", *ports]
    command += ["--interval-ms", str(step_s * 1000)]
    prefill, decode = (f"http://127.0.0.1:{port}" for port in ports)
    flags = ["lb", "--prefill", prefill, "1", "--decode", decode, *more_flags]
    with (
        running("nodes", command, int(ports[0]), OTHER_CORES),
        tandem("lb", flags, OWN_CORE) as router,
    ):
        yield router


@contextlib.contextmanager
def floor(step_s: float, event_bytes: int) -> Iterator[Target]:
    """Run the process that only writes events."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.stubs", "http", "--port", str(port)]
    command += ["--events", "1000000", "--event-bytes", str(event_bytes)]
    command += ["--interval-ms", str(step_s * 1000)]
    with running("floor", command, port, OWN_CORE) as target:
        yield target


def measure(target: Target, call: tuple[str, str], streams: int, window_s: float) -> Measured:
    """Measure a window in which every stream runs."""
    plan = Plan(
        port=target.port,
        path=call[0],
        duration_s=window_s,
        warm_up_s=0.0,
        num_streams=streams,
        stream_body=call[1],
        warm_events=WARM_EVENTS,
        pids=family(target.pid),
    )
    measured = drive(plan)
    if measured.num_failed or not measured.num_events:
        raise SystemExit(f"{target.name}: streams failed: {measured.errors}")
    return measured


def event_us(measured: Measured) -> float:
    """Return the CPU microseconds per event."""
    return measured.cpu_s / measured.num_events * 1e6


def rows(args: argparse.Namespace, streams: int) -> Iterator[Row]:
    """Measure each API and then its floor, at one number of streams; print the results."""
    step_s = max(MIN_STEP_S, streams / TOKENS_PER_S)
    with edge(step_s) as router:
        for api, call in bodies().items():
            ours, bare, size = [], [], 0
            for _ in range(args.rounds):
                measured = measure(router, call, streams, args.window)
                ours.append(event_us(measured))
                size = round(measured.num_stream_bytes / measured.num_events)
                with floor(step_s, size) as target:
                    bare.append(event_us(measure(target, call, streams, args.window)))
            ratio = statistics.median(one / other for one, other in zip(ours, bare, strict=True))
            row = Row(statistics.median(ours), statistics.median(bare), ratio)
            print(
                f"{api:10}{streams:8}{size:8}{row.edge_us:9.2f}{row.floor_us:9.2f}{ratio:7.2f}",
                flush=True,
            )
            yield row


def parser_ratio(args: argparse.Namespace, streams: int) -> float:
    """Return the cost of a chat's token with the parser, divided by the cost without. Print both."""
    step_s, call = max(MIN_STEP_S, streams / TOKENS_PER_S), bodies()["chat"]
    costs: list[list[float]] = [[], []]
    flags: tuple[list[str], list[str]] = ([], ["--reasoning-parser", args.parser])
    for _ in range(args.rounds):
        for measured, own_flags in zip(costs, flags, strict=True):
            with edge(step_s, *own_flags) as router:
                measured.append(event_us(measure(router, call, streams, args.window)))
    ratio: float = statistics.median(one / other for other, one in zip(*costs, strict=True))
    plain, parsed = map(statistics.median, costs)
    print(f"{args.parser:10}{streams:8}{'':8}{parsed:9.2f}{plain:9.2f}{ratio:7.2f}", flush=True)
    return ratio


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(
        "edge", "Measure the edge's CPU time per streamed token, compared with a bare socket write."
    )
    add = parser.add_argument
    add(
        "--streams",
        type=int,
        nargs="+",
        default=[16, 256, 1024, 4096],
        help="numbers of concurrent streams",
    )
    add("--rounds", type=int, default=5, help="number of rounds; edge and floor alternate")
    add("--window", type=float, default=3.0, metavar="SECONDS", help="measured time per round")
    add("--parser", metavar="NAME", help="compare with and without this --reasoning-parser instead")
    args = parse(parser, {"streams": [16], "rounds": 1, "window": 1.0})
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    if args.parser:
        print(f"{'parser':10}{'streams':>8}{'':8}{'edge us':>9}{'plain us':>9}{'ratio':>7}")
        worst_ratio = max([parser_ratio(args, streams) for streams in args.streams])
        print(result("edge_parser_vs_plain", worst_ratio, GOAL_PARSER, is_lower_better=True))
        return
    print(f"{'API':10}{'streams':>8}{'bytes':>8}{'edge us':>9}{'floor us':>9}{'ratio':>7}")
    measured = [row for streams in args.streams for row in rows(args, streams)]
    worst = max(measured, key=lambda row: row.ratio)
    cores = POOL_TOKENS_PER_S * worst.edge_us / 1e6
    print(f"{POOL_TOKENS_PER_S} tokens/s need {cores:.1f} cores of edge workers at this cost")
    ours = max(row.edge_us - row.floor_us for row in measured)
    print(result("edge_token_us", ours, GOAL_OURS_US, "us", is_lower_better=True))
    print(result("edge_vs_bare_write", worst.ratio, GOAL_RATIO, is_lower_better=True))


if __name__ == "__main__":
    main()
