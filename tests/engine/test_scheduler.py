"""Admission, growth, retraction, sharing and overlap, with a runner whose tokens give any mistake away."""

import random
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.core import Engine
from tandem.engine.request import ActiveRequest, Stage
from tandem.engine.scheduler import MAX_LOGPROB_ROWS, next_chunks
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import (
    GenerateRequest,
    Grammar,
    LogprobsWanted,
    RequestId,
    SamplingParams,
)
from tests.engine.toy_runner import EOS, toy_answer, toy_engine
from tests.one_engine import ask, ask_remote, run

OVERLAP = pytest.mark.parametrize("is_overlapped", [False, True])


def assert_all_returned(engine: Engine) -> None:
    counts = engine.counts()
    assert counts.free + counts.cached == counts.total
    assert engine._scheduler.slots.num_used == 0
    assert not engine._scheduler._computing


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(2, 50) for _ in range(length)]


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt length
        st.integers(0, 2),  # seed: few, so that prefixes are shared
        st.integers(1, 20),  # new tokens
        st.integers(-1, 1),  # priority
        st.integers(0, 40),  # the step before which it comes
        st.one_of(st.none(), st.integers(0, 40)),  # the step before which it is cancelled
    ),
    min_size=1,
    max_size=12,
)


@given(
    REQUESTS,
    st.integers(14, 40),
    st.booleans(),
    st.booleans(),
    st.integers(1, 6),
)
def test_whatever_comes_when_every_answer_is_right_and_every_page_returns(
    asked, num_pages, is_overlapped, has_prefix_cache, max_running
):
    engine, _ = toy_engine(
        num_pages,
        is_overlapped=is_overlapped,
        is_prefix_cache_enabled=has_prefix_cache,
        max_running_requests=max_running,
        chunked_prefill_size=9,
    )
    out: dict[str, list[int]] = {}
    running: dict[int, ActiveRequest] = {}
    for step in range(41):
        for i, (length, seed, num_new, priority, begin, _) in enumerate(asked):
            if begin == step:
                request = ask(
                    prompt_of(length, seed), str(i), max_new_tokens=num_new, priority=priority
                )
                running[i] = engine.submit(request)
        for i, (*_, end) in enumerate(asked):
            if end == step and i in running:
                engine.cancel(running[i])
        for token in engine.step().tokens:
            out.setdefault(token.request.request.request_id, []).append(token.token)
        engine.cache.check_integrity()
    run(engine, out)
    for i, (length, seed, num_new, _, begin, end) in enumerate(asked):
        expected = toy_answer(prompt_of(length, seed), num_new)
        got = out.get(str(i), [])
        is_cancelled = end is not None and end >= begin
        assert got == expected[: len(got)] if is_cancelled else got == expected
    assert_all_returned(engine)


@OVERLAP
def test_a_retracted_request_goes_on_with_the_tokens_it_would_have_had(is_overlapped):
    engine, _ = toy_engine(12, is_overlapped=is_overlapped, is_prefix_cache_enabled=False)
    engine._scheduler.growth_share = 0.0
    for i in range(4):
        engine.submit(ask(prompt_of(8, i), str(i), max_new_tokens=30))
    answers = run(engine)
    assert engine.num_retracted > 0
    assert answers == {str(i): toy_answer(prompt_of(8, i), 30) for i in range(4)}
    assert_all_returned(engine)


def test_the_youngest_is_retracted_and_the_oldest_never():
    engine, _ = toy_engine(12, is_prefix_cache_enabled=False)
    engine._scheduler.growth_share = 0.0
    made = [engine.submit(ask(prompt_of(8, i), str(i), max_new_tokens=30)) for i in range(4)]
    retracted = set()
    while engine.has_work:
        engine.step()
        waiting = set(engine._scheduler.waiting)
        retracted |= {i for i, active in enumerate(made) if active in waiting}
    assert 3 in retracted
    assert 0 not in retracted


def test_a_low_priority_gives_its_pages_to_a_high_one():
    engine, _ = toy_engine(12, is_prefix_cache_enabled=False)
    engine._scheduler.growth_share = 0.0
    low = engine.submit(ask(prompt_of(8, 1), "low", max_new_tokens=36, priority=-1))
    answers = {"low": [token.token for token in engine.step().tokens]}
    high = engine.submit(ask(prompt_of(8, 2), "high", max_new_tokens=36, priority=1))
    retracted = []
    while engine.has_work:
        for token in engine.step().tokens:
            answers.setdefault(token.request.request.request_id, []).append(token.token)
        retracted += [a for a in (low, high) if a in engine._scheduler.waiting]
    assert low in retracted
    assert high not in retracted
    assert answers["low"] == toy_answer(prompt_of(8, 1), 36)


def test_the_highest_priority_is_admitted_first_and_among_equals_the_first_come():
    engine, _ = toy_engine(40, max_running_requests=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", -1)):
        engine.submit(ask(prompt_of(4), name, priority=priority, max_new_tokens=1))
    order = []
    while engine.has_work:
        order += [token.request.request.request_id for token in engine.step().tokens]
    assert order == ["c", "a", "b", "d"]


@OVERLAP
def test_a_pool_filled_to_its_last_page_serves_to_the_end(is_overlapped):
    engine, _ = toy_engine(5, is_overlapped=is_overlapped)
    active = engine.submit(ask(prompt_of(10), max_new_tokens=100))
    assert active.max_tokens == 20
    assert run(engine)["r"] == toy_answer(prompt_of(10), 10)
    assert_all_returned(engine)


@OVERLAP
def test_one_prompt_asked_many_times_at_once_is_computed_once(is_overlapped):
    engine, runner = toy_engine(100, is_overlapped=is_overlapped)
    prompt = prompt_of(41)
    made = [engine.submit(ask(prompt, str(i), max_new_tokens=5)) for i in range(8)]
    answers = run(engine)
    assert answers == {str(i): toy_answer(prompt, 5) for i in range(8)}
    assert [active.num_cached for active in made] == [0] + [40] * 7
    assert runner.num_rows <= 41 + 7 * 1 + 8 * 5
    assert_all_returned(engine)


def test_whoever_waits_for_anothers_prompt_computes_it_when_that_is_cancelled():
    engine, _ = toy_engine(100, chunked_prefill_size=8)
    first, second = (engine.submit(ask(prompt_of(41), name, max_new_tokens=2)) for name in "ab")
    engine.step()
    assert second.waits_for in engine._scheduler._computing
    engine.cancel(first)
    assert run(engine)["b"] == toy_answer(prompt_of(41), 2)
    assert_all_returned(engine)


def test_prompts_of_different_salts_share_nothing():
    engine, _ = toy_engine(100)
    made = [
        engine.submit(ask(prompt_of(41), salt, salt=salt, max_new_tokens=2)) for salt in ("x", "y")
    ]
    run(engine)
    assert [active.num_cached for active in made] == [0, 0]


def test_on_decode_one_prompt_asked_many_times_is_granted_once():
    engine, _ = toy_engine(100)
    first, second = (
        ask_remote(engine, ask(prompt_of(41), name, max_new_tokens=2)) for name in "ab"
    )
    assert (first.stage, second.stage) == (Stage.RESERVED, Stage.WAITING)
    assert second.waits_for in engine._scheduler._computing
    engine.land(first, first_token=5, seed=0)
    engine.admit()
    assert second.stage is Stage.RESERVED
    assert (len(first.granted_pages), len(second.granted_pages)) == (0, 1)
    assert second.num_computed == 40


def test_an_answer_that_ends_while_the_next_forward_runs_takes_nothing_back():
    engine, runner = toy_engine(20, is_overlapped=True, is_prefix_cache_enabled=False)
    answer = toy_answer(prompt_of(7), 3)
    assert len(set(answer)) == 3
    engine.submit(ask(prompt_of(7), max_new_tokens=50, stop_token_ids=[answer[2]]))
    assert run(engine)["r"] == answer
    assert runner.num_rows == 7 + 3  # the third was under way when the stop was read
    assert_all_returned(engine)


@OVERLAP
def test_penalties_see_the_token_before(is_overlapped):
    plain, _ = toy_engine(40)
    plain.submit(ask(prompt_of(6), max_new_tokens=12, frequency_penalty=2.0))
    expected = run(plain)["r"]
    engine, _ = toy_engine(40, is_overlapped=is_overlapped)
    engine.submit(ask(prompt_of(6), max_new_tokens=12, frequency_penalty=2.0))
    engine.submit(ask(prompt_of(7), "other", max_new_tokens=12))
    assert run(engine)["r"] == expected


def test_an_end_of_sequence_is_not_chosen_before_the_minimum_and_then_ends_it():
    engine, _ = toy_engine(40)
    bias = {EOS: 100.0}
    engine.submit(
        ask(prompt_of(6), max_new_tokens=9, min_new_tokens=3, logit_bias=bias, ignore_eos=False)
    )
    answer = run(engine)["r"]
    assert answer == [*toy_answer(prompt_of(6), 3), EOS]


@OVERLAP
def test_new_prompts_are_computed_in_small_chunks_while_others_are_answered(is_overlapped):
    engine, runner = toy_engine(
        40, is_overlapped=is_overlapped, chunked_prefill_size=32, local_prefill_tokens=5
    )
    engine.submit(ask(prompt_of(60), "first", max_new_tokens=20, ignore_eos=True))
    out: dict[str, list[int]] = {}
    while not out:
        out = {token.request.request.request_id: [token.token] for token in engine.step().tokens}
    assert runner.largest == 32
    runner.largest = 0
    engine.submit(ask(prompt_of(30), "second", max_new_tokens=2, ignore_eos=True))
    run(engine, out)
    assert runner.largest == 6
    assert out["second"] == toy_answer(prompt_of(30), 2)


# ── what a turn leaves for the next ──────────────────────────────────────────────────────────────


@OVERLAP
@pytest.mark.parametrize("has_stop_id", [False, True])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_turns_that_end_beside_a_page_border_have_the_tokens_of_an_engine_without_a_cache(
    over, has_stop_id, is_overlapped
):
    engine, _ = toy_engine(60, is_overlapped=is_overlapped)
    tokens = prompt_of(6)
    for end in (16, 32, 36, 48):  # borders of pages of 4 tokens
        answer = toy_answer(tokens, end + over - len(tokens))
        is_clear = has_stop_id and answer.index(answer[-1]) == len(answer) - 1
        stop = {"max_new_tokens": 99, "stop_token_ids": [answer[-1]]} if is_clear else {}
        engine.submit(ask(tokens, **{"max_new_tokens": len(answer), **stop}))
        assert run(engine)["r"] == answer
        # The KV of the last token was never computed.
        tokens += answer
        match = engine.cache.match(tokens)
        assert match.num_tokens == (len(tokens) - 1) // 4 * 4
        engine.cache.release(match.page_ids)
        tokens += prompt_of(3, seed=end)
    assert_all_returned(engine)


@pytest.mark.parametrize("num_chunk", [7, 8, 9])
def test_of_a_prompt_that_is_cancelled_only_what_was_computed_is_cached(num_chunk):
    engine, _ = toy_engine(20, chunked_prefill_size=num_chunk, is_overlapped=False)
    active = engine.submit(ask(prompt_of(20), max_new_tokens=5))
    engine.step()
    engine.cancel(active)
    assert engine.cache.match(prompt_of(20)).num_tokens == num_chunk // 4 * 4


@pytest.mark.parametrize("num_prompt", [7, 8, 9])
def test_nothing_that_a_failed_forward_was_to_compute_is_cached(num_prompt, monkeypatch):
    engine, _ = toy_engine(20, is_overlapped=True)
    launch = engine._launcher.launch
    monkeypatch.setattr(engine._launcher, "launch", lambda *given: failing(launch(*given)))
    active = engine.submit(ask(prompt_of(num_prompt), max_new_tokens=5))
    with pytest.raises(RuntimeError, match="out of memory"):
        while engine.has_work:
            engine.step()
    engine.cancel(active)
    with pytest.raises(RuntimeError, match="out of memory"):  # the forward launched meanwhile
        while engine.has_work:
            engine.step()
    assert engine.counts().free == 20


def failing(_read):
    def read():
        raise RuntimeError("out of memory")

    return read


# ── the order of the queue ───────────────────────────────────────────────────────────────────────


def full_engine():
    """Return an engine with a retracted request in its queue, and room for short prompts only."""
    engine, _ = toy_engine(12, is_prefix_cache_enabled=False)
    engine._scheduler.growth_share = 0.0
    made = [engine.submit(ask(prompt_of(16, i), str(i), max_new_tokens=20)) for i in range(2)]
    while not engine.num_retracted:
        engine.step()
    engine._scheduler.growth_share = 0.0
    assert engine._scheduler.waiting == made[1:]
    assert engine.cache.num_available >= 2
    return engine, made[1]


def test_no_newcomer_passes_a_retracted_request():
    engine, retracted = full_engine()
    new = engine.submit(ask(prompt_of(2), "new", max_new_tokens=2))
    order = []
    while engine.has_work:
        result = engine.step()
        order += [token.request for token in result.tokens if token.request in (retracted, new)]
        assert new.stage is Stage.WAITING or retracted.stage is not Stage.WAITING
    assert order.index(retracted) < order.index(new)


def test_no_newcomer_is_granted_pages_before_a_retracted_request_has_some():
    engine, retracted = full_engine()
    new = ask_remote(engine, ask(prompt_of(2), "new", max_new_tokens=2))
    assert new.stage is Stage.WAITING
    while new.stage is Stage.WAITING:
        engine.step()
        assert new.stage is Stage.WAITING or retracted.stage is not Stage.WAITING
    assert new.stage is Stage.RESERVED


def test_only_a_higher_priority_passes_a_retracted_request():
    engine, retracted = full_engine()
    urgent = engine.submit(ask(prompt_of(2), "urgent", max_new_tokens=2, priority=1))
    engine.step()
    assert (urgent.stage, retracted.stage) == (Stage.RUNNING, Stage.WAITING)


class Refusing:
    """A compiler of grammars that refuses every one at once."""

    def compile(self, _grammar):
        future = Future()
        future.set_exception(InvalidRequest("the grammar cannot be used"))
        return future


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_grammar_that_is_refused_at_once_fails_its_request_and_no_other(is_remote):
    engine, _ = toy_engine(20)
    engine._compiler = Refusing()
    grammar = Grammar(kind="regex", text="(")
    active = engine.check(ask(prompt_of(5), "bad", grammar=grammar), is_remote=is_remote)
    engine.queue(active)
    engine.submit(ask(prompt_of(5), "good", max_new_tokens=1))
    result = engine.step()
    assert [(failure.request, failure.error.message) for failure in result.failures] == [
        (active, "the grammar cannot be used")
    ]
    assert [token.request.request.request_id for token in result.tokens] == ["good"]
    assert_all_returned(engine)


# ── chunks ───────────────────────────────────────────────────────────────────────────────────────


def prompt_request(num_prompt: int, num_tokens: int = 0, logprobs=None) -> ActiveRequest:
    request = GenerateRequest(
        request_id=RequestId("r"),
        prompt_ids=[*range(num_prompt)],
        sampling=SamplingParams(),
        logprobs=logprobs,
    )
    tokens = [*range(max(num_prompt, num_tokens))]
    return ActiveRequest(request, arrival=0, max_tokens=9999, seed=0, token_ids=tokens)


def sizes(chunks):
    return [(chunk.num_tokens, chunk.is_last) for chunk in chunks]


def test_prompts_share_a_forward_first_come_first_served():
    prompts = [prompt_request(6) for _ in range(3)]
    assert sizes(next_chunks(prompts, 8)) == [(6, True), (2, False)]


def test_only_a_prompt_that_reports_its_logprobs_goes_in_smaller_chunks():
    asked = [prompt_request(2000, logprobs=LogprobsWanted(prompt_start=0)), prompt_request(100)]
    assert sizes(next_chunks(asked, 1000)) == [(MAX_LOGPROB_ROWS, False), (100, True)]
    alone = prompt_request(2000, logprobs=LogprobsWanted())
    assert sizes(next_chunks([alone], 1000)) == [(1000, False)]


def test_an_answer_that_was_retracted_is_not_bound_by_the_budget_of_new_prompts():
    new, retracted = prompt_request(6), prompt_request(50, 60)
    prompts = [new, prompt_request(6), retracted, prompt_request(6)]
    assert sizes(next_chunks(prompts, 40, 8)) == [(6, True), (2, False), (32, False)]
