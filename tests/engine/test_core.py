"""The engine compared with transformers' `generate`, and the release of all pages."""

import random

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engine.config import EngineConfig
from tandem.engine.model.loading import load_model
from tandem.engine.scheduling.core import Engine
from tandem.wire.errors import InvalidRequest, OutOfPages, Overloaded
from tandem.wire.generation import (
    Finish,
    LogprobOptions,
)
from tests import one_engine
from tests.one_engine import ask, ask_remote, run
from tests.tiny_models import CONFIGS, CONTEXT_LENGTH, VOCAB_SIZE

PAGE = 8
# Tolerance of log-probabilities in bfloat16, which has eight bits: measured 0.07, and 5.7 with one wrong key.
ROUNDING = 0.2


def make_engine(path, num_pages=200, **settings) -> Engine:
    config = EngineConfig(
        model_dir=str(path),
        page_size=PAGE,
        **{"dtype": "float32", "chunked_prefill_size": 32, **settings},
    )
    return one_engine.make_engine(config, *load_model(config), num_pages)


def prompts(num: int) -> list[list[int]]:
    rng = random.Random(5)
    lengths = [1, PAGE - 1, PAGE, PAGE + 1, 31, 32, 33, 70, 100]
    return [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(lengths[i % len(lengths)])] for i in range(num)
    ]


def transformers_greedy(model, prompt, num_new) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_greedy_tokens_match_transformers(kind, backend, tiny_model):
    path = tiny_model(kind)
    engine = make_engine(path, attention_backend=backend)
    asked = prompts(9)
    for i, prompt in enumerate(asked):
        engine.submit(ask(prompt, str(i), max_new_tokens=12))
    out = run(engine)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for i, prompt in enumerate(asked):
        assert out[str(i)] == transformers_greedy(reference, prompt, 12), f"prompt {i} of {kind}"


def test_cached_prefix_is_reported_and_keeps_the_tokens(tiny_model):
    engine = make_engine(tiny_model("llama"))
    prompt = prompts(9)[8]
    engine.submit(ask(prompt, "first", max_new_tokens=8))
    first = run(engine)["first"]
    again = engine.submit(ask(prompt, "again", max_new_tokens=8))
    assert run(engine)["again"] == first
    assert again.num_cached == 96


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_cached_prefix_keeps_bfloat16_logprobs_within_rounding(tiny_model, over):
    """Rounding depends on the batch, so tokens may differ where two are about equally likely."""
    path = tiny_model("llama")
    warm, cold = (
        make_engine(path, dtype="bfloat16", is_prefix_cache_enabled=is_on)
        for is_on in (True, False)
    )
    turn = prompts(9)[8][: 9 * PAGE]
    warm.submit(ask(turn, max_new_tokens=PAGE + over))  # ends near a page boundary
    turn += run(warm)["r"]
    kept = warm.cache.match(turn)
    assert kept.num_tokens == (len(turn) - 1) // PAGE * PAGE
    pages = warm._launcher._runner.pool.pages
    before = pages[kept.page_ids].clone()
    turn += prompts(9)[6]
    found = []
    for engine in (warm, cold):
        wanted = LogprobOptions(num_top=VOCAB_SIZE)
        engine.submit(msgspec.structs.replace(ask(turn, max_new_tokens=1), logprobs=wanted))
        (token,) = (token for _ in range(9) for token in engine.step().tokens)
        found.append(torch.tensor([logprob for _, logprob in sorted(token.logprobs.top)]))
    assert token.request.num_cached == 0
    assert torch.equal(pages[kept.page_ids], before)
    assert (found[0] - found[1]).abs().max() < ROUNDING


@pytest.mark.parametrize("num_sent", [1, 5, 11])
def test_next_attempt_samples_the_same_tokens(tiny_model, num_sent):
    engine = make_engine(tiny_model("qwen2"))
    prompt = prompts(9)[7]
    settings = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "max_new_tokens": 12}
    settings["frequency_penalty"] = 0.2
    engine.submit(ask(prompt, "whole", **settings))
    whole = run(engine)["whole"]
    engine.submit(ask(prompt + whole[:num_sent], "rest", num_prior=num_sent, **settings))
    assert run(engine)["rest"] == whole[num_sent:]


def test_hand_off_generates_the_same_tokens_as_one_engine(tiny_model):
    colocated, prefill, decode = (make_engine(tiny_model("qwen3")) for _ in range(3))
    prompt = prompts(9)[8]
    request = ask(prompt, max_new_tokens=10, temperature=0.7, seed=3)
    colocated.submit(request)
    whole = run(colocated)["r"]

    half = prefill.submit(request, is_prompt_only=True)
    complete: list[int] = []
    while prefill.has_work:
        result = prefill.step()
        for pages in result.pages:
            assert pages.first_page == len(complete)
            complete += pages.page_ids
    rest = ask_remote(decode, request)
    source, target = (each._launcher._runner.pool.pages for each in (prefill, decode))
    target[rest.granted_pages] = source[complete]
    prefill.release(half)
    decode.land(rest, half.token_ids[-1], half.seed)
    assert [half.token_ids[-1], *run(decode)["r"]] == whole
    for engine in (prefill, decode):
        counts = engine.counts()
        assert counts.free + counts.cached == counts.total


def test_withdrawn_grant_frees_all_but_the_granted_pages(tiny_model):
    decode = make_engine(tiny_model("llama"), num_pages=20)
    active = ask_remote(decode, ask(prompts(9)[8], max_new_tokens=20))
    decode.quarantine(active)
    assert (decode.counts().quarantined, decode.counts().held) == (13, 0)
    decode.reclaim(active)
    assert decode.counts().free == 20


@pytest.mark.parametrize("is_overlapped", [True, False])
def test_failed_forward_frees_all_pages(tiny_model, is_overlapped, monkeypatch):
    engine = make_engine(tiny_model("llama"), is_overlapped=is_overlapped)
    cancelled, going_on = (
        engine.submit(ask(prompt, str(i), max_new_tokens=9))
        for i, prompt in enumerate(prompts(9)[7:])
    )
    launch = engine._launcher.launch
    monkeypatch.setattr(engine._launcher, "launch", lambda *given: broken(launch(*given)))
    with pytest.raises(RuntimeError, match="the device is gone"):
        while engine.has_work:
            engine.step()
            engine.cancel(cancelled)  # while the forward is in flight
    engine.cancel(cancelled)
    engine.cancel(going_on)
    while engine.has_work:  # the forward launched meanwhile fails too
        with pytest.raises(RuntimeError):
            engine.step()
    engine.cache.check_integrity()
    counts = engine.counts()
    assert counts.free + counts.cached == counts.total
    monkeypatch.setattr(engine._launcher, "launch", launch)
    engine.submit(ask(prompts(9)[7], "after", max_new_tokens=3))
    assert len(run(engine)["after"]) == 3


def broken(_read):
    """Return a `read` that fails."""

    def read():
        raise RuntimeError("the device is gone")

    return read


def test_cancelled_prompt_keeps_its_pages_until_release(tiny_model):
    engine = make_engine(tiny_model("llama"), is_prefix_cache_enabled=False)
    half = engine.submit(ask(prompts(9)[8]), is_prompt_only=True)
    engine.step()
    engine.cancel(half)
    assert engine.counts().held == 13
    engine.release(half)
    assert engine.counts().held == 0


def test_generation_finishes_at_the_context_length(tiny_model):
    engine = make_engine(tiny_model("llama"))
    engine.submit(ask([5] * (CONTEXT_LENGTH - 3), max_new_tokens=1000))
    assert len(run(engine)["r"]) == 3


@pytest.mark.parametrize(
    ("num_prompt", "num_pages", "max_new_tokens", "is_finished"),
    [
        (159, 20, 9, False),  # fills this pool
        (159, 20, 1, True),
        (CONTEXT_LENGTH - 2, 1000, 9, False),
        (CONTEXT_LENGTH - 1, 1000, 9, True),
    ],
)
def test_answer_to_a_prompt_for_another_node_is_not_limited_by_this_pool(
    tiny_model, num_prompt, num_pages, max_new_tokens, is_finished
):
    engine = make_engine(tiny_model("llama"), num_pages=num_pages)
    engine.submit(ask([5] * num_prompt, max_new_tokens=max_new_tokens), is_prompt_only=True)
    tokens = []
    while engine.has_work:
        tokens += engine.step().tokens
    (token,) = tokens
    assert token.finish == (Finish(reason="length") if is_finished else None)


def test_stop_token_id_finishes_generation_and_is_reported(tiny_model):
    engine = make_engine(tiny_model("llama"))
    engine.submit(ask([5, 6, 7], max_new_tokens=6))
    tokens = run(engine)["r"]
    engine.submit(ask([5, 6, 7], max_new_tokens=6, stop_token_ids=[tokens[2]]))
    finish = None
    while engine.has_work:
        for token in engine.step().tokens:
            finish = token.finish
    assert finish == Finish(reason="stop", matched=tokens[2])


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], InvalidRequest),
        ([VOCAB_SIZE], InvalidRequest),
        ([-1], InvalidRequest),
        ([5] * CONTEXT_LENGTH, InvalidRequest),
        ([5] * 160, OutOfPages),
    ],
)
def test_prompt_that_can_never_fit_is_refused(tiny_model, prompt, error):
    engine = make_engine(tiny_model("llama"), num_pages=20)
    with pytest.raises(error):
        engine.submit(ask(prompt))


def test_adapter_request_is_refused(tiny_model):
    engine = make_engine(tiny_model("llama"))
    with pytest.raises(InvalidRequest, match="adapters"):
        engine.submit(msgspec.structs.replace(ask([5]), adapter="sql"))


def test_full_queue_raises_overloaded(tiny_model):
    engine = make_engine(tiny_model("llama"), max_waiting_requests=1)
    engine.submit(ask([5]))
    with pytest.raises(Overloaded):
        engine.submit(ask([5]))
