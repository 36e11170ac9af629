"""How much of a GPU's memory becomes the pool."""

import pytest

from tandem.node.model_engine import pool_budget


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
