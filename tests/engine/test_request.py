import msgspec
import pytest

from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import GenerateRequest, LogprobOptions, RequestId, SamplingParams
from tests.engine.toy_runner import toy_engine

HONEST = GenerateRequest(
    request_id=RequestId("a"), prompt_ids=[3, 4, 5], sampling=SamplingParams(), num_prior_tokens=2
)


def sampling(**changes) -> dict:
    return {"sampling": SamplingParams(**changes)}


def test_valid_requests_are_accepted():
    extremes = sampling(top_k=-1, temperature=0, top_p=1e-30, min_new_tokens=0, max_new_tokens=1)
    logprobs = LogprobOptions(num_top=20, prompt_start=0)
    for changes in ({}, extremes, {"logprobs": logprobs}, {"priority": -(2**31)}):
        engine, _ = toy_engine(8)
        engine.submit(msgspec.structs.replace(HONEST, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        sampling(top_k=2**63),
        sampling(max_new_tokens=2**64 - 1),
        sampling(min_new_tokens=2**63),
        sampling(temperature=float("nan")),
        sampling(temperature=-1),
        sampling(min_p=1e308),
        sampling(min_p=1.5),
        sampling(min_p=-0.1),
        sampling(repetition_penalty=0),
        sampling(frequency_penalty=float("-inf")),
        sampling(logit_bias={3: float("inf")}),
        sampling(stop_token_ids=[-1]),
        {"num_prior_tokens": 4},
        {"num_prior_tokens": -1},
        {"priority": 2**63},
        {"prompt_ids": [3, 50]},
        {"prompt_ids": [3, -1]},
        {"prompt_ids": [3, 2**64 - 1]},
        {"logprobs": LogprobOptions(num_top=-1)},
        {"logprobs": LogprobOptions(prompt_start=2**63)},
    ],
    ids=str,
)
def test_out_of_range_request_is_refused_without_pages(changes):
    engine, _ = toy_engine(8)
    with pytest.raises(InvalidRequest):
        engine.submit(msgspec.structs.replace(HONEST, **changes))
    assert engine.counts().free == 8
    assert not engine.has_work
