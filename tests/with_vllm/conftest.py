"""Tests with a real vLLM, which `make test-vllm` runs in an environment of their own."""

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Return a directory of converted models."""
    return tmp_path_factory.mktemp("models")
