"""Requests that vLLM refuses before it has an engine to run them on."""

from types import SimpleNamespace

import pytest

from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import GenerateRequest, Grammar, RequestId, SamplingParams

# What vLLM imports warns of its own age.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 3.0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"grammar": Grammar(kind="structural_tag", text="{")},
    ],
)
def test_sampling_outside_the_limits_of_vllm_is_an_error_of_the_request_not_of_the_node(sampling):
    from tandem.vllm.generator import VllmGenerator

    request = GenerateRequest(
        request_id=RequestId("r"), prompt_ids=[5, 6], sampling=SamplingParams(**sampling)
    )
    generator = object.__new__(VllmGenerator)  # the limits are those of its words, not of its model
    generator._inputs, generator._tasks = SimpleNamespace(process_inputs=None), ()
    with pytest.raises(InvalidRequest, match=r"refuses the request: .*(must be in|Expecting)"):
        generator.check(request, None)
