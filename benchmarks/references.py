"""Answers to references that no longer hold, through Tandem's connector and vLLM's own, compared with one vLLM process.

A *reference* is what a proxy gives decode to find a prompt's KV on prefill. Two `vllm serve` processes get 200 bad uses of
each kind. An answer with status 200 must be the prompt's own. The kinds:

- *unknown*: prefill never had the request.
- *out of range*: blocks that prefill does not have. Only NixlConnector lets a client name blocks.
- *consumed*: the same prompt asks a second time.
- *stale*: a different prompt asks after prefill has reused the blocks.
- *expired*: decode asks after prefill's time limit.
- *late write*: prefill is stopped, decode's client goes away, other requests take decode's blocks, prefill continues. The
  answers of those requests count.

The first five are those of vllm-project/vllm#52234, the last is that of sgl-project/sglang#35049. Run the benchmark in the
environment of `make test-vllm`. For MooncakeConnector, add `pip install --no-deps mooncake-transfer-engine-non-cuda`.
"""

import argparse
import itertools
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

from benchmarks.rig import parse, parser_of, result
from tests.with_vllm.models import TINY, tiny
from tests.with_vllm.nodes import alone
from tests.with_vllm.servers import FLAGS, NUM_TOKENS, MooncakePair, NixlPair, Pair

NUM_PROMPTS, PROMPT_TOKENS, DONOR_TOKENS = 40, 100, 900
NUM_VICTIM_TOKENS = 128
# Prompts have four blocks of a layer group, so 20 of them need more than prefill has, and so do eight answers beside a
# long prompt on decode.
POOL = ("--num-gpu-blocks-override", "72", "--no-enable-prefix-caching")
NUM_AT_ONCE, NUM_REUSING, NUM_VICTIMS = 5, 20, 8
# How long prefill is stopped. The victims' answers take longer.
HOLD_S, MAX_DELAY_S = 0.5, 0.1
KINDS = ("unknown", "out_of_range", "consumed", "stale", "expired", "late_write")
# With prefill's time limit in seconds. NixlConnector renews its leases in whole seconds, six times in one lease.
PAIRS: Mapping[str, tuple[type[Pair], float]] = {
    "tandem": (Pair, 1.0),
    "nixl": (NixlPair, 6.0),
    "mooncake": (MooncakePair, 6.0),
}

Prompt = tuple[int, ...]


class Uses:
    """Bad uses of references to a running pair of servers. Each method returns the kinds of the answers that count.

    Args:
        expected: Tokens of a single vLLM process by prompt.
    """

    def __init__(self, pair: Pair, expected: Mapping[Prompt, list[int]]) -> None:
        self._pair, self._expected = pair, expected

    def unknown(self, rng: random.Random) -> list[str]:
        """Ask for a request that prefill never had."""
        return self._with_other(rng, self._pair.unknown)

    def out_of_range(self, rng: random.Random) -> list[str]:
        """Ask for blocks that prefill does not have."""
        return self._with_other(rng, self._pair.out_of_range)

    def _with_other(self, rng: random.Random, change: Callable[[Any], Any]) -> list[str]:
        """Ask with a changed reference, then with the right one, which frees prefill's blocks."""
        prompt = self._prompt(rng)
        with self._pair.reference(prompt) as params:
            uses = [self._use(prompt, change(params))]
            self._use(prompt, params)
        return uses

    def consumed(self, rng: random.Random) -> list[str]:
        """Ask a second time."""
        prompt = self._prompt(rng)
        with self._pair.reference(prompt) as params:
            self._use(prompt, params)
            return [self._use(prompt, params)]

    def stale(self, rng: random.Random) -> list[str]:
        """Ask with a different prompt after prefill has reused the blocks."""
        one, other = rng.sample(sorted(self._expected), 2)
        with self._pair.reference(one) as params:
            self._use(one, params)
        reusing = [random_prompt(rng, PROMPT_TOKENS) for _ in range(NUM_REUSING)]
        self._pair.prefill.complete(reusing, None, 1)
        return [self._use(other, params)]

    def expired(self, rng: random.Random) -> list[str]:
        """Ask after prefill's time limit."""
        prompt = self._prompt(rng)
        with self._pair.reference(prompt) as params:
            time.sleep(self._pair.limit_s + 1)
            return [self._use(prompt, params)]

    def late_write(self, rng: random.Random) -> list[str]:
        """Stop prefill, abandon decode's request, and ask for answers that take its blocks before prefill continues."""
        prefill, delay_s = (
            self._pair.prefill.process,
            rng.choice((0.0, rng.uniform(0, MAX_DELAY_S))),
        )
        donor, victims = (
            random_prompt(rng, DONOR_TOKENS),
            rng.sample(sorted(self._expected), NUM_VICTIMS),
        )
        with self._pair.reference(donor) as params, ThreadPoolExecutor(NUM_VICTIMS) as pool:
            try:
                if not delay_s:
                    prefill.signal_tree(signal.SIGSTOP)
                with self._pair.decode.asking(donor, params):
                    time.sleep(delay_s or MAX_DELAY_S)
                    prefill.signal_tree(signal.SIGSTOP)
                answers = [
                    pool.submit(self._use, each, None, NUM_VICTIM_TOKENS) for each in victims
                ]
                time.sleep(HOLD_S)
            finally:
                prefill.signal_tree(signal.SIGCONT)
            return [each.result() for each in answers]

    def _prompt(self, rng: random.Random) -> Prompt:
        return rng.choice(sorted(self._expected))

    def _use(self, prompt: Prompt, params: Any, num_tokens: int = NUM_TOKENS) -> str:
        status, answer = self._pair.decode.ask(prompt, params, num_tokens)
        if status != HTTPStatus.OK:
            return "error"
        is_right = answer["choices"][0]["token_ids"] == self._expected[prompt][:num_tokens]
        return "right" if is_right else "wrong"


def random_prompt(rng: random.Random, num_tokens: int) -> Prompt:
    """Return random token ids."""
    return tuple(rng.randrange(3, 320) for _ in range(num_tokens))


def expect(model: Path, directory: Path) -> dict[Prompt, list[int]]:
    """Return prompts and the tokens that a single vLLM process generates for them."""
    rng = random.Random(52234)
    prompts = [random_prompt(rng, PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
    asked = [(prompt, {"max_tokens": NUM_VICTIM_TOKENS}) for prompt in prompts]
    return dict(zip(prompts, alone(model, asked, directory, *FLAGS), strict=True))


def count(uses: Uses, kind: str, num: int) -> Counter[str]:
    """Return how many answers of each kind `num` bad uses got."""
    # Only one at a time can stop prefill.
    num_at_once = 1 if kind == "late_write" else NUM_AT_ONCE
    seen: Counter[str] = Counter()
    with ThreadPoolExecutor(num_at_once) as pool:
        for seed in itertools.count():
            if seen.total() >= num:
                return seen
            rngs = [random.Random(seed * num_at_once + number) for number in range(num_at_once)]
            for answers in pool.map(getattr(uses, kind), rngs):
                seen.update(answers)
    raise AssertionError


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = parser_of("references", "Count wrong answers to references that no longer hold.")
    add = parser.add_argument
    add("--only", nargs="+", default=[*PAIRS], choices=PAIRS, help="connectors to test")
    add("--kinds", nargs="+", default=[*KINDS], choices=KINDS, help="bad uses to test")
    add("--uses", type=int, default=200, help="uses per connector and kind")
    add("--model", default="windows in some layers", choices=TINY, help="tiny random model")
    return parser


def main() -> None:
    """Run the benchmark."""
    quick = {"uses": 10, "only": ["tandem"], "kinds": ["consumed", "late_write"]}
    args = parse(build_parser(), quick)
    wrong: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny(args.model, Path(scratch) / "model")
        expected = expect(model, Path(scratch))
        print(f"{'connector':<10} {'use':<13} {'right':>6} {'wrong':>6} {'errors':>7} {'s':>6}")
        for name in args.only:
            directory = Path(scratch) / name
            directory.mkdir()
            make, limit_s = PAIRS[name]
            with make(directory, model, limit_s, POOL) as pair:
                for kind in args.kinds:
                    if kind == "out_of_range" and not pair.names_blocks:
                        print(f"{name:<10} {kind:<13} clients cannot name blocks")
                        continue
                    start_s = time.monotonic()
                    seen = count(Uses(pair, expected), kind, args.uses)
                    wrong[name] += seen["wrong"]
                    print(
                        f"{name:<10} {kind:<13} {seen['right']:>6} {seen['wrong']:>6}"
                        f" {seen['error']:>7} {time.monotonic() - start_s:>6.0f}",
                        flush=True,
                    )
    if "tandem" in args.only:
        print(result("references_wrong", wrong["tandem"], 0, "answers", is_lower_better=True))


if __name__ == "__main__":
    main()
