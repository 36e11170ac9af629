"""How the router's policies compare, in simulated clusters of 8 to 512 nodes under Mooncake's load.

The policies are the product's; nodes and time are a model (`benchmarks/cluster_model.py`), and so is the
load unless `--trace` names the real one's file (`benchmarks/mooncake.py`). All policies meet the same
requests; `random` is the baseline. Run from the root: `python -m benchmarks.policies`.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster_model import ClusterModel, DecodeModel, Outcome, PrefillModel
from benchmarks.mooncake import TraceRequest, made_up, read, shared_share
from benchmarks.verdict import result
from engine.profile import Profile, read_profile
from router.policies import POLICIES
from router.policy import Asked, ClusterSnapshot, NodeSnapshot, choose
from router.prefixes import PrefixIndex, PromptBlocks
from wire.ids import Epoch
from wire.messages import CacheReport, NodeLoad
from wire.prefix_blocks import block_names, pack_names

ORDER = ("random", "round_robin", "power_of_two", "least_load", "session", "cache_aware")
# A cluster of more nodes serves more at once, so fewer seconds of it are enough for a p99.
REQUESTS = {8: 4_000, 64: 8_000, 512: 16_000}
# Of the requests, these first ones fill the caches.
WARM_SHARE = 0.3
PROFILE = Path("docs/profiles/llama-70b-8xh100.json")
GOAL_CHOICE_MS = 1.0
# Of time to first token, against the best policy that knows nothing of caches.
GOAL_MEAN = 0.8
PROMPT_TOKENS = 12_000


def requests_for(args: argparse.Namespace, num_prefills: int, count: int) -> list[TraceRequest]:
    """Return the load of a cluster: its prefills, if nothing were cached, are busy for `load` of the time."""
    profile = read_profile(args.sim_profile)
    sample = read(args.trace, 1.0, 0) if args.trace else made_up(1, 20_000, 1.0, 1e6)
    mean_s = statistics.mean(profile.prefill.forward_s(each.num_prompt, 0) for each in sample)
    duration_s = (len(sample) if args.trace else count) * mean_s / (num_prefills * args.load)
    if args.trace:
        return read(args.trace, duration_s, args.seed)
    return made_up(args.seed, count, duration_s, args.shortening)


def run(args: argparse.Namespace, num_nodes: int, name: str, load: list[TraceRequest]) -> Outcome:
    """Serve a load under one policy."""
    profile: Profile = read_profile(args.sim_profile)
    half = num_nodes // 2
    zones = [f"z{index % args.zones}" for index in range(half)]
    parts, names = (args.cache_tokens, profile), PrefixIndex()
    prefills = [PrefillModel(i, zone, *parts, names) for i, zone in enumerate(zones)]
    decodes = [DecodeModel(i, zone, *parts, names) for i, zone in enumerate(zones)]
    warm_s = load[round(len(load) * WARM_SHARE)].at_s
    return ClusterModel(POLICIES[name], prefills, decodes, warm_s=warm_s, seed=args.seed).run(load)


def compare(args: argparse.Namespace, num_nodes: int) -> dict[str, Outcome]:
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
        f"{'KV moved':>8} {'busiest':>8} {'choice':>8}   p99 and mean against random"
    )
    outcomes: dict[str, Outcome] = {}
    for name in ORDER:
        out = outcomes[name] = run(args, num_nodes, name, load)
        base, times = outcomes["random"], sorted(out.first_token_s)
        print(
            f"{name:<13} {_s(statistics.mean(times))} {_s(times[len(times) // 2], 7)} "
            f"{_s(_p99(times), 7)} {statistics.mean(out.decode_s) * 1e3:5.1f} ms {out.hit_rate:7.1%} "
            f"{out.num_moved / out.num_prompt:8.1%} {out.imbalance:7.2f}x "
            f"{statistics.mean(out.choice_s) * 1e6:5.0f} us   "
            f"{_p99(times) / _p99(sorted(base.first_token_s)):.2f}  "
            f"{statistics.mean(times) / statistics.mean(base.first_token_s):.2f}",
            flush=True,
        )
    return outcomes


def time_of_choice(num_nodes: int) -> float:
    """Return milliseconds of one choice by what is cached, naming the prompt's blocks included.

    Every node has the first tenth of the prompt, as of a system prompt, and every tenth one half of it.
    """
    rng = random.Random(0)
    prompt = [rng.randrange(100_000) for _ in range(PROMPT_TOKENS)]
    names, index_of_all = block_names(prompt), PrefixIndex()

    def node(index: int, role: str) -> NodeSnapshot:
        prefixes = index_of_all.new_life()
        shared = names[: len(names) // (2 if index % 10 == 0 else 10)]
        told = pack_names([*shared, *(rng.getrandbits(64) for _ in range(1_000))])
        prefixes.take(CacheReport(epoch=Epoch(1), position=1, added=told))
        load = NodeLoad(queued_tokens=rng.randrange(50_000))
        url = f"http://{role}-{index}:7000"
        zone = f"z{index % 3}"
        return NodeSnapshot(url, role, True, "model", load=load, zone=zone, prefixes=prefixes)

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
    print(
        f"\none choice by cache at {num_nodes} nodes, prompt of {PROMPT_TOKENS} tokens: "
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
    ratios = [_against_least_load(each) for each in outcomes.values()]
    print("\n" + result("choice_time", choice_ms, GOAL_CHOICE_MS, "ms", is_lower_better=True))
    print(
        result(
            "cache_aware_ttft_vs_least_load", max(ratios), GOAL_MEAN, "ratio", is_lower_better=True
        )
    )
    return 0


def _against_least_load(outcomes: dict[str, Outcome]) -> float:
    mean = {name: statistics.mean(each.first_token_s) for name, each in outcomes.items()}
    return mean["cache_aware"] / mean["least_load"]


if __name__ == "__main__":
    sys.exit(main())
