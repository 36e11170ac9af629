"""Log-probabilities of answers and prompts compared with a plain forward of transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engine.scheduling.core import Engine
from tandem.wire.generation import LogprobOptions
from tests.engine.test_core import make_engine, prompts
from tests.one_engine import ask


def run_with_logprobs(engine: Engine, request):
    """Return the tokens, their log-probabilities, and those of the prompt by position."""
    engine.submit(request)
    tokens, told, of_prompt = [], [], {}
    while engine.has_work:
        result = engine.step()
        for token in result.tokens:
            tokens.append(token.token)
            told.append(token.logprobs)
        for run in result.prompt_logprobs:
            for offset, entry in enumerate(run.entries):
                assert run.first_position + offset not in of_prompt
                of_prompt[run.first_position + offset] = entry
    return tokens, told, of_prompt


def scores(path, token_ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_answer_logprobs_are_those_of_the_model(tiny_model, is_overlapped, penalty):
    path, prompt = tiny_model("llama"), prompts(9)[7]
    engine = make_engine(path, is_overlapped=is_overlapped)
    request = ask(
        prompt, max_new_tokens=6, frequency_penalty=penalty, logprobs=LogprobOptions(num_top=3)
    )
    tokens, told, of_prompt = run_with_logprobs(engine, request)
    expected = scores(path, prompt + tokens)
    assert not of_prompt
    for position, (token, entry) in enumerate(zip(tokens, told, strict=True), len(prompt) - 1):
        assert entry.logprob == pytest.approx(float(expected[position, token]), abs=1e-3)
        top = expected[position].topk(3)
        assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-3)
        assert len(entry.top) == 3


@pytest.mark.parametrize("prompt_start", [0, 1, 30, 69])
@pytest.mark.parametrize("is_cached", [False, True])
def test_prompt_logprobs_are_reported_once_with_chunks_and_cache(
    tiny_model, prompt_start, is_cached
):
    path, prompt = tiny_model("llama"), prompts(9)[7]
    assert len(prompt) == 70
    engine = make_engine(path)  # chunks of 32
    if is_cached:
        run_with_logprobs(engine, ask(prompt, max_new_tokens=1))
    wanted = LogprobOptions(num_top=2, prompt_start=prompt_start)
    request = ask(prompt, max_new_tokens=2, logprobs=wanted)
    _, _, of_prompt = run_with_logprobs(engine, request)
    assert sorted(of_prompt) == list(range(prompt_start, len(prompt)))
    expected = scores(path, prompt)
    for position, entry in of_prompt.items():
        if position == 0:
            assert entry.logprob is None
            continue
        own = float(expected[position - 1, prompt[position]])
        assert entry.logprob == pytest.approx(own, abs=1e-3)
        assert entry.top[0][0] == int(expected[position - 1].argmax())


def test_prompt_of_one_token_reports_one_position(tiny_model):
    engine = make_engine(tiny_model("llama"))
    _, _, of_prompt = run_with_logprobs(
        engine, ask([5], max_new_tokens=2, logprobs=LogprobOptions(prompt_start=0))
    )
    assert list(of_prompt) == [0]
    assert of_prompt[0].logprob is None
