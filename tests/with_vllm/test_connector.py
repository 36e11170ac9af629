"""The connector in an unmodified `vllm serve`, driven by a user's own proxy."""

import random
import threading

import pytest

from tests.with_vllm.models import tiny
from tests.with_vllm.nodes import alone
from tests.with_vllm.servers import FLAGS, NUM_TOKENS, Pair


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny("experts", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory):
    with Pair(tmp_path_factory.mktemp("servers"), model, limit_s=3) as running:
        yield running


def apart(pair, prompt_ids, room):
    """Send both halves concurrently; return decode's answer."""
    params = {"bootstrap_room": room}
    half = threading.Thread(target=pair.prefill.complete, args=(prompt_ids, params, 1))
    half.start()
    answer = pair.decode.complete(prompt_ids, pair.source(room))
    half.join()
    return answer


def test_two_servers_match_one_vllm(pair, model, tmp_path):
    rng = random.Random(1)
    asked = [[rng.randrange(3, 320) for _ in range(length)] for length in (1, 31, 32, 33, 200)]
    flags = ("--max-num-seqs", "64", *FLAGS)
    backwards = [ids[::-1] for ids in asked]  # decode has no blocks of them
    serial = [[5, *ids] for ids in backwards]
    questions = [(ids, {"max_tokens": NUM_TOKENS}) for ids in (*asked, *backwards, *serial)]
    answers = alone(model, questions, tmp_path, *flags)
    expected, others = answers[: len(asked)], questions[len(asked) :]
    assert [apart(pair, ids, rng.getrandbits(62)) for ids in asked] == expected
    for (ids, _), tokens in zip(others, answers[len(asked) :], strict=True):
        num_before = pair.decode.num_received()
        with pair.transfer(ids, is_serial=ids in serial) as params:
            assert pair.decode.complete(ids, params) == tokens
        assert pair.decode.num_received() - num_before == len(ids) - 1
    # A used room refers to no blocks: the prompt is recomputed and never gets the KV of a different prompt.
    room = rng.getrandbits(62)
    assert apart(pair, asked[3], room) == expected[3]
    assert apart(pair, asked[2], rng.getrandbits(62)) == expected[2]
    assert pair.decode.complete(asked[4], pair.source(room)) == expected[4]
