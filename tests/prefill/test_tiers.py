"""A prefill node that waits for a grant and for its prefix from tiers, in any order."""

import pytest

from tandem.wire.errors import EngineFailed
from tests.hand_off_rig import Pair, prompt_of

PROMPT = prompt_of(100)
IN_WHOLE_PAGES = 96


@pytest.fixture(scope="module")
def shared_pair(tiny_model):
    """A pair whose prefill node has the KV of PROMPT in its tiers only, and the expected answer."""
    made = Pair(tiny_model("llama"), "shm", has_tiers=True)
    made.start("before", PROMPT, max_new_tokens=9)
    made.run_with_tiers_until(lambda: made.decode_answers.finishes["before"])
    made.run_with_tiers_until(lambda: not made.prefill_tiers.saving)
    made.expected = made.decode_answers.tokens["before"]
    yield made
    made.close()


@pytest.fixture
def pair(shared_pair):
    shared_pair.start_anew()
    yield shared_pair
    shared_pair.run_with_tiers_until(shared_pair.all_pages_are_back)


def finished(pair, name) -> bool:
    assert not pair.prefill_answers.errors
    return bool(pair.decode_answers.finishes[name])


def granted(pair) -> bool:
    return any(half.may_compute for half in pair.prefill._by_room.values())


def test_granted_prompt_waits_for_its_prefix_and_starts_from_it(pair):
    pair.start("a", PROMPT, max_new_tokens=9)
    pair.run_until(lambda: granted(pair))
    assert pair.prefill.load().num_running == 0
    assert pair.prefill.load().num_waiting == 1
    pair.run_with_tiers_until(lambda: finished(pair, "a"))
    assert pair.decode_answers.tokens["a"] == pair.expected
    assert pair.prefill_answers.by_tier["a"] == {"host": IN_WHOLE_PAGES}
    assert pair.prefill_answers.phases["a"][:3] == ["reserve", "kv_tier", "prefill_queue"]


def test_prefix_fetched_before_the_grant_causes_no_wait(pair):
    pair.prefill.start(*_prefill_half(pair, "a"))
    for _ in range(3):
        pair.prefill_tiers.answer_all()
        pair.prefill.poll()
    assert pair.prefill_engine.counts().cached == IN_WHOLE_PAGES // 8
    pair.decode.start(*pair.waiting_decode)
    pair.run_with_tiers_until(lambda: finished(pair, "a"))
    assert pair.decode_answers.tokens["a"] == pair.expected
    assert pair.prefill_answers.phases["a"][:2] == ["reserve", "prefill_queue"]


@pytest.mark.parametrize("is_placing", [False, True])
@pytest.mark.parametrize("is_granted", [False, True])
def test_request_cancelled_during_fetch_leaves_no_pages(pair, is_placing, is_granted):
    pair.prefill.start(*_prefill_half(pair, "a"))
    if is_granted:
        pair.decode.start(*pair.waiting_decode)
        pair.run_until(lambda: granted(pair))
    if is_placing:
        (number,) = pair.prefill_tiers.looking
        pair.prefill_tiers.answer_fetch(number)
        pair.prefill.poll()
        assert pair.prefill_engine.counts().held == IN_WHOLE_PAGES // 8
    pair.prefill.cancel(pair.ticket("a"))
    pair.decode.cancel(pair.ticket("a"))
    pair.run_until(lambda: not pair.prefill._by_room)
    assert pair.prefill_engine.counts().held == (IN_WHOLE_PAGES // 8 if is_placing else 0)


def test_hand_over_ends_requests_that_wait_for_tiers(pair):
    pair.start("a", PROMPT, max_new_tokens=9)
    pair.run_until(lambda: granted(pair))
    pair.prefill.hand_over(EngineFailed("as a drain does"))
    pair.run_until(lambda: not pair.prefill._by_room)
    assert pair.prefill_tiers.looking == {}


def _prefill_half(pair, name):
    """Return the message that starts prefill's half; that of decode is `pair.waiting_decode`."""
    started = {}
    real = pair.prefill.start, pair.decode.start
    pair.prefill.start = lambda *args: started.update(prefill=args)
    pair.decode.start = lambda *args: started.update(decode=args)
    pair.start(name, PROMPT, max_new_tokens=9)
    pair.prefill.start, pair.decode.start = real
    pair.waiting_decode = started["decode"]
    return started["prefill"]
