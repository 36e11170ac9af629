"""References to a prompt's KV that are reused after its release, with our connector and with NixlConnector.

NixlConnector then answers HTTP 200 with a different prompt's text (vllm-project/vllm#52234). Its count is printed; ours must be 0.
"""

import math
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.with_vllm.models import tiny
from tests.with_vllm.nodes import alone
from tests.with_vllm.servers import FLAGS, NUM_TOKENS, NixlPair, Pair

NUM_ROUNDS, NUM_AT_ONCE, NUM_USES = 20, 5, 200
# 10 prompts of 4 blocks need more than prefill has.
POOL = ("--num-gpu-blocks-override", "40", "--no-enable-prefix-caching")
WAIT_S = 0.3
# NixlConnector's workers busy-wait, so it is slow on few cores.
NIXL_LIMIT_S = 30.0


def make_prompt(rng):
    return tuple(rng.randrange(3, 320) for _ in range(100))


def play(pair, asked, expected, rng):
    """Use references to two prompts ten times; return the kind of each answer."""

    def use(prompt, reference):
        status, answer = pair.decode.ask(prompt, reference)
        if status != 200:
            return "error"
        return "right" if answer["choices"][0]["token_ids"] == expected[prompt] else "wrong"

    def reuse_blocks():
        pair.prefill.complete([make_prompt(rng) for _ in range(10)], None, 1)

    a, b = asked
    with pair.reference(a) as of_a:
        uses = [use(a, of_a), use(a, of_a)]
    reuse_blocks()
    uses += [use(a, of_a), use(b, of_a)]
    with pair.reference(b) as of_b, ThreadPoolExecutor(2) as pool:
        uses += pool.map(use, [b, b], [of_b, of_b])
    with pair.reference(b) as of_b:
        uses += [use(a, of_b), use(b, of_b)]
    reuse_blocks()
    return [*uses, use(b, of_b), use(a, of_b)]


def count(pair, asked, expected, limit_s=math.inf):
    """Play the rounds that start within the limit; return the number of answers of each kind."""
    with pair, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        deadline_s = time.monotonic() + limit_s

        def play_in_time(prompts, seed):
            is_late = time.monotonic() > deadline_s
            return [] if is_late else play(pair, prompts, expected, random.Random(seed))

        rounds = pool.map(play_in_time, asked, range(NUM_ROUNDS))
        return Counter(use for each in rounds for use in each)


@pytest.mark.thorough
def test_reused_room_never_answers_a_different_prompt(tmp_path, capsys):
    model, rng = tiny("experts", tmp_path / "model"), random.Random(52234)
    asked = [(make_prompt(rng), make_prompt(rng)) for _ in range(NUM_ROUNDS)]
    prompts = [prompt for pair in asked for prompt in pair]
    questions = [(prompt, {"max_tokens": NUM_TOKENS}) for prompt in prompts]
    answers = alone(model, questions, tmp_path, *FLAGS)
    expected = dict(zip(prompts, answers, strict=True))
    ours = count(Pair(tmp_path, model, WAIT_S, POOL), asked, expected)
    show(capsys, "TandemConnector", ours)
    assert ours.total() == NUM_USES
    assert ours["wrong"] == 0
    assert ours["right"] >= 3 * NUM_ROUNDS
    try:
        theirs = count(NixlPair(tmp_path, model, WAIT_S, POOL), asked, expected, NIXL_LIMIT_S)
        show(capsys, "NixlConnector", theirs)
    except (AssertionError, OSError) as error:
        with capsys.disabled():
            sys.stdout.write(f"\nNixlConnector did not serve: {str(error).strip()[-300:]}\n")


def show(capsys, name, seen):
    with capsys.disabled():
        wrong, errors = seen["wrong"], seen["error"]
        sys.stdout.write(f"\n{name}: {wrong} wrong of {seen.total()}, {errors} errors\n")
