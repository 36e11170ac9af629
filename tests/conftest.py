"""What all tests share: models, how hypothesis draws, and that no test changes what the next one finds."""

import gc
import os
import signal
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tandem.node.checkpoint import resolve_model

CALM = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}

# Of torch, here and in nodes: more threads than cores wait for each other by spinning. One that asks for more gets them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A run in the background of a shell ignores it, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Imports make hundreds of thousands of objects that stay: a third of collecting the tests was looking through them.
gc.disable()

# No limit on their time, for a busy machine refuses no change. `make test` tries the same examples each time;
# `make test-all` draws others, and `make properties` more where a test does not say how many. A failure of either
# prints the line that has it repeated.
settings.register_profile("tandem", max_examples=50, derandomize=True, **CALM)
settings.register_profile("fresh", max_examples=250, print_blob=True, **CALM)
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


def pytest_collection_modifyitems(items):
    """Begin with the files of slow tests: processes that share the files end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish():
    """Look for what can go again."""
    gc.enable()


@pytest.fixture(autouse=True)
def _logs_as_before():
    """Undo what a test made of the log: its stream is closed with the test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(autouse=True)
def _variables_as_before():
    """Fail a test that leaves our variables otherwise than they were: later tests would read them."""
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
