"""Resources of one router worker at 8, 64 and 512 nodes: CPU time per request, memory, threads and file descriptors.

    python -m benchmarks.scale [--nodes 8 64 512] [--seconds 10] [--quick]

Half of the nodes are prefill nodes and half are decode nodes. All are stubs in one process, on different cores than the
router, and answer at once. The router's CPU time without requests (heartbeats and load reports) is measured first and
subtracted. The goal: CPU time per request and the number of threads are the same at every number of nodes.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.http_load import Plan, drive
from benchmarks.rig import (
    OTHER_CORES,
    OWN_CORE,
    Target,
    cpu_s,
    family,
    parse,
    parser_of,
    result,
    running,
    tandem,
)
from benchmarks.router_latency import NEW_TOKENS, body
from tandem.cli.up import free_ports

CONNECTIONS = 16
# The router connects to its nodes one after the other.
SETTLE_S = 5.0
GOAL_GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class Row:
    """Resources of a router at one number of nodes.

    Attributes:
        cpu_us: CPU time per request, without that of an idle router.
        idle_ms: CPU time per second of an idle router.
        num_threads, num_files: Threads and file descriptors of all its processes.
    """

    num_nodes: int
    cpu_us: float
    idle_ms: float
    memory_mb: float
    num_threads: int
    num_files: int


@contextlib.contextmanager
def router(num_nodes: int) -> Iterator[Target]:
    """Run the router in front of stub nodes."""
    ports = list(map(str, free_ports(num_nodes)))
    command = [sys.executable, "-m", "benchmarks.stubs", "nodes", "--port", *ports]
    flags = ["lb"]
    for prefill, decode in zip(ports[::2], ports[1::2], strict=True):
        flags += ["--prefill", f"http://127.0.0.1:{prefill}", "1"]
        flags += ["--decode", f"http://127.0.0.1:{decode}"]
    with (
        running("nodes", command, int(ports[-1]), OTHER_CORES),
        tandem("lb", flags, OWN_CORE) as target,
    ):
        yield target


def measure(num_nodes: int, seconds: float) -> Row:
    """Measure a router with `num_nodes` nodes."""
    with router(num_nodes) as target:
        time.sleep(SETTLE_S)
        pids = family(target.pid)
        before, began = cpu_s(pids), time.monotonic()
        time.sleep(seconds)
        idle = (cpu_s(pids) - before) / (time.monotonic() - began)
        measured = drive(
            Plan(
                port=target.port,
                path="/generate",
                body=body("/generate", NEW_TOKENS),
                connections=CONNECTIONS,
                duration_s=seconds,
                pids=pids,
            )
        )
        if measured.num_failed or not measured.latencies_ms:
            raise SystemExit(f"{measured.num_failed} requests failed: {measured.errors}")
        return Row(
            num_nodes,
            (measured.cpu_s - idle * seconds) / len(measured.latencies_ms) * 1e6,
            idle * 1e3,
            sum(_memory_bytes(pid) for pid in pids) / 1e6,
            sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids),
            sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids),
        )


def _memory_bytes(pid: int) -> int:
    """Return the proportional set size (PSS) of a process: its private memory and its share of shared memory."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    [line] = [line for line in rollup if line.startswith("Pss:")]
    return int(line.split()[1]) * 1024


def lines(args: argparse.Namespace) -> Iterator[str]:
    """Measure each number of nodes; yield the table, then the results."""
    yield f"{'nodes':>6}{'CPU us/request':>16}{'idle ms/s':>11}{'MB':>7}{'threads':>9}{'files':>7}"
    rows: list[Row] = []
    for num_nodes in args.nodes:
        rows.append(row := measure(num_nodes, args.seconds))
        yield (
            f"{row.num_nodes:>6}{row.cpu_us:>16.0f}{row.idle_ms:>11.1f}{row.memory_mb:>7.0f}"
            f"{row.num_threads:>9}{row.num_files:>7}"
        )
    yield from results(rows)


def results(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the result lines: the ratios of the last row to the first."""
    first, last = rows[0], rows[-1]
    growth = last.cpu_us / first.cpu_us
    threads = last.num_threads / first.num_threads
    yield result("scale_threads", threads, 1.0, is_lower_better=True)
    yield result("scale_cpu_per_request", growth, GOAL_GROWTH, is_lower_better=True)


def main() -> None:
    """Run the benchmark."""
    parser = parser_of("scale", "Measure the resources of a router worker by number of nodes.")
    parser.add_argument(
        "--nodes",
        type=int,
        nargs="+",
        default=[8, 64, 512],
        help="numbers of nodes; each must be even",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each measurement")
    args = parse(parser, {"nodes": [2, 8], "seconds": 1.0})
    for line in lines(args):
        print(line, flush=True)


if __name__ == "__main__":
    main()
