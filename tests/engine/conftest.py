"""Torch's number of threads."""

import pytest
import torch


@pytest.fixture
def torch_threads():
    """Set torch's number of threads during the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
