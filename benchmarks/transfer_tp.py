"""How fast pages move between nodes of different tensor-parallel sizes, against equal sizes.

    python -m benchmarks.transfer --tp 2:1 [--size-mib 128] [--rounds 15] [--quick]

The KV of a Llama of 8B (32 layers, 8 KV heads of 128, bfloat16, 16 tokens a page) goes from P ranks of
prefill to D ranks of decode, and in the same round, as many bytes, from P ranks to P. Pages are
scattered on both sides. This process is every rank of prefill, one after the other; each link has a
far end of its own. Planning the copies counts. What arrived is verified by hash.
"""

import os
import statistics
import time
from contextlib import ExitStack

import numpy as np

from benchmarks.transfer import NAMES, ROOM, FarEnd, copy_here, digest
from benchmarks.verdict import result
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import CopyPlan, PagedTokens, plan_copies
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sharding import RankPair, Shard, held_heads, pair_ranks

NUM_KV_HEADS, PAGE_SIZE = 8, 16
PAGE_BYTES = 32 * 2 * NUM_KV_HEADS * PAGE_SIZE * 128 * 2  # of all heads

Samples = dict[tuple[str, str], list[float]]


class Prefill:
    """The ranks of prefill: memory with something in it, and scattered pages of a prompt."""

    def __init__(self, tp: int, num_pages: int, stack: ExitStack) -> None:
        self.held = shares(tp)
        self.pages = [scattered(heads, num_pages, seed=0) for heads in self.held]
        self.regions = []
        for rank, pages in enumerate(self.pages):
            region = stack.enter_context(MemoryRegion.private(pages.layout.pool_bytes))
            words = region.array().view(np.uint64)
            words[:] = np.random.default_rng(rank).integers(0, 2**63, len(words), np.uint64)
            self.regions.append(region)


class Route:
    """Ways from prefill to a decode of `tp` ranks over one transport."""

    def __init__(self, prefill: Prefill, tp: int, name: str, stack: ExitStack) -> None:
        num_pages = len(prefill.pages[0].page_ids)
        held = shares(tp)
        self._prefill = prefill
        self._theirs = [scattered(heads, num_pages, seed=1) for heads in held]
        self._far_ends: list[tuple[RankPair, FarEnd]] = []
        for pair in pair_ranks(prefill.held, held):
            pool_bytes = self._theirs[pair.destination].layout.pool_bytes
            far = FarEnd(name, pool_bytes, prefill.regions[pair.source])
            stack.callback(far.close)
            self._far_ends.append((pair, far))

    def write(self) -> None:
        """Push every head of every page to each rank that holds it."""
        for pair, far in self._far_ends:
            far.connection.write(ROOM, self._plan(pair))

    def check(self) -> None:
        """Make sure that each far end holds what plain copies make of it, and nothing else."""
        for pair, far in self._far_ends:
            with MemoryRegion.private(self._theirs[pair.destination].layout.pool_bytes) as expected:
                copy_here(self._plan(pair), self._prefill.regions[pair.source], expected)
                if far.ask("hash") != digest(expected):
                    raise SystemExit("the bytes that arrived are not those that were sent")

    def _plan(self, pair: RankPair) -> CopyPlan:
        own, theirs = self._prefill.pages[pair.source], self._theirs[pair.destination]
        return plan_copies(own, theirs, range(own.end_token), pair.heads)


def shares(tp: int) -> list[range]:
    """Return the heads that each of `tp` ranks holds."""
    return held_heads(Shard(0, tp, NUM_KV_HEADS), max(1, -(-NUM_KV_HEADS // tp)))


def scattered(heads: range, num_pages: int, *, seed: int) -> PagedTokens:
    """Return as many pages, in any order, of a pool that has a quarter more."""
    layout = KVLayout(num_pages * 5 // 4, PAGE_SIZE, 32, len(heads), 128, "bfloat16", 2)
    page_ids = np.random.default_rng(seed).permutation(layout.num_pages)[:num_pages]
    return PagedTokens(layout, page_ids.tolist())


def measure(sizes: tuple[int, int], size_bytes: int, num_rounds: int) -> Samples:
    """Return GB/s of each (transport, "equal" or "unequal"), round by round."""
    samples: Samples = {}
    with ExitStack() as stack:
        prefill = Prefill(sizes[0], size_bytes // PAGE_BYTES, stack)
        routes = {
            (name, kind): Route(prefill, tp, name, stack)
            for name in NAMES
            for kind, tp in (("equal", sizes[0]), ("unequal", sizes[1]))
        }
        for route in routes.values():  # also touches every page once, before the clock runs
            route.write()
            route.check()
        for _ in range(num_rounds):
            for case, route in routes.items():
                start_s = time.perf_counter()
                route.write()
                elapsed_s = time.perf_counter() - start_s
                samples.setdefault(case, []).append(size_bytes / elapsed_s / 1e9)
    return samples


def main(text: str, size_mib: int, num_rounds: int) -> None:
    """Measure and report.

    Args:
        text: Such as 2:1, tensor-parallel sizes of prefill and decode that divide the heads.
    """
    prefill_tp, _, decode_tp = text.partition(":")
    sizes = int(prefill_tp), int(decode_tp)
    print(f"--tp {text}: {size_mib} MiB a round, {num_rounds} rounds, {os.cpu_count()} cores")
    samples = measure(sizes, size_mib << 20, num_rounds)
    print(f"{'transport':<12}{'equal GB/s':>12}{'unequal GB/s':>14}{'ratio':>8}")
    ratios = []
    for name in NAMES:
        equal, unequal = samples[name, "equal"], samples[name, "unequal"]
        # Of each round by itself: a noisy neighbour slows down both.
        ratios.append(statistics.median(u / e for u, e in zip(unequal, equal, strict=True)))
        medians = statistics.median(equal), statistics.median(unequal)
        print(f"{name:<12}{medians[0]:>12.2f}{medians[1]:>14.2f}{ratios[-1]:>8.2f}")
    print(result("unequal_tp_vs_equal", min(ratios), 0.95))
