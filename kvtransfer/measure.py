"""How fast a connection writes, by the writer's clock alone: no two clocks are compared.

Has what is written (random pages into random places), how it is timed, what both ends hash to see that
it arrived, and the limit of memory; the limit of a socket is in `bare_stream`. What the numbers mean is
the caller's to say.
"""

import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tandem.kvtransfer.plan import CopyPlan, Int64s
from tandem.kvtransfer.region import MemoryRegion

Write = Callable[[CopyPlan], None]
Clock = Callable[[], float]

# The first write, from which sizes are doubled: small enough for a link of 10 MB/s.
FIRST_BYTES = 1 << 20
# A write that takes this share of the time is large enough: medians want several.
LARGE_SHARE = 0.1
MIN_ROUNDS = 3
MAX_ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class Rate:
    """What came of writing for some time.

    Attributes:
        bytes_per_s: Median over the rounds.
        num_copies: The first so many copies of the plan were written, and are there now.
    """

    bytes_per_s: float
    num_copies: int


def scattered_pages(num_pages: int, page_bytes: int) -> CopyPlan:
    """Return copies of all pages of one pool into those of another, in random order on both sides.

    The same arguments give the same plan, so that the far end knows what was written where.
    """
    rng = np.random.default_rng(0)
    begin, to = (rng.permutation(num_pages).astype(np.int64) * page_bytes for _ in range(2))
    return CopyPlan(begin, to, np.full(num_pages, page_bytes, np.int64))


def measure_rate(
    write: Write, plan: CopyPlan, budget_s: float, clock: Clock = time.perf_counter
) -> Rate:
    """Write for about `budget_s`, and for at least `MIN_ROUNDS` rounds.

    A round is as many copies of `plan` as take a tenth of that, or all of them.

    Raises:
        TandemError: A write failed.
    """
    end_s = clock() + budget_s
    num_copies = max(1, FIRST_BYTES // int(plan.size_bytes[0]))
    while True:
        part = plan[:num_copies]
        write(part)  # the first time costs what no later one does
        if _timed(write, part, clock) >= budget_s * LARGE_SHARE or num_copies >= len(plan):
            break
        num_copies *= 2
    rounds_s: list[float] = []
    while len(rounds_s) < MIN_ROUNDS or (clock() < end_s and len(rounds_s) < MAX_ROUNDS):
        rounds_s.append(_timed(write, part, clock))
    return Rate(part.total_bytes / statistics.median(rounds_s), len(part))


def measure_latency_s(
    write: Write, plan: CopyPlan, budget_s: float, clock: Clock = time.perf_counter
) -> float:
    """Return the median time of writing the first page of `plan`, again and again for `budget_s`.

    Raises:
        TandemError: A write failed.
    """
    end_s, page = clock() + budget_s, plan[:1]
    rounds_s: list[float] = []
    while len(rounds_s) < MIN_ROUNDS or (clock() < end_s and len(rounds_s) < MAX_ROUNDS):
        rounds_s.append(_timed(write, page, clock))
    return statistics.median(rounds_s)


def _timed(write: Write, plan: CopyPlan, clock: Clock) -> float:
    start_s = clock()
    write(plan)
    return max(clock() - start_s, 1e-9)


def copy_within(plan: CopyPlan, source: MemoryRegion, destination: MemoryRegion) -> None:
    """Do a plan in this process: one core's memcpy, the limit of a push through memory."""
    begin, to = source.array(), destination.array()
    for at, there, size in plan.copies():
        to[there : there + size] = begin[at : at + size]


def fill_with_noise(region: MemoryRegion) -> None:
    """Fill a region with bytes that no region had before; its size is a multiple of 8."""
    rng = np.random.default_rng()
    region.array().view(np.uint64)[:] = rng.integers(
        0, 2**63, region.size_bytes // 8, dtype=np.uint64
    )


def digest_of_source(region: MemoryRegion, plan: CopyPlan) -> str:
    """Return a hash of what `plan` reads, in its order."""
    return _digest(region, plan.source_offset, plan.size_bytes)


def digest_of_destination(region: MemoryRegion, plan: CopyPlan) -> str:
    """Return a hash of where `plan` writes: once it is done, that of its source."""
    return _digest(region, plan.destination_offset, plan.size_bytes)


def _digest(region: MemoryRegion, offset: Int64s, size_bytes: Int64s) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for begin, size in zip(offset.tolist(), size_bytes.tolist(), strict=True):
        digest.update(region.buffer[begin : begin + size])
    return digest.hexdigest()
