"""What it is worth that the router follows what prefills have behind their caches, by what a token of it costs.

Clusters in virtual time (`benchmarks/cluster_model.py`) under `cache_aware`, all with the same requests: with
nothing behind the caches; with tiers that prefills use and the router is not told of; with tiers that it
follows. `host` is a prefill's own, with room for ten times its cache; `store` is one for all, endless. A fetch
takes `cost` times as long as computing would have, beside whatever the prefill computes; only then is the
request in line. Run from the root: `python -m benchmarks.tier_routing`.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from benchmarks.cluster_model import (
    BlockCache,
    ClusterModel,
    DecodeModel,
    Job,
    Outcome,
    PrefillModel,
)
from benchmarks.mooncake import BLOCK_TOKENS, TraceRequest
from benchmarks.policies import PROFILE, REQUESTS, WARM_SHARE, requests_for
from benchmarks.verdict import result
from tandem.engine.profile import Profile, read_profile
from tandem.router.policies import POLICIES
from tandem.router.prefixes import KnownPrefixes
from tandem.wire.messages import NodeLoad, TierLoad
from tandem.wire.prefix_journal import PrefixJournal

# Host memory over PCIe, a disk, a store over the network, and one that hardly pays.
COSTS = (0.05, 0.25, 0.5, 0.9)
HOST_FACTOR = 10
ENDLESS = 1 << 40
NO_TIER = 1.0
# Of the mean time to first token, against the same tier unseen, where it costs least. A store that all have
# makes nodes alike, so following it can win little: it must not lose more than runs differ by their seed.
GOALS = {"host": 0.9, "store": 1.03}


class TieredPrefill(PrefillModel):
    """Takes from a tier what is not cached, and puts there what it computed.

    Args:
        tier: Its own, or everybody's.
        told: What the router hears of it; None: nothing.
    """

    def __init__(
        self,
        index: int,
        cache_tokens: int,
        profile: Profile,
        known: KnownPrefixes,
        *,
        tier: BlockCache,
        cost: float,
        told: TierLoad | None,
    ) -> None:
        self._tier, self._cost, self._told = tier, cost, told
        # Of a store, a node tells what it put or got.
        is_shared = told is not None and bool(told.store)
        self._journal = PrefixJournal() if is_shared else tier.journal
        self._journalled = set[int]()
        self._fetching: dict[int, Sequence[int]] = {}
        self._fetching_tokens = 0
        super().__init__(index, "", cache_tokens, profile, known)

    @override
    def load(self) -> NodeLoad:
        """See `NodeModel`."""
        load = super().load()
        return NodeLoad(
            num_running=load.num_running,
            queued_tokens=load.queued_tokens + self._fetching_tokens,
            tiers=[self._told] if self._told is not None else [],
        )

    @override
    def tell_cache(self) -> None:
        """See `NodeModel`."""
        super().tell_cache()
        for name, position in self._prefixes.tier_positions.items():
            self._tell(name, self._journal, position)

    @override
    def fetch(self, job: Job) -> float:
        """See `PrefillModel`."""
        blocks = job.request.blocks
        cached, there = self.cache.num_cached(blocks), self._tier.num_cached(blocks)
        if there <= cached or self._cost >= NO_TIER:
            return 0.0
        self._fetching[id(job)] = blocks[:there]
        self._fetching_tokens += job.request.num_prompt
        num_cached = cached * BLOCK_TOKENS
        took_s = self._profile.prefill.forward_s(there * BLOCK_TOKENS - num_cached, num_cached)
        return self._cost * took_s

    @override
    def line_up(self, job: Job) -> None:
        """See `PrefillModel`. What was fetched is cached now."""
        if blocks := self._fetching.pop(id(job), None):
            self.cache.put(blocks)
            self._fetching_tokens -= job.request.num_prompt
        super().line_up(job)

    @override
    def end(self) -> Job:
        """See `PrefillModel`."""
        job = super().end()
        self._tier.put(job.request.blocks)
        if self._journal is not self._tier.journal:
            for block in set(job.request.blocks).difference(self._journalled):
                self._journalled.add(block)
                self._journal.add(block)
        return job


def run(
    args: argparse.Namespace,
    num_nodes: int,
    load: list[TraceRequest],
    name: str,
    cost: float,
    *,
    is_followed: bool = False,
) -> Outcome:
    """Serve a load with one kind of tier behind each prefill."""
    profile, known, half = read_profile(args.sim_profile), KnownPrefixes(), num_nodes // 2
    parts = args.cache_tokens, profile, known
    told = TierLoad(name=name, store=name if name == "store" else "", token_cost=cost)
    store = BlockCache(ENDLESS) if name == "store" else None
    prefills: list[PrefillModel] = [
        TieredPrefill(
            index,
            *parts,
            tier=store or BlockCache(HOST_FACTOR * args.cache_tokens),
            cost=cost,
            told=told if is_followed else None,
        )
        for index in range(half)
    ]
    decodes = [DecodeModel(index, "", *parts) for index in range(half)]
    warm_s = load[round(len(load) * WARM_SHARE)].at_s
    policy = POLICIES["cache_aware"]
    return ClusterModel(policy, prefills, decodes, warm_s=warm_s, seed=args.seed).run(load)


def compare(args: argparse.Namespace, num_nodes: int) -> dict[str, float]:
    """Print a line for each tier and cost; return how following it compares where it costs least."""
    load = requests_for(args, num_nodes // 2, args.requests or REQUESTS.get(num_nodes, 12_000))
    without, ratios = run(args, num_nodes, load, "host", NO_TIER), dict[str, float]()
    print(f"\n{num_nodes} nodes, half of them prefills, {len(load)} requests; TTFT mean (p99)")
    print(f"nothing behind                        {_times(without)}")
    for name in GOALS:
        for cost in COSTS:
            unseen = run(args, num_nodes, load, name, cost)
            followed = run(args, num_nodes, load, name, cost, is_followed=True)
            ratio = _mean(followed) / _mean(unseen)
            ratios.setdefault(name, ratio)
            print(
                f"{name:<5}, a token costs {cost:4.2f}    unseen {_times(unseen)}   "
                f"followed {_times(followed)}   followed/unseen {ratio:.3f}   "
                f"followed/nothing {_mean(followed) / _mean(without):.3f}",
                flush=True,
            )
    return ratios


def _mean(outcome: Outcome) -> float:
    return statistics.mean(outcome.first_token_s)


def _times(outcome: Outcome) -> str:
    ordered = sorted(outcome.first_token_s)
    return f"{_mean(outcome):5.2f} s ({ordered[int(0.99 * len(ordered))]:5.2f} s)"


def main() -> int:
    """Compare and print the verdicts; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8], metavar="N")
    parser.add_argument("--requests", type=int, default=0, help="of each run (default: by size)")
    parser.add_argument("--load", type=float, default=0.9, help="of the prefills without caches")
    parser.add_argument("--shortening", type=float, default=10, help="of pauses in conversations")
    parser.add_argument("--cache-tokens", type=int, default=500_000, help="of each node")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sim-profile", type=Path, default=PROFILE)
    parser.add_argument(
        "--trace", type=Path, help="Mooncake's conversation_trace.jsonl, or its like"
    )
    args = parser.parse_args()
    found = [compare(args, size) for size in args.nodes]
    print()
    for name, goal in GOALS.items():
        worst = max(ratios[name] for ratios in found)
        print(result(f"{name}_followed_ttft_vs_unseen", worst, goal, is_lower_better=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
