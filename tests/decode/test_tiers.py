"""A decode node with tiers: it asks them for the prompts that it computes itself, and for no others."""

import pytest

from tests.decode.test_local import start_local
from tests.hand_off_rig import Pair, prompt_of

PROMPT = prompt_of(100)


@pytest.fixture(scope="module")
def shared_pair(tiny_model):
    """A pair whose decode has the KV of PROMPT in its tiers alone."""
    made = Pair(tiny_model("llama"), "shm", has_tiers=True)
    start_local(made, "before", PROMPT, max_new_tokens=9)
    made.run_with_tiers_until(lambda: made.decode_answers.finishes["before"])
    made.run_with_tiers_until(lambda: not made.decode_tiers.saving)
    yield made
    made.close()


@pytest.fixture
def pair(shared_pair):
    shared_pair.start_anew()
    yield shared_pair
    shared_pair.run_with_tiers_until(shared_pair.all_pages_are_back)


def test_a_prompt_computed_here_comes_from_tiers_and_others_overtake_it(pair):
    request = start_local(pair, "a", PROMPT, max_new_tokens=9)
    start_local(pair, "short", prompt_of(7), max_new_tokens=3)
    pair.run_until(lambda: pair.decode_answers.finishes["short"])
    assert pair.decode.load().num_waiting == 1
    pair.run_with_tiers_until(lambda: pair.decode_answers.finishes["a"])
    assert pair.decode_answers.tokens["a"] == pair.alone(request)["a"]
    assert pair.decode_answers.by_tier["a"] == {"host": 96}
    assert pair.decode_answers.phases["a"][0] == "kv_tier"


def test_a_hand_off_asks_no_tier_of_decode(pair):
    pair.start("a", PROMPT, max_new_tokens=9)
    assert pair.decode_tiers.looking == {}
    pair.run_with_tiers_until(lambda: pair.decode_answers.finishes["a"])


@pytest.mark.parametrize("is_placing", [False, True])
def test_a_prompt_cancelled_on_its_way_from_the_tiers_leaves_no_page(pair, is_placing):
    start_local(pair, "a", PROMPT, max_new_tokens=9)
    if is_placing:
        (number,) = pair.decode_tiers.looking
        pair.decode_tiers.answer_fetch(number)
        pair.decode.poll()
    pair.decode.cancel(pair.ticket("a"))
    assert pair.decode.load().num_waiting == 0
    assert pair.decode_engine.counts().held == (12 if is_placing else 0)
