"""Models that tests share: the embedded one, and tiny random ones of several architectures."""

import gc
import os
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tandem.node.checkpoint import resolve_model

CALM = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}

# Of torch, here and in nodes: more threads than cores wait for each other by spinning. One that asks for more gets them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Imports make hundreds of thousands of objects that stay: a third of collecting the tests was looking through them.
gc.disable()

# The same examples each time, and no limit on their time: neither luck nor a busy machine refuses a change.
# `make properties` draws others, and more where a test does not say how many.
settings.register_profile("tandem", derandomize=True, **CALM)
settings.register_profile("long", max_examples=2000, print_blob=True, **CALM)
settings.load_profile("tandem")

# Folders of tests that start whole clusters.
CLUSTERS = ("e2e", "faults", "kubernetes")

# They need programs of the system: each has a command of its own (`make help`).
collect_ignore = ["browser"]


def pytest_itemcollected(item):
    """Mark the tests of clusters by their folder: they take most of the time."""
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    if folder in CLUSTERS:
        item.add_marker("cluster")


def pytest_collection_finish():
    """Look for what can go again."""
    gc.enable()


@pytest.fixture(autouse=True)
def _logs_as_before():
    """Undo what a test made of the log: its stream is closed with the test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """Directory of the embedded model, converted on first use and kept like a user's."""
    return resolve_model(None, Path.home() / ".cache" / "tandem" / "models")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return a function that makes (once) the directory of a tiny random model of a kind."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        # Imported here: whoever runs a file that needs no model does not wait for torch.
        from tests.tiny_models import make_tiny_model

        if kind not in made:
            made[kind] = make_tiny_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get
