"""Shared by all tests: models, hypothesis profiles, and isolation of global state between tests."""

import gc
import os
import signal
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tandem.node.models.checkpoint import resolve_model

CALM = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}

# Default for torch, here and in nodes: threads beyond the number of cores spin. A test may request more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background job ignores SIGINT, and processes that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Imports create hundreds of thousands of permanent objects; GC scans of them took a third of test collection, and
# a tenth of the frontend's tests.
gc.disable()

# No deadlines, because a busy machine must not fail a test. `make test` tries the same examples each time;
# `make test-all` draws new ones, and `make properties` draws more unless a test sets a number. A failure of either
# prints the line that reproduces it.
settings.register_profile("tandem", max_examples=50, derandomize=True, **CALM)
settings.register_profile("fresh", max_examples=250, print_blob=True, **CALM)
settings.register_profile("long", max_examples=2000, print_blob=True, **CALM)
settings.load_profile("tandem")

# The default renderer shows all variables of a traceback, which takes 0.2 s of the event loop.
RENDERER = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], RENDERER])

# Folders of tests that start whole clusters.
CLUSTERS = ("e2e", "faults", "kubernetes")

# These need system programs; each has its own command (`make help`).
collect_ignore = ["browser", "with_vllm"]


def pytest_itemcollected(item):
    """Mark the tests of clusters by folder: they take most of the time."""
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    if folder in CLUSTERS:
        item.add_marker("cluster")


def pytest_collection_modifyitems(items):
    """Order slow test files first, so that parallel workers end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish():
    """After test collection, enable garbage collection for new objects only."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _logs_as_before():
    """Restore the log configuration, because a test's stream is closed with the test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(autouse=True)
def _variables_as_before():
    """Fail a test that changes TANDEM_ environment variables, which later tests would read; restore them."""
    before = _our_variables()
    yield
    if (after := _our_variables()) != before:
        for name in after.keys() | before.keys():
            os.environ.pop(name, None)
        os.environ.update(before)
        names = sorted(dict(after.items() ^ before.items()))
        pytest.fail(f"the test left {', '.join(names)} otherwise than before")


def _our_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("TANDEM_")}


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """Directory of the embedded model, converted on first use and cached like a user's."""
    return resolve_model(None, Path.home() / ".cache" / "tandem" / "models")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return a function that creates, once per kind, the directory of a tiny random model."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        # Imported here, so that tests without a model do not wait for torch.
        from tests.tiny_models import make_tiny_model

        if kind not in made:
            made[kind] = make_tiny_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get
