"""Which requests count as the same prompt."""

import msgspec
import pytest

from tandem.router.serving.suspects import name_of
from tandem.wire.generation import GenerateRequest, RequestId, SamplingParams

REQUEST = GenerateRequest(
    request_id=RequestId("a"), prompt_ids=[5, 6], sampling=SamplingParams(seed=1)
)


@pytest.mark.parametrize(
    "changed",
    [
        {"request_id": RequestId("b")},
        {"deadline_s": 3.5},
        {"sampling": SamplingParams(seed=2)},
        {"client": "another"},
        {"session": "another"},
        {"group": "another"},
        {"priority": 1},
    ],
)
def test_retried_prompt_keeps_its_name(changed):
    assert name_of(msgspec.structs.replace(REQUEST, **changed), "m") == name_of(REQUEST, "m")


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt_ids": [5, 7]},
        {"adapter": "sql"},
        {"sampling": SamplingParams(seed=1, max_new_tokens=3)},
    ],
)
def test_other_computation_has_another_name(changed):
    assert name_of(msgspec.structs.replace(REQUEST, **changed), "m") != name_of(REQUEST, "m")


def test_equal_prompts_of_two_models_have_different_names():
    assert name_of(REQUEST, "a") != name_of(REQUEST, "b")
