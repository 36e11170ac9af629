"""Time to first token of a long prompt whose prefix is in a tier, compared with computing the whole prompt.

One `tandem serve` with every tier computes a prompt, which fills the tiers. Then a node with one tier receives
the same prefix with a different end. Its prefix cache is flushed before each request, so that it loads the tier's pages.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rig import Target, get, parse, parser_of, result, tandem

GOAL_TTFT_RATIO, GOAL_MISS_PERCENT = 0.5, 1.0
PAGE = 16
# Lengths to compute and to load, in addition to that of the longest prompt.
LENGTHS = (512, 2048)
SAVED_S = 120


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one request.

    Attributes:
        ttft_s: Time to the first token.
        tier_s: The part of `ttft_s` spent waiting for tiers.
        num_found: Tokens found in tiers.
    """

    ttft_s: float
    tier_s: float
    num_found: int


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = parser_of("tiers", "Compare prompts found in tiers with computing them.")
    add = parser.add_argument
    add(
        "--model",
        default="",
        help="model directory; if not set, the embedded model with a context of 8192",
    )
    add("--tokens", type=int, default=7900, help="tokens in the prompt")
    add("--found", type=int, default=7008, help="tokens of the prompt that the tiers hold")
    add("--store", action="append", default=[], metavar="URL", help="store to measure in addition")
    add(
        "--directory",
        default=None,
        help="directory of the disk tier; if not set, a temporary directory",
    )
    add("--threads", type=int, default=2, help="CPU threads of torch")
    add(
        "--rounds",
        type=int,
        default=3,
        help="rounds per tier; the median is reported (computing: one round)",
    )
    return parser


@contextmanager
def node(args: argparse.Namespace, tiers: Sequence[str]) -> Iterator[Target]:
    """Run a node with these tiers."""
    model = ("--model", args.model) if args.model else ()
    pool = str(2 * args.tokens + 1024)
    argv = ["serve", *model, "--dtype", "bfloat16", "--page-size", str(PAGE)]
    argv += ["--max-total-tokens", pool, "--num-threads", str(args.threads)]
    argv += ["--kv-tier-timeout-ms", "60000", "--kv-tier-min-tokens", "64"]
    argv += [part for tier in tiers for part in ("--kv-tier", tier)]
    with tandem("tiers", argv) as target:
        yield target


def request_token(target: Target, prompt: Sequence[int]) -> Measured:
    """Flush the node's prefix cache, then request one token."""
    urllib.request.urlopen(
        urllib.request.Request(f"{target.url}/flush_cache", method="POST"), timeout=10
    ).close()
    body = {"input_ids": list(prompt), "max_new_tokens": 1, "temperature": 0}
    headers = {"Content-Type": "application/json", "X-Tandem-Timings": "1"}
    request = urllib.request.Request(f"{target.url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        reply: dict[str, Any] = json.load(response)
    details = reply["meta_info"].get("cached_tokens_details", {})
    phases = {phase["name"]: phase["duration_s"] for phase in reply["timings"]["phases"]}
    found = sum(num for name, num in details.items() if name != "device")
    return Measured(reply["timings"]["ttft_s"], phases.get("kv_tier", 0.0), found)


def tiers_of(target: Target) -> list[dict[str, Any]]:
    """Return the load of the tiers as reported by the node."""
    tiers: list[dict[str, Any]] = json.loads(get(f"{target.url}/server_info"))["load"]["tiers"]
    return tiers


def wait_saved(target: Target, num_tokens: int) -> None:
    """Wait until every tier holds this many tokens."""
    deadline = time.monotonic() + SAVED_S
    while any(tier["num_pages"] * PAGE < num_tokens for tier in tiers_of(target)):
        if time.monotonic() > deadline:
            raise SystemExit(f"not all tiers hold the prompt after {SAVED_S} s: {tiers_of(target)}")
        time.sleep(0.1)


def prompt_of(seed: str, num_tokens: int) -> list[int]:
    """Return a prompt that shares no prefix with prompts of other seeds."""
    rng = random.Random(seed)
    return [rng.randrange(100, 4000) for _ in range(num_tokens)]


def measure_computing(args: argparse.Namespace, target: Target) -> dict[int, Measured]:
    """Measure uncached prompts, by length. The longest, whose prefix the tiers later serve, is the last."""
    computed, num_pages = {}, 0
    for length in (*(each for each in LENGTHS if each < args.tokens), args.tokens):
        measured = request_token(target, prompt_of(f"computed {length}", length))
        if measured.num_found:
            raise SystemExit(
                "a tier already holds the prompt: use an empty directory and an empty store"
            )
        computed[length] = measured
        # Wait, because the next request also flushes pages that are not saved yet.
        num_pages += length // PAGE
        wait_saved(target, num_pages * PAGE)
    return computed


def measure_tier(args: argparse.Namespace, target: Target, whole_s: float, name: str) -> str:
    """Measure the prompt with its prefix in a tier; print the results, and return the verdict."""
    prefix = prompt_of(f"computed {args.tokens}", args.found)
    found, ttfts = [], []
    for length in (64, *(length for length in LENGTHS if length < args.found), args.found):
        tail = args.tokens - args.found if length == args.found else PAGE
        rounds = [
            # A different end in each request, so that no tier holds it.
            request_token(target, [*prefix[:length], *prompt_of(f"{name} {length} {i}", tail)])
            for i in range(args.rounds)
        ]
        if any(measured.num_found != length // PAGE * PAGE for measured in rounds):
            raise SystemExit(f"{name} did not return {length} tokens: {rounds}, {tiers_of(target)}")
        found.append((length, statistics.median(measured.tier_s for measured in rounds)))
        ttfts.append(statistics.median(measured.ttft_s for measured in rounds))
    for num, seconds in found:
        print(f"  {name}: {num} tokens in {seconds * 1000:.1f} ms")
    print(
        f"  {name}: {args.tokens} tokens, {args.found} from the tier: first token after {ttfts[-1]:.2f} s"
    )
    return result(f"tiers_{name}_ttft", ttfts[-1] / whole_s, GOAL_TTFT_RATIO, is_lower_better=True)


def main() -> None:
    """Run the benchmark."""
    args = parse(build_parser(), {"tokens": 1200, "found": 1008, "rounds": 1})
    with tempfile.TemporaryDirectory() as temporary:
        disk = f"disk:{args.directory or Path(temporary) / 'kv'}:32GiB"
        shared = [disk, *args.store]
        verdicts = []
        with node(args, ["host:16GiB", *shared]) as target:
            computed = measure_computing(args, target)
            for num, measured in computed.items():
                print(f"  computed: {num} tokens in {measured.ttft_s - measured.tier_s:.2f} s")
            longest = computed[args.tokens]
            whole_s = longest.ttft_s - longest.tier_s
            miss = 100 * longest.tier_s / longest.ttft_s
            print(f"  of that, a miss in {1 + len(shared)} tiers: {longest.tier_s * 1000:.1f} ms")
            verdicts.append(measure_tier(args, target, whole_s, "host"))
        for spec in shared:
            with node(args, [spec]) as target:
                name = tiers_of(target)[0]["name"]
                verdicts.append(measure_tier(args, target, whole_s, name))
        for verdict in verdicts:
            print(verdict)
        print(result("tiers_miss", miss, GOAL_MISS_PERCENT, "percent", is_lower_better=True))


if __name__ == "__main__":
    main()
