"""Admission, growth, retraction, sharing and overlap, with a runner whose tokens reveal any error."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.request import ActiveRequest, Stage
from tandem.engine.scheduling.scheduler import MAX_LOGPROB_ROWS, next_chunks
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import (
    GenerateRequest,
    LogprobOptions,
    RequestId,
    SamplingParams,
)
from tests.engine.toy_grammars import ANY_TEXT, ToyGrammars
from tests.engine.toy_runner import EOS, toy_answer, toy_engine
from tests.loop_watch import few_bytecodes
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
    st.sampled_from([0, 1, 4]),
    st.randoms(use_true_random=False),
)
def test_answers_are_correct_and_pages_freed_in_any_schedule(
    asked, num_pages, is_overlapped, has_prefix_cache, max_running, local_prefill_tokens, rng
):
    grammars = ToyGrammars()
    grammars.is_held = True
    engine, _ = toy_engine(
        num_pages,
        is_overlapped=is_overlapped,
        is_prefix_cache_enabled=has_prefix_cache,
        max_running_requests=max_running,
        chunked_prefill_size=9,
        local_prefill_tokens=local_prefill_tokens,
        grammars=grammars,
    )
    out: dict[str, list[int]] = {}
    running: dict[int, ActiveRequest] = {}
    for step in range(41):
        for i, (length, seed, num_new, priority, begin, _) in enumerate(asked):
            if begin == step:
                limits = {"max_new_tokens": num_new, "grammar": rng.choice([None, ANY_TEXT])}
                request = ask(prompt_of(length, seed), str(i), priority=priority, **limits)
                running[i] = engine.submit(request)
        for i, (*_, end) in enumerate(asked):
            if end == step and i in running:
                engine.cancel(running[i])
        while grammars.held and rng.random() < 0.5:
            grammars.release()
        for token in engine.step().tokens:
            out.setdefault(token.request.request.request_id, []).append(token.token)
        engine.cache.check_integrity()
    grammars.is_held = False
    while grammars.held:
        grammars.release()
    run(engine, out)
    for i, (length, seed, num_new, _, begin, end) in enumerate(asked):
        expected = toy_answer(prompt_of(length, seed), num_new)
        got = out.get(str(i), [])
        is_cancelled = end is not None and end >= begin
        assert got == expected[: len(got)] if is_cancelled else got == expected
    assert_all_returned(engine)


@OVERLAP
def test_retracted_request_resumes_with_the_same_tokens(is_overlapped):
    engine, _ = toy_engine(12, is_overlapped=is_overlapped, is_prefix_cache_enabled=False)
    engine._scheduler.growth_share = 0.0
    for i in range(4):
        engine.submit(ask(prompt_of(8, i), str(i), max_new_tokens=30))
    answers = run(engine)
    assert engine.num_retracted > 0
    assert answers == {str(i): toy_answer(prompt_of(8, i), 30) for i in range(4)}
    assert_all_returned(engine)


def test_cache_hits_of_a_retracted_request_are_counted_once():
    engine, _ = toy_engine(12)
    engine._scheduler.growth_share = 0.0
    prefix = prompt_of(4)
    engine.submit(ask([*prefix, 7], "first", max_new_tokens=1))
    run(engine)
    asked = [ask([*prefix, *prompt_of(4, i)], str(i), max_new_tokens=30) for i in range(4)]
    made = [engine.submit(request) for request in asked]
    run(engine)
    assert engine.num_retracted > 0
    assert [active.num_cached for active in made] == [4] * 4
    assert engine.num_cached_tokens == 16


def test_youngest_request_is_retracted_and_the_oldest_never():
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


def test_low_priority_request_is_retracted_for_a_high_priority_one():
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


def test_admission_is_by_priority_then_arrival():
    engine, _ = toy_engine(40, max_running_requests=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", -1)):
        engine.submit(ask(prompt_of(4), name, priority=priority, max_new_tokens=1))
    order = []
    while engine.has_work:
        order += [token.request.request.request_id for token in engine.step().tokens]
    assert order == ["c", "a", "b", "d"]


def test_prompts_for_another_node_keep_no_pages_free_for_their_answers():
    engine, _ = toy_engine(4)
    for i in range(2):
        prompt = ask(prompt_of(8, i), str(i), max_new_tokens=100)
        engine.submit(prompt, is_prompt_only=True)
    engine.admit()
    assert (engine.num_running, engine.counts().free) == (2, 0)


@OVERLAP
def test_full_pool_finishes_all_requests(is_overlapped):
    engine, _ = toy_engine(5, is_overlapped=is_overlapped)
    active = engine.submit(ask(prompt_of(10), max_new_tokens=100))
    assert active.max_tokens == 20
    assert run(engine)["r"] == toy_answer(prompt_of(10), 10)
    assert_all_returned(engine)


@OVERLAP
def test_concurrent_identical_prompts_are_computed_once(is_overlapped):
    engine, runner = toy_engine(100, is_overlapped=is_overlapped)
    prompt = prompt_of(41)
    made = [engine.submit(ask(prompt, str(i), max_new_tokens=5)) for i in range(8)]
    answers = run(engine)
    assert answers == {str(i): toy_answer(prompt, 5) for i in range(8)}
    assert [active.num_cached for active in made] == [0] + [40] * 7
    assert runner.num_rows <= 41 + 7 * 1 + 8 * 5
    assert_all_returned(engine)


def test_waiting_request_computes_the_prompt_if_the_other_is_cancelled():
    engine, _ = toy_engine(100, chunked_prefill_size=8)
    first, second = (engine.submit(ask(prompt_of(41), name, max_new_tokens=2)) for name in "ab")
    engine.step()
    assert second.waits_for is first
    engine.cancel(first)
    assert run(engine)["b"] == toy_answer(prompt_of(41), 2)
    assert_all_returned(engine)


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize(
    ("num_shared", "waits"), [(4, False), (31, False), (32, True), (64, True), (500, True)]
)
def test_request_waits_for_a_prompt_only_if_it_needs_half_of_it(is_remote, num_shared, waits):
    engine, _ = toy_engine(400, chunked_prefill_size=4)
    longest = prompt_of(600)
    long = ask_remote(engine, ask(longest[: max(64, num_shared)], "long"))
    request = ask([*longest[:num_shared], *prompt_of(9, seed=1)], "short", max_new_tokens=2)
    active = ask_remote(engine, request) if is_remote else engine.submit(request)
    engine.admit()
    assert long.stage is Stage.RESERVED
    assert (active.stage is Stage.WAITING) == waits


def test_requests_wait_for_each_other_beside_a_prompt_of_which_they_share_little():
    engine, _ = toy_engine(100)
    prompt = prompt_of(64)
    made = [
        ask_remote(engine, ask(prompt_ids, name))
        for name, prompt_ids in (("long", prompt), ("a", prompt[:20]), ("b", prompt[:20]))
    ]
    assert [active.stage for active in made] == [Stage.RESERVED, Stage.RESERVED, Stage.WAITING]
    engine.land(made[1], first_token=5, seed=0)
    engine.admit()
    assert made[2].stage is Stage.RESERVED
    assert made[2].num_computed == 16


def test_prompts_with_different_salts_are_computed_separately():
    engine, _ = toy_engine(100)
    made = [
        engine.submit(ask(prompt_of(41), salt, salt=salt, max_new_tokens=2)) for salt in ("x", "y")
    ]
    run(engine)
    assert [active.num_cached for active in made] == [0, 0]


def test_concurrent_identical_prompts_are_granted_once_on_decode():
    engine, _ = toy_engine(100)
    first, second = (
        ask_remote(engine, ask(prompt_of(41), name, max_new_tokens=2)) for name in "ab"
    )
    assert (first.stage, second.stage) == (Stage.RESERVED, Stage.WAITING)
    assert second.waits_for is first
    engine.land(first, first_token=5, seed=0)
    engine.admit()
    assert second.stage is Stage.RESERVED
    assert (len(first.granted_pages), len(second.granted_pages)) == (0, 1)
    assert second.num_computed == 40


def test_answer_that_ends_during_the_next_forward_emits_no_more_tokens():
    engine, runner = toy_engine(20, is_overlapped=True, is_prefix_cache_enabled=False)
    answer = toy_answer(prompt_of(7), 3)
    assert len(set(answer)) == 3
    engine.submit(ask(prompt_of(7), max_new_tokens=50, stop_token_ids=[answer[2]]))
    assert run(engine)["r"] == answer
    assert runner.num_rows == 7 + 3  # the third was in flight when the stop was read
    assert_all_returned(engine)


@OVERLAP
def test_penalties_include_the_previous_token(is_overlapped):
    plain, _ = toy_engine(40)
    plain.submit(ask(prompt_of(6), max_new_tokens=12, frequency_penalty=2.0))
    expected = run(plain)["r"]
    engine, _ = toy_engine(40, is_overlapped=is_overlapped)
    engine.submit(ask(prompt_of(6), max_new_tokens=12, frequency_penalty=2.0))
    engine.submit(ask(prompt_of(7), "other", max_new_tokens=12))
    assert run(engine)["r"] == expected


def test_end_of_sequence_is_sampled_only_after_min_new_tokens():
    engine, _ = toy_engine(40)
    bias = {EOS: 100.0}
    engine.submit(
        ask(prompt_of(6), max_new_tokens=9, min_new_tokens=3, logit_bias=bias, ignore_eos=False)
    )
    answer = run(engine)["r"]
    assert answer == [*toy_answer(prompt_of(6), 3), EOS]


@OVERLAP
def test_new_prompts_run_in_small_chunks_while_others_decode(is_overlapped):
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


@OVERLAP
@pytest.mark.parametrize("local_prefill_tokens", [1, 5, 0])
def test_retracted_answer_is_recomputed_in_small_chunks_while_others_decode(
    local_prefill_tokens, is_overlapped
):
    engine, runner = toy_engine(
        14,
        is_overlapped=is_overlapped,
        is_prefix_cache_enabled=False,
        chunked_prefill_size=32,
        local_prefill_tokens=local_prefill_tokens,
    )
    engine._scheduler.growth_share = 0.0
    lengths = {"oldest": 40, "middle": 12, "youngest": 30}
    for seed, (name, num_new) in enumerate(lengths.items()):
        engine.submit(ask(prompt_of(8, seed), name, max_new_tokens=num_new))
    out: dict[str, list[int]] = {}
    largest = 0
    while engine.has_work:
        runner.largest, engine._scheduler.growth_share = 0, 0.0
        for token in engine.step().tokens:
            out.setdefault(token.request.request.request_id, []).append(token.token)
        if engine.num_retracted and 12 < len(out["oldest"]) < lengths["oldest"]:
            largest = max(largest, runner.largest)
    assert engine.num_retracted > 0
    assert largest == 1 + min(local_prefill_tokens or 32, 17)
    assert out == {
        name: toy_answer(prompt_of(8, seed), num_new)
        for seed, (name, num_new) in enumerate(lengths.items())
    }


# ── a prompt of 128k tokens ──────────────────────────────────────────────────────────────────────

LONG = 131_072


def test_loop_does_not_stand_while_a_long_prompt_comes_lands_continues_and_ends():
    engine, _ = toy_engine(3 * LONG // 16, page_size=16)
    prompt = prompt_of(LONG)
    for turn in (prompt, [*prompt, 5, *prompt_of(40)]):
        request = ask(turn, max_new_tokens=20)
        with few_bytecodes():
            active = ask_remote(engine, request)
        assert active.stage is Stage.RESERVED
        with few_bytecodes():
            engine.land(active, first_token=5, seed=0)
        with few_bytecodes():
            engine.step()
        with few_bytecodes():
            engine.cancel(active)
    assert active.num_cached == LONG
    with few_bytecodes():
        engine.cache.flush()
    assert engine.counts().free == engine.counts().total


def test_loop_does_not_stand_while_a_long_prompt_waits_for_pages_or_loses_its_grant():
    engine, _ = toy_engine(2 * LONG // 16, page_size=16)
    prompt = prompt_of(LONG)
    first = ask_remote(engine, ask(prompt, max_new_tokens=20))
    engine.land(first, first_token=5, seed=0)
    granted = ask_remote(engine, ask(prompt_of(LONG - 64, seed=1), max_new_tokens=1))
    longer = ask([*prompt, *prompt_of(LONG - 64, seed=2)], max_new_tokens=1)
    blocked = ask_remote(engine, longer)
    assert (granted.stage, blocked.stage) == (Stage.RESERVED, Stage.WAITING)
    for _ in range(3):
        engine.note_pages()
        with few_bytecodes():
            engine.admit()
    with few_bytecodes():
        engine.quarantine(granted)
    with few_bytecodes():
        engine.reclaim(granted)
    with few_bytecodes():
        engine.admit()
    assert blocked.stage is Stage.RESERVED


def test_long_prompts_that_waited_for_the_same_pages_are_admitted_over_several_passes():
    engine, _ = toy_engine(2 * LONG // 16, page_size=16)
    prompt = prompt_of(LONG)
    first, *others = [
        ask_remote(engine, ask([*prompt, number], str(number))) for number in range(2, 10)
    ]
    assert {active.stage for active in others} == {Stage.WAITING}
    engine.land(first, first_token=5, seed=0)
    engine.cancel(first)
    num_passes = 0
    while engine.has_work:
        before = [active for active in others if active.stage is Stage.WAITING]
        engine.step()
        assert sum(active.stage is Stage.RESERVED for active in before) <= 2
        num_passes += 1
    assert {active.stage for active in others} == {Stage.RESERVED}
    assert num_passes >= 4


def test_loop_does_not_stand_while_short_prompts_are_evicted_for_a_long_one():
    engine, _ = toy_engine(LONG // 16 + 1, page_size=16)
    cache = engine.cache
    for seed in range(LONG // 512):
        pages = cache.allocate(32)
        cache.insert(prompt_of(512, seed), pages)
        cache.release(pages)
    request = ask(prompt_of(LONG, seed=1))
    with few_bytecodes():
        active = ask_remote(engine, request)
    assert active.stage is Stage.RESERVED


# ── what a turn leaves for the next ──────────────────────────────────────────────────────────────


@OVERLAP
@pytest.mark.parametrize("has_stop_id", [False, True])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_turns_ending_near_a_page_boundary_match_an_engine_without_cache(
    over, has_stop_id, is_overlapped
):
    engine, _ = toy_engine(60, is_overlapped=is_overlapped)
    tokens = prompt_of(6)
    for end in (16, 32, 36, 48):  # boundaries of pages of 4 tokens
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
def test_cancelled_prompt_caches_only_computed_pages(num_chunk):
    engine, _ = toy_engine(20, chunked_prefill_size=num_chunk, is_overlapped=False)
    active = engine.submit(ask(prompt_of(20), max_new_tokens=5))
    engine.step()
    engine.cancel(active)
    assert engine.cache.match(prompt_of(20)).num_tokens == num_chunk // 4 * 4


@pytest.mark.parametrize("num_prompt", [7, 8, 9])
def test_failed_forward_caches_nothing(num_prompt, monkeypatch):
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
    """Return an engine with a retracted request in its queue and pages for short prompts only."""
    engine, _ = toy_engine(12, is_prefix_cache_enabled=False)
    engine._scheduler.growth_share = 0.0
    made = [engine.submit(ask(prompt_of(16, i), str(i), max_new_tokens=20)) for i in range(2)]
    while not engine.num_retracted:
        engine.step()
    engine._scheduler.growth_share = 0.0
    assert engine._scheduler.waiting == made[1:]
    assert engine.cache.num_available >= 2
    return engine, made[1]


def test_newer_request_does_not_overtake_a_retracted_one():
    engine, retracted = full_engine()
    new = engine.submit(ask(prompt_of(2), "new", max_new_tokens=2))
    order = []
    while engine.has_work:
        result = engine.step()
        order += [token.request for token in result.tokens if token.request in (retracted, new)]
        assert new.stage is Stage.WAITING or retracted.stage is not Stage.WAITING
    assert order.index(retracted) < order.index(new)


def test_newer_request_gets_no_grant_before_a_retracted_one():
    engine, retracted = full_engine()
    new = ask_remote(engine, ask(prompt_of(2), "new", max_new_tokens=2))
    assert new.stage is Stage.WAITING
    while new.stage is Stage.WAITING:
        engine.step()
        assert new.stage is Stage.WAITING or retracted.stage is not Stage.WAITING
    assert new.stage is Stage.RESERVED


def test_only_a_higher_priority_overtakes_a_retracted_request():
    engine, retracted = full_engine()
    urgent = engine.submit(ask(prompt_of(2), "urgent", max_new_tokens=2, priority=1))
    engine.step()
    assert (urgent.stage, retracted.stage) == (Stage.RUNNING, Stage.WAITING)


# ── grammars ─────────────────────────────────────────────────────────────────────────────────────


def names(result) -> list[str]:
    return [token.request.request.request_id for token in result.tokens]


@pytest.mark.parametrize("is_remote", [False, True])
def test_refused_grammar_fails_only_its_request(is_remote):
    engine, _ = toy_engine(20, grammars=ToyGrammars(InvalidRequest("the grammar cannot be used")))
    request = ask(prompt_of(5), "bad", grammar=ANY_TEXT)
    active = engine.check(request, is_remote=is_remote)
    engine.queue(active)
    engine.submit(ask(prompt_of(5), "good", max_new_tokens=1))
    result = engine.step()
    assert [(failure.request, failure.error.message) for failure in result.failures] == [
        (active, "the grammar cannot be used")
    ]
    assert names(result) == ["good"]
    assert_all_returned(engine)


@OVERLAP
def test_requests_without_masks_sit_out_and_delay_no_other(is_overlapped):
    grammars = ToyGrammars()
    engine, runner = toy_engine(
        400, grammars=grammars, is_overlapped=is_overlapped, chunked_prefill_size=1000
    )
    for i in range(20):
        engine.submit(ask(prompt_of(5, i), f"late {i}", max_new_tokens=3, grammar=ANY_TEXT))
    engine.submit(ask(prompt_of(5, 20), "plain", max_new_tokens=9))
    grammars.is_held = True
    out: dict[str, list[int]] = {}
    run(engine, out)
    assert len(grammars.held) == 20
    assert {name: len(tokens) for name, tokens in out.items()} == {
        "plain": 9,
        **{f"late {i}": 1 for i in range(20)},
    }
    assert runner.num_rows == 21 * 5 + 8  # nothing was computed in vain
    num_woken = grammars.num_woken
    while grammars.held:
        grammars.release()
        assert engine.has_work
        run(engine, out)
    assert grammars.num_woken > num_woken
    assert out == {
        "plain": toy_answer(prompt_of(5, 20), 9),
        **{f"late {i}": toy_answer(prompt_of(5, i), 3) for i in range(20)},
    }
    assert_all_returned(engine)


@pytest.mark.parametrize("is_prompt_only", [False, True])
def test_no_mask_is_requested_after_the_last_token(is_prompt_only):
    grammars = ToyGrammars()
    engine, _ = toy_engine(40, grammars=grammars)
    request = ask(prompt_of(5), max_new_tokens=3, grammar=ANY_TEXT)
    active = engine.submit(request, is_prompt_only=is_prompt_only)
    run(engine)
    assert active.stage is Stage.ENDED
    assert grammars.num_requested == (1 if is_prompt_only else 3)


def test_step_waits_only_once_for_each_late_mask(monkeypatch):
    waits = []
    monkeypatch.setattr(
        "tandem.engine.scheduling.core.wait", lambda masks, timeout: waits.append((masks, timeout))
    )
    grammars = ToyGrammars()
    engine, _ = toy_engine(40, grammars=grammars)
    engine.submit(ask(prompt_of(5), "late", max_new_tokens=3, grammar=ANY_TEXT))
    engine.submit(ask(prompt_of(6), "plain", max_new_tokens=9))
    grammars.is_held = True
    run(engine)
    assert sum(len(masks) for masks, _ in waits) == 1
    assert max(timeout for _, timeout in waits) < 0.003


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("broken"), "using the grammar failed: broken"),
        (InvalidRequest("slow"), "slow"),
    ],
)
def test_mask_that_fails_ends_only_its_request(error, message):
    grammars = ToyGrammars()
    engine, _ = toy_engine(40, grammars=grammars)
    bad = engine.submit(ask(prompt_of(5), "bad", max_new_tokens=9, grammar=ANY_TEXT))
    for i in range(2):
        grammar = ANY_TEXT if i else None
        engine.submit(ask(prompt_of(6, i), str(i), max_new_tokens=9, grammar=grammar))
    out: dict[str, list[int]] = {}
    grammars.is_held = True
    run(engine, out)
    grammars.release(error)
    result = engine.step()
    assert [(failure.request, failure.error.message) for failure in result.failures] == [
        (bad, message)
    ]
    grammars.is_held = False
    grammars.release()
    run(engine, out)
    assert len(out.pop("bad")) == 1
    assert out == {str(i): toy_answer(prompt_of(6, i), 9) for i in range(2)}
    assert_all_returned(engine)


def test_mask_of_a_retracted_request_that_fails_ends_only_that_request():
    grammars = ToyGrammars()
    engine, _ = toy_engine(12, grammars=grammars, is_prefix_cache_enabled=False)
    engine._scheduler.growth_share = 0.0
    for i in range(3):
        engine.submit(ask(prompt_of(8, i), str(i), max_new_tokens=20))
    bad = engine.submit(ask(prompt_of(8, 3), "bad", max_new_tokens=20, grammar=ANY_TEXT))
    grammars.is_held = True
    out: dict[str, list[int]] = {}
    failed = []
    while engine.has_work:
        is_retracted = engine.num_retracted and bad.stage is Stage.WAITING
        for token in engine.step().tokens if not is_retracted else ():
            out.setdefault(token.request.request.request_id, []).append(token.token)
        if is_retracted:
            break
    # The mask fails while the request is admitted again.
    take = engine._scheduler.slots.take

    def take_and_fail(active):
        if active is bad:
            grammars.release(InvalidRequest("slow"))
        take(active)

    engine._scheduler.slots.take = take_and_fail
    while engine.has_work:
        result = engine.step()
        failed += [failure.request for failure in result.failures]
        for token in result.tokens:
            out.setdefault(token.request.request.request_id, []).append(token.token)
    assert failed == [bad]
    del out["bad"]
    assert out == {str(i): toy_answer(prompt_of(8, i), 20) for i in range(3)}
    assert_all_returned(engine)


def test_request_that_is_cancelled_while_its_mask_is_due_returns_its_pages():
    grammars = ToyGrammars()
    engine, _ = toy_engine(40, grammars=grammars)
    active = engine.submit(ask(prompt_of(5), max_new_tokens=9, grammar=ANY_TEXT))
    grammars.is_held = True
    run(engine)
    engine.cancel(active)
    assert grammars.held == {}  # the process may forget the answer
    assert not engine.has_work
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


def test_prompts_share_a_forward_in_order_of_arrival():
    prompts = [prompt_request(6) for _ in range(3)]
    assert sizes(next_chunks(prompts, 8)) == [(6, True), (2, False)]


def test_only_prompts_with_logprobs_run_in_smaller_chunks():
    asked = [prompt_request(2000, logprobs=LogprobOptions(prompt_start=0)), prompt_request(100)]
    assert sizes(next_chunks(asked, 1000)) == [(MAX_LOGPROB_ROWS, False), (100, True)]
    alone = prompt_request(2000, logprobs=LogprobOptions())
    assert sizes(next_chunks([alone], 1000)) == [(1000, False)]


def test_prompts_with_logprobs_together_fill_the_logits_of_one_forward():
    prompts = [prompt_request(100, logprobs=LogprobOptions(prompt_start=0)) for _ in range(4)]
    assert sizes(next_chunks(prompts, 8192)) == [(100, True), (100, True), (58, False)]


@given(
    st.lists(
        st.tuples(
            st.integers(1, 900),  # prompt length
            st.one_of(st.none(), st.integers(-1, 1000)),  # first position with log-probabilities
            st.integers(0, 899),  # cached tokens
            st.integers(0, 40),  # tokens generated before a retraction
        ),
        max_size=12,
    ),
    st.integers(1, 2000),
)
def test_logprob_rows_of_a_forward_are_limited_and_cover_each_position_once(drawn, budget):
    left, missing = [], {}
    for length, start, num_cached, num_generated in drawn:
        options = None if start is None else LogprobOptions(prompt_start=start)
        request = prompt_request(length, length + num_generated, options)
        request.num_computed = min(num_cached, request.num_matchable)
        has_logprobs = start is not None and start >= 0
        missing[request] = [*range(max(1, start), length)] if has_logprobs else []
        left.append(request)
    while left:
        chunks = next_chunks(left, budget)
        assert sum(len(chunk.logprob_positions) for chunk in chunks) <= MAX_LOGPROB_ROWS
        assert chunks[0].request is left[0]  # the oldest prompt always progresses
        for chunk in chunks:
            positions = [*chunk.logprob_positions]
            assert missing[chunk.request][: len(positions)] == positions
            del missing[chunk.request][: len(positions)]
            chunk.request.num_computed = chunk.end
            chunk.request.logprobs_until = max(
                chunk.request.logprobs_until, chunk.logprob_positions.stop
            )
            if chunk.is_last:
                left.remove(chunk.request)
    assert not any(missing.values())


def test_retracted_answer_shares_the_budget_of_new_prompts():
    prompts = [prompt_request(6), prompt_request(50, 60), prompt_request(6)]
    assert sizes(next_chunks(prompts, 8)) == [(6, True), (2, False)]
    assert sizes(next_chunks(prompts[1:], 40)) == [(40, False)]
