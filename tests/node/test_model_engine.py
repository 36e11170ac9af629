"""The size of the pool in a GPU's memory, and the threads of a rank."""

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.node.config import NodeConfig
from tandem.node.ranks import model_engine
from tandem.node.ranks.model_engine import has_graphs, num_threads, pool_budget
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


@pytest.mark.parametrize(
    ("flag", "torch_threads", "cores", "tp_size", "count"),
    [
        (0, 4, 4, 1, 4),
        (0, 4, 4, 2, 2),
        (0, 64, 4, 2, 2),  # torch does not read the CPU limit of a container
        (0, 1, 4, 1, 1),  # OMP_NUM_THREADS
        (0, 2, 2, 4, 1),
        (6, 2, 2, 1, 6),
        (6, 2, 2, 2, 3),
    ],
)
def test_ranks_divide_the_threads_of_their_node(
    monkeypatch, flag, torch_threads, cores, tp_size, count
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_threads)
    monkeypatch.setattr(model_engine, "num_cores", lambda: cores)
    settings = EngineConfig(model_dir="/model", num_threads=flag, tp_size=tp_size)
    assert num_threads(settings) == count


@pytest.mark.parametrize(("role", "is_recorded"), [("prefill", False), ("decode", True)])
def test_prefill_node_records_no_cuda_graphs(role, is_recorded):
    config = NodeConfig(role=role, port=1, engine=EngineConfig(model_dir="/model", device="cuda:0"))
    assert has_graphs(config, RecordableTorch()) == is_recorded
