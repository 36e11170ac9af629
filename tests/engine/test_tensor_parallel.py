"""A model on two processes compared with one process. The second process is `follower.py`."""

from multiprocessing import Pipe
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from tandem.engine.config import EngineConfig, EngineOptions, config_of_rank
from tandem.engine.execution.launcher import ModelLauncher
from tandem.engine.execution.tensor_parallel import ShardedRunner, join
from tandem.engine.scheduling.core import Engine
from tandem.engine.scheduling.forward import ForwardInputs
from tandem.wire.errors import ConfigInvalid
from tandem.wire.generation import SamplingParams
from tests.engine.follower import NUM_PAGES, load_shard
from tests.fork_server import Forked
from tests.one_engine import run_together
from tests.patience import PATIENCE_S
from tests.tiny_models import CONFIGS

PAGE = 8
PROMPTS = [[3 + (i * 7 + n) % 300 for i in range(n)] for n in (1, 30, 61)]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 11}


class OtherRank:
    """The follower process, as `Followers`."""

    def __init__(self, store: Path) -> None:
        self.link, theirs = Pipe()
        self.process = Forked(["tests.engine.follower", str(store)], stdin=theirs.fileno())
        theirs.close()
        self.is_abandoned = False

    def load(self, config: EngineConfig) -> None:
        self.link.send(config)

    def forward(self, inputs, num_sampled) -> None:
        self.link.send((inputs, num_sampled))

    def abandon(self) -> None:
        self.is_abandoned = True

    def close(self) -> None:
        self.link.close()
        self.process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    # On machines with GPUs, transformers would shard over these.
    if torch.cuda.is_available():
        pytest.skip("hide the GPUs with CUDA_VISIBLE_DEVICES=")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("ranks") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        made = OtherRank(store)
        join(EngineOptions(tp_size=2, tp_rank=0), store)
        yield made
        made.close()
        dist.destroy_process_group()
    torch.set_num_threads(num_threads)


def config_of(path, **changes) -> EngineConfig:
    # The kernel of the `cpu` backend would be compiled again for each shard.
    settings = {"dtype": "float32", "page_size": PAGE, "chunked_prefill_size": 24}
    settings["attention_backend"] = "torch"
    return EngineConfig(model_dir=str(path), **settings | changes)


def load_both(other: OtherRank, config: EngineConfig):
    """Return rank 0's sharded runner and shape."""
    config = msgspec.structs.replace(config, tp_size=2)
    other.load(config_of_rank(config, 1))
    runner, shape = load_shard(config_of_rank(config, 0))
    return ShardedRunner(runner, other), shape


def generate(runner, shape, config, **sampling) -> list[list[int]]:
    """Return the tokens of all prompts, run together."""
    launcher = ModelLauncher(runner, shape, config.page_size)
    engine = Engine(launcher, shape, config, NUM_PAGES)
    params = SamplingParams(
        **{"temperature": 0, "max_new_tokens": 6, "ignore_eos": True, **sampling}
    )
    answers = run_together(engine, PROMPTS, [params] * len(PROMPTS))
    return [[token.token for token in answer] for answer in answers]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("kind", sorted(set(CONFIGS) - {"gemma"}))
def test_two_ranks_generate_the_tokens_of_one(other, tiny_model, kind, load_format):
    config = config_of(tiny_model(kind), load_format=load_format)
    alone, whole = load_shard(config)
    sharded, shape = load_both(other, config)
    assert shape.num_kv_heads == (whole.num_kv_heads if kind == "phi3" else 1)
    # With a step in flight, the next token's id is known only on the device.
    overlapped = msgspec.structs.replace(config, is_overlapped=True)
    for sampling in ({}, SAMPLED):
        expected = generate(alone, whole, config, **sampling)
        assert generate(sharded, shape, config, **sampling) == expected
        assert generate(sharded, shape, overlapped, **sampling) == expected


def test_heads_that_do_not_divide_evenly_are_refused(other, tiny_model):
    config = config_of(tiny_model("gemma"))
    with pytest.raises(ConfigInvalid, match="--tp 2 cannot split 4 attention heads and 1 KV head"):
        load_both(other, config)


def test_shard_has_the_fingerprint_of_the_whole_model(other, tiny_model):
    config = config_of(tiny_model("llama"))
    _, whole = load_shard(config)
    _, shard = load_both(other, config)
    assert shard.fingerprint == whole.fingerprint
    assert (shard.num_kv_heads, shard.model_kv_heads) == (1, 2)
    assert (whole.num_kv_heads, whole.model_kv_heads) == (2, 2)


def inputs_of(token_ids, sources) -> ForwardInputs:
    """Return one prompt's rows on page 0."""
    num_rows = len(token_ids)
    return ForwardInputs(
        token_ids=np.array(token_ids),
        sources=np.array(sources),
        positions=np.arange(num_rows),
        query_starts=np.array([0, num_rows], np.int32),
        kv_lens=np.array([num_rows], np.int32),
        page_table=np.zeros((1, 1), np.int32),
        num_decodes=0,
        logit_rows=np.array([num_rows - 1]),
    )


def test_ids_on_the_device_reach_the_other_rank(other, tiny_model):
    sharded, _ = load_both(other, config_of(tiny_model("llama")))
    expected = sharded.forward(inputs_of([5, 9, 7], [-1, -1, -1]))
    sampled = torch.tensor([9, 7])
    assert torch.equal(sharded.forward(inputs_of([5, 0, 0], [-1, 0, 1]), sampled), expected)
    # Sampled ids that no row refers to are not sent.
    assert torch.equal(sharded.forward(inputs_of([5, 9, 7], [-1, -1, -1]), sampled), expected)


def test_failed_forward_terminates_the_other_ranks():
    class Broken:
        device = torch.device("cpu")

        def forward(self, inputs, sampled=None, on_layer_written=None):
            raise ZeroDivisionError

    class Others:
        is_abandoned = False

        def forward(self, inputs, num_sampled):
            pass

        def abandon(self):
            self.is_abandoned = True

    others = Others()
    with pytest.raises(ZeroDivisionError):
        ShardedRunner(Broken(), others).forward(inputs_of([5], [-1]))
    assert others.is_abandoned
