"""The store of an extra that is not installed is not tested; nothing is left behind for being slow."""

from importlib.util import find_spec

import pytest

from kvtier import disk, stack
from tests.patience import PATIENCE_S

collect_ignore = [] if find_spec("mooncake") else ["test_mooncake.py"]


@pytest.fixture(autouse=True)
def _has_patience(monkeypatch):
    """A mount and a tier that are well get all the time they need; tests of those that hang take less."""
    monkeypatch.setattr(disk, "START_S", PATIENCE_S)
    monkeypatch.setattr(stack, "CLOSE_S", PATIENCE_S)
