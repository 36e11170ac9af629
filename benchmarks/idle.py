"""Memory of the router's worker, without connections and with many idle ones. The goal is for the memory without.

Clients and gateways keep connections open between requests. The benchmark opens connections to `tandem lb` in front of
stub nodes, and measures the worker's memory and the time of `/health` before and after.
"""

import argparse
import resource
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.edge import edge
from benchmarks.rig import Target, family, get, parse, parser_of, result

GOAL_MB = 150.0
# Files that the benchmark itself needs.
SPARE_FILES = 200
NUM_ANSWERS = 50


def memory_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
    return int(kilobytes) / 1024


def answer_ms(target: Target) -> float:
    """Return the median time of `/health` on a new connection."""
    times = []
    for _ in range(NUM_ANSWERS):
        began_s = time.perf_counter()
        get(f"http://127.0.0.1:{target.port}/health")
        times.append(1000 * (time.perf_counter() - began_s))
    return statistics.median(times)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = parser_of("idle", __doc__)
    parser.add_argument("--connections", type=int, default=10_000, help="idle connections")
    return parse(parser, {"connections": 100}, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the memory and the time of `/health`, without and with the connections."""
    args = arguments(argv)
    needed, (_, limit) = (
        args.connections + SPARE_FILES,
        resource.getrlimit(resource.RLIMIT_NOFILE),
    )
    if limit < needed:
        print(
            f"the limit of open files is too low: raise it with `ulimit -Hn {needed}`",
            file=sys.stderr,
        )
        return 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, limit))
    with edge(0.01) as target, ExitStack() as connections:
        worker = max(family(target.pid))
        before_mb, before_ms = memory_mb(worker), answer_ms(target)
        for _ in range(args.connections):
            address = ("127.0.0.1", target.port)
            connections.enter_context(socket.create_connection(address))
        after_ms, after_mb = answer_ms(target), memory_mb(worker)
    print(f"without connections: {before_mb:.0f} MB, /health in {before_ms:.1f} ms")
    print(f"with {args.connections} idle ones: {after_mb:.0f} MB, /health in {after_ms:.1f} ms")
    print(result("worker_memory", before_mb, GOAL_MB, "MB", is_lower_better=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
