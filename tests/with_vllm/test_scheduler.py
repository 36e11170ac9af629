"""What vLLM does on GPUs: batches that overlap, with vLLM's own scheduler, and CUDA graphs."""

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.node.config import NodeConfig
from tandem.vllm.node.environment import extra_config
from tests.with_vllm.models import tiny

# vLLM's dependencies raise deprecation warnings on import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BLOCK = 16
NUM_BLOCKS = 9  # one is vLLM's null block
SOURCE = {"bootstrap_room": 7, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}


@pytest.fixture
def scheduler(tmp_path):
    """Return decode's scheduler, which runs a batch ahead."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from tandem.vllm.node.arguments import parse_arguments, vllm_config_of

    words = ["--skip-tokenizer-init", "--max-model-len", "512", "--block-size", str(BLOCK)]
    words += ["--no-enable-prefix-caching"]
    engine = EngineConfig(model_dir=str(tiny("experts", tmp_path)))
    node = NodeConfig(role="decode", engine=engine, vllm_args=words)
    config = vllm_config_of(node, parse_arguments(node))
    config.scheduler_config.async_scheduling = True  # vLLM switches it off on CPUs
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    kv = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    return AsyncScheduler(config, kv, StructuredOutputManager(config), BLOCK)


def request(request_id, num_tokens, params=None):
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": params})
    return Request(request_id, list(range(3, 3 + num_tokens)), sampling, None)


def finish(scheduler, batch):
    """Report a batch as computed."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(batch.num_scheduled_tokens)
    output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [[5]] * len(names))
    scheduler.update_from_output(batch, output)


def grants(batch):
    return batch.kv_connector_metadata.orders.grants


def test_blocks_that_a_batch_in_flight_writes_are_not_granted(scheduler):
    from vllm.v1.request import RequestStatus

    scheduler.add_request(request("old", 7 * BLOCK))
    running = scheduler.schedule()
    assert running.num_scheduled_tokens == {"old": 7 * BLOCK}
    scheduler.finish_requests("old", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(request("new", 6 * BLOCK, SOURCE))
    assert not grants(scheduler.schedule())
    finish(scheduler, running)
    [grant] = grants(scheduler.schedule())
    assert (grant.request_id, len(grant.page_ids)) == ("new", 6)


@pytest.mark.parametrize(("role", "is_piecewise"), [("prefill", True), ("decode", False)])
def test_decode_keeps_cuda_graphs_of_whole_steps(role, is_piecewise):
    from tandem.vllm.connector import TandemConnector

    node = NodeConfig(role=role, engine=EngineConfig(model_dir="/m"))
    assert TandemConnector.requires_piecewise_for_cudagraph(extra_config(node)) is is_piecewise
