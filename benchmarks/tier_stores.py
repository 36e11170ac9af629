"""How fast pages come from host memory and from a directory, against a bare memcpy and a bare read.

    python -m benchmarks.tier_stores [--size-mib 128] [--rounds 7] [--directory /tmp]

Pages are 2 MiB (Llama-3-8B in bf16, 16 tokens each). The limits are measured in the same run, over the same bytes: a
memcpy page by page, and open, preadv and close of the same files into the same kind of memory, which the page cache
has. A page that is got counts when it lies in the pool: from host memory that is one copy, as for memcpy; from
a directory it is the read into staging memory, as for the bare read, and the copy is shown beside (`and placed`).
What checksums cost is shown by leaving them out, and by a bare read with one. The cases of a round are interleaved
and medians are shown. A ratio is the median of the rounds' ratios, of bytes by CPU second: all of it is one thread's
copying and hashing, and the wall clock of a machine that others use measures the others. Writes go to a
real disk, which is their limit: they are shown by the wall clock, once.
"""

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash

from benchmarks.verdict import result
from tandem.kvtier import disk_entry
from tandem.kvtier.disk import DiskTier
from tandem.kvtier.disk_entry import HEADER_BYTES
from tandem.kvtier.host import HostTier
from tandem.kvtier.memory import copy_page, views_of
from tandem.wire.page_keys import PageKey, PageSpace, page_keys

PAGE_BYTES, PAGE_SIZE = 2 << 20, 16
SPACE = PageSpace("benchmark", "bfloat16", PAGE_SIZE)
HOST_GOAL, DISK_GOAL = 0.8, 0.7
# As the stack asks for.
CALL_PAGES = 8

WRITE_ROUNDS = 1

Case = Callable[[], None]
Clock = Callable[[], float]
Rates = dict[str, list[float]]


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


class NoChecksum:
    """In the place of xxh3-128."""

    def __init__(self, data: object = b"") -> None: ...

    def update(self, data: object) -> None:
        """Take no look."""

    def digest(self) -> bytes:
        """Return always the same."""
        return bytes(16)


@contextmanager
def no_checksums() -> Iterator[None]:
    """Have files written and read without."""
    real = disk_entry.Checksum
    vars(disk_entry)["Checksum"] = NoChecksum
    try:
        yield
    finally:
        vars(disk_entry)["Checksum"] = real


def calls_of(keys: list[PageKey]) -> Iterator[tuple[int, list[PageKey]]]:
    """Yield the runs that are asked for at once, with the number of pages before."""
    for first in range(0, len(keys), CALL_PAGES):
        yield first, keys[first : first + CALL_PAGES]


def get(tier: HostTier | DiskTier, keys: list[PageKey], pool: Pool | None) -> Case:
    """Return a case that gets all pages, and copies them into a pool, if there is one."""

    def run() -> None:
        for first, some in calls_of(keys):
            loan = tier.get(some)
            assert len(loan.pages) == len(some)
            if pool is not None:
                pool.write(range(first, first + len(some)), loan.pages)
            loan.close()

    return run


def put(
    tier: HostTier | DiskTier, generations: Iterator[list[PageKey]], pages: list[memoryview]
) -> Case:
    """Return a case that puts pages under keys that are new each time."""

    def run() -> None:
        for first, some in calls_of(next(generations)):
            tier.put(some, pages[first : first + len(some)])

    return run


def new_keys(num_pages: int) -> Iterator[list[PageKey]]:
    """Yield runs of keys, each of another tenant."""
    number = 0
    while True:
        number += 1
        yield list(page_keys(SPACE, range(num_pages * PAGE_SIZE), str(number)))


def bare_read(paths: list[Path], into: list[memoryview], *, is_hashed: bool = False) -> Case:
    """Return a case that reads the files of a tier."""
    header = bytearray(HEADER_BYTES)

    def run() -> None:
        for path, view in zip(paths, into, strict=True):
            file = os.open(path, os.O_RDONLY)
            os.preadv(file, [header, view], 0)
            os.close(file)
            if is_hashed:
                xxhash.xxh3_128_digest(view)

    return run


def bare_write(directory: Path, pages: list[memoryview]) -> Case:
    """Return a case that writes new files, and removes those it wrote before."""
    header = bytes(HEADER_BYTES)

    def run() -> None:
        for number, page in enumerate(pages):
            path = directory / str(number)
            path.unlink(missing_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.writev(file, [header, page])
            os.close(file)

    return run


def paths_of(root: Path, keys: list[PageKey]) -> list[Path]:
    """Return where a tier has its files."""
    where = {path.name: path for path in root.rglob("*")}
    return [where[key.digest.hex()] for key in keys]


def measure(cases: dict[str, Case], rounds: int, num_bytes: int, clock: Clock) -> Rates:
    """Return MB/s of each case in each round; the first is not counted."""
    rates: Rates = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            begin_s = clock()
            case()
            rate = num_bytes / 1e6 / (clock() - begin_s)
            if number:
                rates[name].append(rate)
    return rates


def ratio(rates: Rates, name: str, limit: str) -> float:
    """Return the median of a case's rate by its limit's in the same round."""
    return statistics.median(a / b for a, b in zip(rates[name], rates[limit], strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--size-mib", type=int, default=128, help="of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="where files are written; default: TMPDIR")
    options = parser.parse_args()
    num_pages = (options.size_mib << 20) // PAGE_BYTES
    num_bytes = num_pages * PAGE_BYTES
    pool, source = Pool(num_pages), Pool(num_pages)
    kept = next(new_keys(num_pages))
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        root = Path(directory)
        host, churned = HostTier(source, num_bytes), HostTier(source, num_bytes)
        host.put(kept, source.pages)
        disk = make_disk(root / "disk", 4 * num_bytes, source, kept)
        with no_checksums():
            plain = make_disk(root / "plain", 4 * num_bytes, source, kept)
        churned_disk = make_disk(root / "churned", num_bytes + (64 << 20), source, kept)
        (root / "bare").mkdir()

        def get_plain() -> None:
            with no_checksums():
                get(plain, kept, None)()

        paths = paths_of(root / "disk", kept)
        reads = {
            "memcpy": lambda: pool.write(range(num_pages), source.pages),
            "host get": get(host, kept, pool),
            "host put": put(churned, new_keys(num_pages), source.pages),
            "bare read": bare_read(paths, pool.pages),
            "bare read, xxh3-128": bare_read(paths, pool.pages, is_hashed=True),
            "disk get": get(disk, kept, None),
            "disk get, no checksums": get_plain,
            "disk get and placed": get(disk, kept, pool),
        }
        writes = {
            "bare write": bare_write(root / "bare", source.pages),
            "disk put": put(churned_disk, new_keys(num_pages), source.pages),
        }
        rates = measure(reads, options.rounds, num_bytes, time.thread_time)
        report(rates, "MB/CPU-s")
        report(measure(writes, WRITE_ROUNDS, num_bytes, time.perf_counter), "MB/s")
        for tier in (disk, plain, churned_disk):
            tier.close()
    print(result("host get / memcpy", ratio(rates, "host get", "memcpy"), HOST_GOAL))
    print(result("disk get / bare read", ratio(rates, "disk get", "bare read"), DISK_GOAL))


def make_disk(path: Path, limit_bytes: int, pool: Pool, keys: list[PageKey]) -> DiskTier:
    """Return a directory with pages in it."""
    tier = DiskTier(path, limit_bytes, pool, SPACE)
    tier.put(keys, pool.pages)
    return tier


def report(rates: Rates, unit: str) -> None:
    """Print the table."""
    limit = ""
    print(f"{'case':26} {unit:>8}  of its limit")
    for name, values in rates.items():
        is_limit = name in {"memcpy", "bare read", "bare write"}
        limit = name if is_limit else limit
        share = "" if is_limit else f"{ratio(rates, name, limit):.2f} of {limit}"
        print(f"{name:26} {statistics.median(values):8.0f}  {share}")


if __name__ == "__main__":
    main()
