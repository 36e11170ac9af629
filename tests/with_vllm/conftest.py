"""Tests with a real vLLM. `make test-vllm` runs them in a separate environment."""

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Return a directory of converted models."""
    return tmp_path_factory.mktemp("models")
