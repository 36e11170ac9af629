"""Whole requests on a decode node next to hand-offs: the same rules, and the tokens of one engine."""

import pytest
from msgspec.structs import replace

from tandem.wire.errors import DeadlinePassed, EngineFailed, InvalidRequest
from tandem.wire.generation import GenerateRequest, LogprobOptions, RequestId, SamplingParams
from tandem.wire.messages import StartColocated
from tests.hand_off_rig import NUM_PAGES, PAGE, BrokenRunner, Pair, prompt_of


@pytest.fixture(scope="module")
def shared_pair(tiny_model):
    made = Pair(tiny_model("qwen3"), "shm")
    yield made
    made.close()


@pytest.fixture
def pair(shared_pair):
    """A pair without state of earlier tests: caches and answers are empty."""
    yield shared_pair
    shared_pair.start_anew()


def start_local(
    pair, name, prompt, *, priority=0, logprobs=None, deadline_s=None, **sampling
) -> GenerateRequest:
    request = GenerateRequest(
        request_id=RequestId(name),
        prompt_ids=prompt,
        sampling=SamplingParams(**{"temperature": 0, "ignore_eos": True, **sampling}),
        priority=priority,
        logprobs=logprobs,
        deadline_s=deadline_s,
    )
    pair.decode.start(pair.ticket(name), StartColocated(request=request))
    return request


def finished(pair, names) -> bool:
    assert not pair.decode_answers.errors
    return all(pair.decode_answers.finishes[name] for name in names)


def test_whole_requests_and_hand_offs_share_a_small_pool_with_equal_tokens(pair):
    seeded = {"max_new_tokens": 36, "temperature": 0.7}
    requests = {"handed": pair.start("handed", prompt_of(50), seed=50, **seeded)}
    pair.run_until(lambda: pair.decode_answers.tokens["handed"])
    # Each grows from 2 to 6 of the 60 pages: they wait, grow and are retracted.
    for i in range(12):
        prompt = prompt_of(100)[50 + i : 60 + i]
        requests[str(i)] = start_local(pair, str(i), prompt, seed=i, **seeded)
    pair.run_until(lambda: finished(pair, requests))
    assert pair.decode.load().num_retracted > 0
    expected = pair.alone(*requests.values())
    assert {name: pair.decode_answers.tokens[name] for name in requests} == expected


def test_whole_request_needs_no_prefill_and_caches_its_turn(pair):
    prompt = prompt_of(45)
    request = start_local(pair, "a", prompt, max_new_tokens=12)
    pushed = pair.prefill.load().pushed_bytes
    pair.run_until(lambda: finished(pair, "a"))
    expected = pair.alone(request)["a"]
    assert pair.decode_answers.tokens["a"] == expected
    before = pair.decode.load()
    start_local(pair, "b", prompt + expected + [5], max_new_tokens=2)
    pair.run_until(lambda: finished(pair, "ab"))
    now = pair.decode.load()
    assert now.cached_tokens - before.cached_tokens == 56  # full pages of 45 + 11 tokens
    assert pair.prefill.load().pushed_bytes == pushed


def test_replayed_answer_continues_where_it_stopped(pair):
    request = start_local(pair, "a", prompt_of(20), max_new_tokens=10, temperature=1, seed=3)
    expected = pair.alone(request)["a"]
    pair.run_until(lambda: finished(pair, "a"))
    rest = replace(
        request,
        request_id=RequestId("b"),
        prompt_ids=request.prompt_ids + expected[:4],
        num_prior_tokens=4,
    )
    pair.decode_answers.tokens["b"] = expected[:4]
    pair.decode.start(pair.ticket("b"), StartColocated(request=rest))
    pair.run_until(lambda: finished(pair, "ab"))
    assert pair.decode_answers.tokens["b"] == expected


def test_deadline_ends_waiting_requests_only(pair):
    start_local(pair, "begun", prompt_of(20), max_new_tokens=3, deadline_s=0)
    pair.decode.step()
    start_local(pair, "waiting", prompt_of(20), max_new_tokens=3, deadline_s=0)
    pair.decode.poll()
    assert isinstance(pair.decode_answers.errors.pop("waiting"), DeadlinePassed)
    assert pair.decode.tickets() == [pair.ticket("begun")]
    pair.run_until(lambda: finished(pair, ["begun"]))


def test_failed_forward_fails_its_requests_and_loses_no_pages(pair):
    launcher = pair.decode_engine._launcher
    healthy, launcher._runner = launcher._runner, BrokenRunner()
    start_local(pair, "a", prompt_of(60), max_new_tokens=8)
    with pytest.raises(ZeroDivisionError):
        pair.run_until(lambda: False)
    pair.decode.fail_all(EngineFailed("as the loop does"))
    launcher._runner = healthy
    assert isinstance(pair.decode_answers.errors.pop("a"), EngineFailed)
    pair.run_until(pair.all_pages_are_back)


def test_requests_wait_for_pages_by_priority_and_arrival(pair):
    # No other request fits next to the first, and no two of them fit together.
    half = NUM_PAGES * PAGE // 2
    start_local(pair, "first", prompt_of(half), max_new_tokens=2)
    for i, name in enumerate(("local", "urgent", "late")):
        own = prompt_of(half + 30)[i + 1 :]
        start_local(pair, name, own, priority=int(name == "urgent"), max_new_tokens=2)
    load = pair.decode.load()
    assert (load.num_running, load.num_waiting) == (1, 3)
    assert load.queued_tokens == half + sum(half + 29 - i for i in range(3))
    names = ("first", "urgent", "local", "late")
    pair.run_until(lambda: finished(pair, names))
    assert tuple(pair.decode_answers.finishes) == names
    assert pair.decode.load().queued_tokens == 0


def test_prompt_received_by_hand_off_is_not_recomputed(pair):
    prompt = prompt_of(49)
    before = pair.decode.load().cached_tokens
    pair.start("handed", prompt, max_new_tokens=3)
    start_local(pair, "local", prompt, max_new_tokens=3)
    pair.run_until(lambda: finished(pair, ("handed", "local")))
    assert pair.decode_answers.tokens["handed"] == pair.decode_answers.tokens["local"]
    assert pair.decode.load().cached_tokens - before == 48


def test_prompt_logprobs_are_sent_once_before_the_first_token(pair):
    wanted = LogprobOptions(prompt_start=0)
    start_local(pair, "a", prompt_of(60), logprobs=wanted, max_new_tokens=3)
    pair.run_until(lambda: finished(pair, "a"))
    assert pair.decode_answers.prompt_positions["a"] == list(range(60))


def test_request_that_can_never_run_is_rejected_at_once(pair):
    with pytest.raises(InvalidRequest):
        start_local(pair, "a", [])
    assert pair.decode.tickets() == []
