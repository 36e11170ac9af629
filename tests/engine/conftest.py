"""Modules that stand for libraries of machines with a GPU, and torch's number of threads."""

import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture
def fake_flashinfer(monkeypatch):
    """Make `import flashinfer` find the stand-in, and only during the test."""
    names = ("flashinfer", "tandem.engine.attention_flashinfer")
    real = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    monkeypatch.syspath_prepend(Path(__file__).parent / "fake_modules")
    yield
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(real)


@pytest.fixture
def torch_threads():
    """Set torch's number of threads, during the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
