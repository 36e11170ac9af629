"""Models that tests share: the embedded one, and tiny random ones of several architectures."""

from pathlib import Path

import pytest

from node.checkpoint import resolve_model
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """Directory of the embedded model, converted on first use and kept like a user's."""
    return resolve_model(None, Path.home() / ".cache" / "tandem" / "models")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return a function that makes (once) the directory of a tiny random model of a kind."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_tiny_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get
