"""Requests and settings that are refused before vLLM has an engine to run them on."""

from types import SimpleNamespace

import pytest

from tandem.engine.config import EngineConfig
from tandem.node.config import NodeConfig
from tandem.wire.errors import ConfigInvalid, InvalidRequest
from tandem.wire.generation import GenerateRequest, Grammar, RequestId, SamplingParams
from tests.with_vllm.models import tiny

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


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--data-parallel-size", "2"], "--data-parallel-size"),
        (["--distributed-executor-backend", "ray"], "ray"),
        (["--nnodes", "2"], "--nnodes"),
    ],
)
def test_workers_that_are_not_of_one_engine_on_one_host_are_refused_by_their_flag(
    tmp_path, words, flag
):
    from tandem.vllm.generator import _arguments, _vllm_config

    engine = EngineConfig(model_dir=str(tiny("experts", tmp_path)))
    words = ["--skip-tokenizer-init", "--max-model-len", "512", *words]
    config = NodeConfig(role="decode", engine=engine, vllm_args=words)
    with pytest.raises(ConfigInvalid, match=flag):
        _vllm_config(config, _arguments(config), "")
