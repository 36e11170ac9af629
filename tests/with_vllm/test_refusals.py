"""Requests and settings that are rejected before vLLM makes an engine."""

from types import SimpleNamespace

import pytest

from tandem.engine.config import EngineConfig
from tandem.node.config import NodeConfig, TierConfig
from tandem.wire.errors import ConfigInvalid, InvalidRequest
from tandem.wire.events.publisher import KvEventsConfig
from tandem.wire.generation import GenerateRequest, Grammar, RequestId, SamplingParams
from tests.with_vllm.models import tiny

# vLLM's dependencies raise deprecation warnings on import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TWO_HOSTS = ["--nnodes", "2", "--tensor-parallel-size", "2"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 3.0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"grammar": Grammar(kind="structural_tag", text="{")},
    ],
)
def test_sampling_outside_vllm_limits_fails_the_request_not_the_node(sampling):
    from tandem.vllm.node.generator import VllmGenerator

    request = GenerateRequest(
        request_id=RequestId("r"), prompt_ids=[5, 6], sampling=SamplingParams(**sampling)
    )
    generator = object.__new__(VllmGenerator)  # these limits do not depend on the model
    generator._inputs, generator._tasks = SimpleNamespace(process_inputs=None), ()
    with pytest.raises(InvalidRequest, match=r"rejects the request: .*(must be in|Expecting)"):
        generator.check(request, None)


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("colocated", []),
        ("decode", ["--pipeline-parallel-size", "2"]),
        ("prefill", ["--tensor-parallel-size", "2"]),
    ],
)
def test_tiers_need_a_prefill_or_decode_node_with_one_rank(tmp_path, role, words):
    from tandem.vllm.node.arguments import parse_arguments, vllm_config_of

    engine = EngineConfig(model_dir=str(tiny("experts", tmp_path)))
    words = ["--skip-tokenizer-init", "--max-model-len", "512", *words]
    tiers = TierConfig(specs=("host:1MiB",))
    config = NodeConfig(role=role, engine=engine, vllm_args=words, tiers=tiers)
    with pytest.raises(ConfigInvalid, match=r"--kv-tier .* one rank"):
        vllm_config_of(config, parse_arguments(config))


def test_two_endpoints_of_kv_events_are_rejected(tmp_path):
    from tandem.vllm.node.arguments import parse_arguments, vllm_config_of

    engine = EngineConfig(model_dir=str(tiny("experts", tmp_path)))
    words = ["--skip-tokenizer-init", "--max-model-len", "512"]
    words += ["--kv-events-config", '{"enable_kv_cache_events": true}']
    events = KvEventsConfig(endpoint="tcp://*:5557")
    config = NodeConfig(role="decode", engine=engine, vllm_args=words, kv_events=events)
    with pytest.raises(ConfigInvalid, match="--kv-events-config are both set"):
        vllm_config_of(config, parse_arguments(config))


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--data-parallel-size", "2"], "--data-parallel-size"),
        (["--distributed-executor-backend", "ray"], "ray"),
        (["--node-rank", "1"], "--node-rank needs --nnodes"),
        ([*TWO_HOSTS, "--master-addr", "10.0.0.1"], "GLOO_SOCKET_IFNAME|--master-addr 10.0.0.1"),
        ([*TWO_HOSTS, "--data-parallel-size", "2"], "--data-parallel-size"),
    ],
)
def test_flags_for_several_engines_or_hosts_are_rejected(tmp_path, words, flag):
    from tandem.vllm.node.arguments import parse_arguments, vllm_config_of

    engine = EngineConfig(model_dir=str(tiny("experts", tmp_path)))
    words = ["--skip-tokenizer-init", "--max-model-len", "512", *words]
    config = NodeConfig(role="decode", engine=engine, vllm_args=words)
    with pytest.raises(ConfigInvalid, match=flag):
        vllm_config_of(config, parse_arguments(config))
