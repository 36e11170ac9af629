"""How the router's policies compare, in simulated clusters of 8 to 512 nodes under Mooncake's load.

Policies, nodes and caches are the product's, in the virtual time of `tandem plan`; so is the
load made up unless `--trace` names the real one's file (`benchmarks/mooncake.py`). All policies meet the same
requests; `random` is the baseline. Run from the root: `python -m benchmarks.policies`.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mooncake import TraceRequest, made_up, read, shared_share
from benchmarks.verdict import result
from tandem.engine.profile import read_profile
from tandem.plan.seam import BLOCK_TOKENS, Fleet, NodeKind, PlannedRequest, Served
from tandem.plan.simulation import simulate
from tandem.router.policies import POLICIES
from tandem.router.policy import Asked, ClusterSnapshot, NodeSnapshot, choose
from tandem.router.prefixes import KnownPrefixes, PromptBlocks
from tandem.wire.ids import Epoch
from tandem.wire.messages import CacheReport, NodeLoad, TierLoad
from tandem.wire.prefix_blocks import block_names, pack_names

ORDER = ("random", "round_robin", "power_of_two", "least_load", "session", "cache_aware")
# A cluster of more nodes serves more at once, so fewer seconds of it are enough for a p99.
REQUESTS = {8: 4_000, 64: 8_000, 512: 16_000}
# Of the requests, these first ones fill the caches.
WARM_SHARE = 0.3
# Of a 70B model in bfloat16, and 400 Gbit/s.
KV_BYTES, LINK_BYTES_PER_S = 327_680, 50e9
PROFILE = Path("docs/profiles/llama-70b-8xh100.json")
GOAL_CHOICE_MS = 1.0
# Of time to first token, against the best policy that knows nothing of caches.
GOAL_MEAN = 0.8
PROMPT_TOKENS = 12_000
TIERS = (
    TierLoad(name="host", token_cost=0.05),
    TierLoad(name="redis", store="redis://store:6379/0", token_cost=0.4),
)


def requests_for(args: argparse.Namespace, num_prefills: int, count: int) -> list[TraceRequest]:
    """Return the load of a cluster: its prefills, if nothing were cached, are busy for `load` of the time."""
    profile = read_profile(args.sim_profile)
    sample = read(args.trace, 1.0, 0) if args.trace else made_up(1, 20_000, 1.0, 1e6)
    mean_s = statistics.mean(profile.prefill.forward_s(each.num_prompt, 0) for each in sample)
    duration_s = (len(sample) if args.trace else count) * mean_s / (num_prefills * args.load)
    if args.trace:
        return read(args.trace, duration_s, args.seed)
    return made_up(args.seed, count, duration_s, args.shortening)


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a run, of the requests that count.

    Attributes:
        imbalance: Computing time of the busiest prefill, by the average.
    """

    requests: list[Served]
    imbalance: float

    @property
    def first_token_s(self) -> list[float]:
        """From arrival to first token."""
        return [each.ttft_s for each in self.requests]

    @property
    def token_s(self) -> float:
        """The mean time of a token after the first, of an average answer."""
        return statistics.mean(each.tpot_s for each in self.requests if each.num_output > 1)

    @property
    def cached_share(self) -> float:
        """Of prompt tokens, those that prefill had cached."""
        return sum(each.num_cached for each in self.requests) / self._num_prompt

    @property
    def moved_share(self) -> float:
        """Of prompt tokens, those that decode did not have."""
        return 1 - sum(each.num_kept for each in self.requests) / self._num_prompt

    @property
    def _num_prompt(self) -> int:
        return sum(each.num_prompt for each in self.requests)


def run(args: argparse.Namespace, num_nodes: int, name: str, load: list[TraceRequest]) -> Seen:
    """Serve a load under one policy."""
    kind = NodeKind(
        name="node",
        profile=read_profile(args.sim_profile),
        num_tokens=args.cache_tokens,
        kv_bytes_per_token=KV_BYTES,
        link_bytes_per_s=LINK_BYTES_PER_S,
    )
    half = num_nodes // 2
    fleet = Fleet(
        prefill=kind,
        num_prefill=half,
        decode=kind,
        num_decode=half,
        policy=name,
        num_zones=args.zones,
    )
    outcome = simulate(
        fleet, [_planned(each) for each in load], seed=args.seed, page_size=BLOCK_TOKENS
    )
    warm_s = load[round(len(load) * WARM_SHARE)].at_s
    busy_s = outcome.busy_s[:half]
    return Seen(
        [each for each in outcome.requests if each.arrival_s >= warm_s and each.is_complete],
        max(busy_s) / statistics.mean(busy_s),
    )


def _planned(request: TraceRequest) -> PlannedRequest:
    return PlannedRequest(
        arrival_s=request.at_s,
        num_prompt=request.num_prompt,
        num_output=request.num_output,
        blocks=request.blocks,
        session=f"s{request.session}",
    )


def compare(args: argparse.Namespace, num_nodes: int) -> dict[str, Seen]:
    """Run every policy at one size and print a line of each."""
    load = requests_for(args, num_nodes // 2, args.requests or REQUESTS.get(num_nodes, 12_000))
    duration_s = load[-1].at_s
    print(
        f"\n{num_nodes} nodes, half of them prefills: {len(load)} requests in {duration_s:.0f} s, "
        f"{statistics.mean(each.num_prompt for each in load):.0f} prompt and "
        f"{statistics.mean(each.num_output for each in load):.0f} answer tokens on average; "
        f"one endless cache would have {shared_share(load):.0%}"
    )
    print(
        f"{'policy':<13} {'TTFT mean':>9} {'p50':>7} {'p99':>7} {'token':>8} {'cached':>7} "
        f"{'KV moved':>8} {'busiest':>8}   p99 and mean against random"
    )
    outcomes: dict[str, Seen] = {}
    for name in ORDER:
        out = outcomes[name] = run(args, num_nodes, name, load)
        base, times = outcomes["random"], sorted(out.first_token_s)
        print(
            f"{name:<13} {_s(statistics.mean(times))} {_s(times[len(times) // 2], 7)} "
            f"{_s(_p99(times), 7)} {out.token_s * 1e3:5.1f} ms {out.cached_share:7.1%} "
            f"{out.moved_share:8.1%} {out.imbalance:7.2f}x   "
            f"{_p99(times) / _p99(sorted(base.first_token_s)):.2f}  "
            f"{statistics.mean(times) / statistics.mean(base.first_token_s):.2f}",
            flush=True,
        )
    return outcomes


def time_of_choice(num_nodes: int, tiers: Sequence[TierLoad] = ()) -> float:
    """Return milliseconds of one choice by what is cached, naming the prompt's blocks included.

    Every node has the first tenth of the prompt, as of a system prompt, and every tenth one half of it;
    in each of its tiers, a tenth more for every tier before it.
    """
    rng = random.Random(0)
    prompt = [rng.randrange(100_000) for _ in range(PROMPT_TOKENS)]
    names, known = block_names(prompt), KnownPrefixes()

    def node(index: int, role: str) -> NodeSnapshot:
        prefixes = known.new_life()
        num_shared = len(names) // (2 if index % 10 == 0 else 10)
        load = NodeLoad(queued_tokens=rng.randrange(50_000), tiers=list(tiers))
        prefixes.heard(load)
        for place, tier in enumerate(["", *(tier.name for tier in tiers)]):
            shared = names[: num_shared + place * len(names) // 10]
            told = pack_names([*shared, *(rng.getrandbits(64) for _ in range(1_000))])
            prefixes.take(CacheReport(epoch=Epoch(1), position=1, added=told, tier=tier))
        return NodeSnapshot(
            url=f"http://{role}-{index}:7000",
            role=role,
            is_up=True,
            fingerprint="model",
            load=load,
            zone=f"z{index % 3}",
            prefixes=prefixes.cached,
            tiers=prefixes.tiers,
        )

    snapshot = ClusterSnapshot(
        tuple(node(index, "prefill") for index in range(num_nodes // 2)),
        tuple(node(index, "decode") for index in range(num_nodes // 2)),
    )
    took_s = []
    for turn in range(200):
        began = time.thread_time()
        asked = Asked(len(prompt), "", PromptBlocks(prompt))
        choose(snapshot, "model", POLICIES["cache_aware"], turn, rng, asked=asked)
        took_s.append(time.thread_time() - began)
    began = time.thread_time()
    block_names(prompt)
    naming_ms = (time.thread_time() - began) * 1e3
    choice_ms = statistics.median(took_s) * 1e3
    behind = f" with {' and '.join(tier.name for tier in tiers)} behind each" if tiers else ""
    print(
        f"\none choice by cache at {num_nodes} nodes{behind}, prompt of {PROMPT_TOKENS} tokens: "
        f"{choice_ms:.2f} ms (p99 {_p99(sorted(took_s)) * 1e3:.2f} ms), "
        f"of which {naming_ms:.2f} ms name the prompt's blocks"
    )
    return choice_ms


def _p99(ordered: Sequence[float]) -> float:
    return ordered[int(0.99 * len(ordered))]


def _s(seconds: float, width: int = 9) -> str:
    return f"{seconds:{width - 2}.2f} s"


def main() -> int:
    """Compare, time a choice, and print the verdicts; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=sorted(REQUESTS), metavar="N")
    parser.add_argument("--requests", type=int, default=0, help="of each run (default: by size)")
    parser.add_argument("--load", type=float, default=0.9, help="of the prefills without caches")
    parser.add_argument("--shortening", type=float, default=10, help="of pauses in conversations")
    parser.add_argument("--cache-tokens", type=int, default=500_000, help="of each node")
    parser.add_argument("--zones", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sim-profile", type=Path, default=PROFILE)
    parser.add_argument(
        "--trace", type=Path, help="Mooncake's conversation_trace.jsonl, or its like"
    )
    args = parser.parse_args()
    print(
        f"load: {args.trace}, its time stretched"
        if args.trace
        else "load: synthetic, in the shape of Mooncake's conversation trace; pauses within "
        f"conversations and caches are 1/{args.shortening:g} of the real ones"
    )
    print(f"a node's cache: {args.cache_tokens} tokens; time: {args.sim_profile.name}")
    outcomes = {size: compare(args, size) for size in args.nodes}
    largest = max(args.nodes)
    choice_ms = time_of_choice(largest)
    tiered_ms = time_of_choice(largest, TIERS)
    ratios = [_against_least_load(each) for each in outcomes.values()]
    print("\n" + result("choice_time", choice_ms, GOAL_CHOICE_MS, "ms", is_lower_better=True))
    print(result("choice_time_tiers", tiered_ms, GOAL_CHOICE_MS, "ms", is_lower_better=True))
    print(
        result(
            "cache_aware_ttft_vs_least_load", max(ratios), GOAL_MEAN, "ratio", is_lower_better=True
        )
    )
    return 0


def _against_least_load(outcomes: dict[str, Seen]) -> float:
    mean = {name: statistics.mean(each.first_token_s) for name, each in outcomes.items()}
    return mean["cache_aware"] / mean["least_load"]


if __name__ == "__main__":
    sys.exit(main())
