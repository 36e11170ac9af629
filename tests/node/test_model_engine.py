"""How much of a GPU's memory becomes the pool."""

import pytest

from tandem.engine.config import EngineConfig
from tandem.node.config import NodeConfig
from tandem.node.model_engine import has_graphs, pool_budget
from tests.engine.test_cuda_graphs import RecordableTorch


@pytest.mark.parametrize(
    ("free", "own", "fraction", "budget"),
    [
        (80, 16, 0.85, 69),  # alone
        (80, 16, 0.425, 26),  # the other node is yet to load
        (38, 16, 0.425, 26),  # the other node has its half
        (20, 16, 0.85, 15),  # a stranger has most of it
        (2, 16, 0.85, 0),
    ],
)
def test_a_node_counts_its_own_memory_and_leaves_other_processes_theirs(
    free, own, fraction, budget
):
    assert pool_budget(free, 100, own, fraction) == budget


@pytest.mark.parametrize(("role", "is_recorded"), [("prefill", False), ("decode", True)])
def test_a_node_that_never_decodes_records_no_graphs(role, is_recorded):
    config = NodeConfig(role=role, port=1, engine=EngineConfig(model_dir="", device="cuda:0"))
    assert has_graphs(config, RecordableTorch()) == is_recorded
