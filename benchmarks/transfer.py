"""The rate of page transfers between two processes, compared with the limits of memory and of a socket.

The limits are measured in the same run: memcpy on one core, one bare TCP socket (sendall and recv_into, without framing),
and the NIXL and UCX libraries without our transports.

    python -m benchmarks.transfer [--size-mib 512] [--rounds 7] [--tp] [--quick]

*contiguous* is one copy, *pages* are random pages of 2 MiB (16 tokens of Llama-3-8B in bf16, so 512 MiB is a prompt of 4,096
tokens), and *scattered* are random blocks of 64 KiB. Hashes verify the result. The rounds of all cases are interleaved, so
that load of the host affects all of them; the table shows medians. CPU-s/GB counts both processes. The ratio in a result
line is the lowest over the patterns. *checksum* is `--verify-kv always` at one end; each end hashes every page once.

`--tp` adds transfers between nodes whose `--tp` differs by a factor of two. A rank then moves half of the heads: 64 slices of
16 KiB per page. The result lines compare them with whole pages for each transport.
"""

import argparse
import hashlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np

from benchmarks.bare_transfer import BARE
from benchmarks.rig import parse, parser_of, result
from tandem.kvtransfer.checksum import page_sums
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import CopyPlan, HeadRange, PagedTokens, plan_copies
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.kvtransfer.transports.registry import transports
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

ROOM = Room(1)
BLOCK_BYTES, PAGE_BYTES = 64 << 10, 2 << 20
PATTERNS = ("contiguous", "pages", "scattered")
TP_PATTERNS = ("tp 2 to 1", "tp 1 to 2")
# Transports that are measured only if their libraries are installed.
LIBRARIES = {"nixl": "nixl_cu12", "ucx": "ucxx", "mooncake": "tandem_mooncake"}
NAMES = ("shm", "tcp", "nccl", *(name for name in LIBRARIES if find_spec(LIBRARIES[name])))
DIRECT = {BARE[name].name: BARE[name] for name in NAMES if name in BARE}
NUM_LATENCIES = 200


@dataclass(frozen=True)
class Sample:
    """One round of one case."""

    gigabytes_per_s: float
    cpu_s_per_gigabyte: float


class FarEnd:
    """The receiving process and the connection to it. It reads queries from stdin, one per line."""

    def __init__(self, name: str, pool_bytes: int, region: MemoryRegion) -> None:
        command = [sys.executable, "-m", "benchmarks.transfer", "--listen", name, str(pool_bytes)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        offer = msgspec.json.decode(self._read(), type=TransportOffer)
        self.connection = _transport(name).connect(offer, region)

    def query(self, query: str) -> str:
        """Send a query; return the reply. `cpu`: its CPU seconds; `hash`: the hash of its pool."""
        assert self._child.stdin is not None
        self._child.stdin.write(query + "\n")
        self._child.stdin.flush()
        return self._read()

    def cpu_s(self) -> float:
        """Return the CPU seconds that the far end has used."""
        return float(self.query("cpu"))

    def halt(self) -> None:
        """Stop the process, so that it uses no CPU time, not even for polling."""
        self._child.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue the process."""
        self._child.send_signal(signal.SIGCONT)

    def measure(self, plan: CopyPlan) -> Sample:
        """Measure a write while all other far ends are halted."""
        self.go_on()
        write = partial(self.connection.write, ROOM, plan)
        sample = measure(write, self.cpu_s, plan.total_bytes)
        self.halt()
        return sample

    def close(self) -> None:
        """Close the connection and end the process."""
        self.connection.close()
        self._child.communicate("end\n")

    def _read(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()


def listen(name: str, pool_bytes: int) -> None:
    """Run the far end until the line `end`."""
    with MemoryRegion.shared(pool_bytes, "bench") as region, ExitStack() as ending:
        print(_open(name, region, ending), flush=True)
        for line in sys.stdin:
            if line == "end\n":
                break
            answer = time.process_time() if line == "cpu\n" else digest(region)
            print(answer, flush=True)


def _open(name: str, region: MemoryRegion, ending: ExitStack) -> str:
    """Start a listener that permits writes to the whole region; return its offer as JSON."""
    num_pages = region.size_bytes // BLOCK_BYTES
    listener = _transport(name).listen(Pool.packed(region, BLOCK_BYTES, num_pages))
    ending.callback(listener.close)
    admission = listener.admit("127.0.0.1")
    listener.permit(admission.peer, ROOM, range(num_pages))
    return msgspec.json.encode(admission.offer).decode()


def _transport(name: str) -> Any:
    return DIRECT[name]() if name in DIRECT else transports(name, TransportConfig())[0]


def digest(region: MemoryRegion) -> str:
    return hashlib.blake2b(region.buffer).hexdigest()


def make_plans(size_bytes: int, pool_bytes: int) -> dict[str, CopyPlan]:
    """Return the plans: one copy of `size_bytes`, and as many bytes in random pages and blocks."""
    zero, whole = np.zeros(1, np.int64), np.array([size_bytes], np.int64)
    return {
        "contiguous": CopyPlan(zero, zero, whole),
        "pages": _random_plan(size_bytes, pool_bytes, PAGE_BYTES),
        "scattered": _random_plan(size_bytes, pool_bytes, BLOCK_BYTES),
    }


def _random_plan(size_bytes: int, pool_bytes: int, unit_bytes: int) -> CopyPlan:
    rng = np.random.default_rng(0)
    num_units, num_places = size_bytes // unit_bytes, pool_bytes // unit_bytes
    begin, to = (rng.permutation(num_places)[:num_units] * unit_bytes for _ in range(2))
    return CopyPlan(begin, to, np.full(num_units, unit_bytes, np.int64))


def make_tp_plans(size_bytes: int, pool_bytes: int) -> dict[str, CopyPlan]:
    """Return the plans of one rank for --tp 2 to 1 and 1 to 2. Each moves half of `size_bytes`."""
    rng = np.random.default_rng(0)
    num_pages = size_bytes // PAGE_BYTES
    whole, half = (
        KVLayout(pool_bytes // PAGE_BYTES * tp, 16, 32, 8 // tp, 128, "bfloat16", 2)
        for tp in (1, 2)
    )
    one, other = (
        PagedTokens(layout, rng.permutation(layout.num_pages)[:num_pages].tolist())
        for layout in (whole, half)
    )
    tokens = range(one.end_token)
    return {
        "tp 2 to 1": plan_copies(other, one, tokens, HeadRange(0, 4, 4)),
        "tp 1 to 2": plan_copies(one, other, tokens, HeadRange(4, 0, 4)),
    }


def hash_pages(plan: CopyPlan, region: MemoryRegion) -> None:
    """Compute the checksums of the pages that a plan of whole pages reads."""
    layout = KVLayout(region.size_bytes // PAGE_BYTES, 16, 32, 8, 128, "bfloat16", 2)
    pages = PagedTokens(layout, (plan.source_offset // PAGE_BYTES).tolist())
    page_sums(region, pages, pages, pages.end_token)


def copy_here(plan: CopyPlan, source: MemoryRegion, destination: MemoryRegion) -> None:
    """Copy a plan within this process with memcpy, the limit of the transports."""
    begin, to = source.array(), destination.array()
    for at, there, size in plan.copies():
        to[there : there + size] = begin[at : at + size]


class BareSocket:
    """A bare TCP socket, the limit of `tcp`, to a child process that receives into memory and acknowledges."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        with socket.create_server(("127.0.0.1", 0)) as server:
            command = [sys.executable, "-m", "benchmarks.transfer", "--drain"]
            port = server.getsockname()[1]
            self._child = subprocess.Popen([*command, str(port), str(size_bytes)])
            self._socket, _ = server.accept()

    def write(self, source: MemoryRegion) -> None:
        """Send the first bytes of `source`; return once the child has received all."""
        self._socket.sendall(source.buffer[: self._size_bytes])
        self._far_cpu_s = float(self._socket.recv(64))

    def cpu_s(self) -> float:
        """Return the child's CPU seconds at its last acknowledgement."""
        return self._far_cpu_s

    def close(self) -> None:
        """Close the socket, which ends the child."""
        self._socket.close()
        self._child.wait()


def drain(port: int, size_bytes: int) -> None:
    """Run the far end of a bare socket until it is closed."""
    with (
        MemoryRegion.private(size_bytes) as region,
        socket.create_connection(("127.0.0.1", port)) as peer,
    ):
        while True:
            num_read = 0
            while num_read < size_bytes:
                num_new = peer.recv_into(region.buffer[num_read:size_bytes])
                if not num_new:
                    return
                num_read += num_new
            peer.send(str(time.process_time()).encode())


def measure(write: Callable[[], None], far_cpu_s: Callable[[], float], size_bytes: int) -> Sample:
    cpu_s = -time.process_time() - far_cpu_s()
    start_s = time.perf_counter()
    write()
    elapsed_s = time.perf_counter() - start_s
    cpu_s += time.process_time() + far_cpu_s()
    return Sample(size_bytes / elapsed_s / 1e9, cpu_s / size_bytes * 1e9)


def check(far: FarEnd, last: CopyPlan, source: MemoryRegion, expected: MemoryRegion) -> None:
    """Apply the `last` plan to `expected`. Exit with an error unless the far end's pool has the same content."""
    copy_here(last, source, expected)
    if far.query("hash") != digest(expected):
        raise SystemExit("the received bytes differ from the sent bytes")


Samples = dict[tuple[str, str], list[Sample]]


def run(size_bytes: int, num_rounds: int, *, with_tp: bool) -> tuple[Samples, dict[str, float]]:
    """Return the samples by (transport, pattern), and the time in µs to copy one page over shm and by memcpy."""
    pool_bytes = size_bytes + size_bytes // 2
    plans = make_plans(size_bytes, pool_bytes)
    plans |= make_tp_plans(size_bytes, pool_bytes) if with_tp else {}
    samples: Samples = {}
    last = [*plans.values()][-1]
    with MemoryRegion.shared(pool_bytes) as source, MemoryRegion.shared(pool_bytes) as here:
        rng = np.random.default_rng(1)
        source.array().view(np.uint64)[:] = rng.integers(0, 2**63, pool_bytes // 8, np.uint64)
        far_ends = {name: FarEnd(name, pool_bytes, source) for name in (*NAMES, *DIRECT)}
        bare = BareSocket(size_bytes)
        bare.write(source)
        for plan in plans.values():  # this also touches every page before the measurement
            copy_here(plan, source, here)
            for far in far_ends.values():
                far.connection.write(ROOM, plan)
        for far in far_ends.values():
            check(far, last, source, here)
            far.halt()
        for index in range(num_rounds):
            for pattern, plan in plans.items():
                copy = partial(copy_here, plan, source, here)
                cases: dict[str, Callable[[], Sample]] = {
                    "memcpy": partial(measure, copy, lambda: 0.0, plan.total_bytes),
                    "socket": partial(measure, partial(bare.write, source), bare.cpu_s, size_bytes),
                }
                if pattern == "pages":
                    hashing = partial(hash_pages, plan, source)
                    cases["checksum"] = partial(measure, hashing, lambda: 0.0, plan.total_bytes)
                for name, far in far_ends.items():
                    cases[name] = partial(far.measure, plan)
                names = list(cases)  # the order rotates, because a case affects the next one
                for name in names[index % len(names) :] + names[: index % len(names)]:
                    samples.setdefault((name, pattern), []).append(cases[name]())
        for far in far_ends.values():
            far.go_on()
            check(far, last, source, here)
        page_us = one_page_us(
            {
                "shm": partial(far_ends["shm"].connection.write, ROOM),
                "memcpy": partial(copy_here, source=source, destination=here),
            },
            pool_bytes // PAGE_BYTES,
        )
        for far in far_ends.values():
            far.close()
        bare.close()
    return samples, page_us


def one_page_us(ways: Mapping[str, Callable[[CopyPlan], None]], num_pages: int) -> dict[str, float]:
    """Return the median time in µs that each way takes to copy one page. Each copy uses a different page."""
    took_s: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(NUM_LATENCIES):
        at = np.array([index % num_pages * PAGE_BYTES], np.int64)
        plan = CopyPlan(at, at, np.array([PAGE_BYTES], np.int64))
        for name, copy in ways.items():
            start_s = time.perf_counter()
            copy(plan)
            took_s[name].append(time.perf_counter() - start_s)
    return {name: statistics.median(times) * 1e6 for name, times in took_s.items()}


def report(samples: Samples, page_us: Mapping[str, float]) -> None:
    rates = {
        case: statistics.median(each.gigabytes_per_s for each in rounds)
        for case, rounds in samples.items()
    }
    print(f"{'transport':<15}{'pattern':<14}{'GB/s':>8}{'CPU-s/GB':>12}{'of memcpy':>12}")
    for (name, pattern), rounds in sorted(samples.items(), key=lambda item: item[0][1]):
        cpu = statistics.median(each.cpu_s_per_gigabyte for each in rounds)
        ratio = rates[name, pattern] / rates["memcpy", pattern]
        print(f"{name:<15}{pattern:<14}{rates[name, pattern]:>8.2f}{cpu:>12.3f}{ratio:>12.2f}")

    def worst(ours: str, theirs: str) -> float:
        return min(rates[ours, each] / rates[theirs, each] for each in PATTERNS)

    if (NAMES[0], TP_PATTERNS[0]) in rates:
        for name in NAMES:
            ratio = min(rates[name, each] / rates[name, "pages"] for each in TP_PATTERNS)
            print(result(f"{name}_tp_vs_pages", ratio, 0.9))
    for name in NAMES:
        if name in BARE:
            print(result(f"{name}_vs_bare", worst(name, BARE[name].name), 0.95))
    print(result("tcp_vs_socket", worst("tcp", "socket"), 0.95))
    print(f"one page: {page_us['shm']:.0f} us over shm, {page_us['memcpy']:.0f} us by memcpy")
    print(result("shm_page_latency_us", page_us["shm"], 200, "us", is_lower_better=True))
    print(result("shm_vs_memcpy", worst("shm", "memcpy"), 0.8))
    ratio = rates["checksum", "pages"] / rates["memcpy", "pages"]
    print(result("checksum_vs_memcpy", ratio, 1.0))


def main() -> None:
    """Run the benchmark, or one of its far ends."""
    parser = parser_of("transfer", "Measure the rate of page transfers between two processes.")
    add = parser.add_argument
    add("--size-mib", type=int, default=512, help="data per round in MiB")
    add("--rounds", type=int, default=7, help="rounds per case")
    add("--tp", action="store_true", help="also measure nodes with different --tp")
    add("--listen", nargs=2, metavar=("NAME", "BYTES"), help=argparse.SUPPRESS)
    add("--drain", nargs=2, metavar=("PORT", "BYTES"), help=argparse.SUPPRESS)
    args = parse(parser, {"size_mib": 64, "rounds": 2}, child_options=("listen", "drain"))
    if args.drain:
        drain(int(args.drain[0]), int(args.drain[1]))
    elif args.listen:
        listen(args.listen[0], int(args.listen[1]))
    else:
        print(f"{args.size_mib} MiB, {args.rounds} rounds, {os.cpu_count()} cores, medians")
        report(*run(args.size_mib << 20, args.rounds, with_tp=args.tp))


if __name__ == "__main__":
    main()
