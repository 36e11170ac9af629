"""A decode node with tiers: it searches them only for prompts that it computes itself."""

import pytest

from tests.decode.test_local import start_local
from tests.hand_off_rig import Pair, prompt_of

PROMPT = prompt_of(100)


@pytest.fixture(scope="module")
def shared_pair(tiny_model):
    """A pair whose decode node has the KV of PROMPT in its tiers only."""
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


def test_local_prompt_is_fetched_from_tiers_while_others_overtake_it(pair):
    request = start_local(pair, "a", PROMPT, max_new_tokens=9)
    start_local(pair, "short", prompt_of(7), max_new_tokens=3)
    pair.run_until(lambda: pair.decode_answers.finishes["short"])
    assert pair.decode.load().num_waiting == 1
    pair.run_with_tiers_until(lambda: pair.decode_answers.finishes["a"])
    assert pair.decode_answers.tokens["a"] == pair.alone(request)["a"]
    assert pair.decode_answers.by_tier["a"] == {"host": 96}
    assert pair.decode_answers.phases["a"][0] == "kv_tier"


def test_hand_off_does_not_search_the_tiers_of_decode(pair):
    pair.start("a", PROMPT, max_new_tokens=9)
    assert pair.decode_tiers.looking == {}
    pair.run_with_tiers_until(lambda: pair.decode_answers.finishes["a"])


@pytest.mark.parametrize("is_placing", [False, True])
def test_prompt_cancelled_during_fetch_leaves_no_pages(pair, is_placing):
    start_local(pair, "a", PROMPT, max_new_tokens=9)
    if is_placing:
        (number,) = pair.decode_tiers.looking
        pair.decode_tiers.answer_fetch(number)
        pair.decode.poll()
    pair.decode.cancel(pair.ticket("a"))
    assert pair.decode.load().num_waiting == 0
    assert pair.decode_engine.counts().held == (12 if is_placing else 0)
