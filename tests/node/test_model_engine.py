"""The size of the pool in a GPU's memory."""

import pytest

from tandem.engine.config import EngineConfig
from tandem.node.config import NodeConfig
from tandem.node.ranks.model_engine import has_graphs, pool_budget
from tests.engine.test_cuda_graphs import RecordableTorch


@pytest.mark.parametrize(
    ("free", "own", "fraction", "budget"),
    [
        (80, 16, 0.85, 69),  # alone
        (80, 16, 0.425, 26),  # the other node has not loaded yet
        (38, 16, 0.425, 26),  # the other node has its half
        (20, 16, 0.85, 15),  # an unrelated process has most of it
        (2, 16, 0.85, 0),
    ],
)
def test_pool_budget_leaves_memory_to_other_processes(free, own, fraction, budget):
    assert pool_budget(free, 100, own, fraction) == budget


@pytest.mark.parametrize(("role", "is_recorded"), [("prefill", False), ("decode", True)])
def test_prefill_node_records_no_cuda_graphs(role, is_recorded):
    config = NodeConfig(role=role, port=1, engine=EngineConfig(model_dir="/model", device="cuda:0"))
    assert has_graphs(config, RecordableTorch()) == is_recorded
