"""How long one choice by cache takes in a router with many nodes, without and with tiers behind their caches.

Run from the root: `python -m benchmarks.policies`.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.verdict import result
from tandem.router.policies import POLICIES
from tandem.router.policy import Asked, ClusterSnapshot, NodeSnapshot, choose
from tandem.router.prefixes import PromptBlocks
from tandem.router.tiers import KnownPrefixes
from tandem.wire.ids import Epoch
from tandem.wire.messages import CacheReport, NodeLoad, TierLoad
from tandem.wire.prefix_blocks import block_names, pack_names

GOAL_CHOICE_MS = 1.0
PROMPT_TOKENS = 12_000
TIERS = (
    TierLoad(name="host", token_cost=0.05),
    TierLoad(name="redis", store="redis://store:6379/0", token_cost=0.4),
)


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


def main() -> int:
    """Time a choice without and with tiers, and print the verdicts; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=512, metavar="N", help="half of them prefills")
    num_nodes = parser.parse_args().nodes
    for name, tiers in (("choice_time", ()), ("choice_time_tiers", TIERS)):
        choice_ms = time_of_choice(num_nodes, tiers)
        print(result(name, choice_ms, GOAL_CHOICE_MS, "ms", is_lower_better=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
