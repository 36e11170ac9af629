"""The store of an extra that does not work here is not tested; nothing is left behind for being slow."""

from importlib import import_module

import pytest

from tandem.kvtier import disk, stack
from tests.patience import PATIENCE_S

collect_ignore = []
try:
    import_module("mooncake.store")
except ImportError:  # not installed, or without the host's libraries that it wants
    collect_ignore.append("test_mooncake.py")


@pytest.fixture(autouse=True)
def _has_patience(monkeypatch):
    """A mount and a tier that are well get all the time they need; tests of those that hang take less."""
    monkeypatch.setattr(disk, "START_S", PATIENCE_S)
    monkeypatch.setattr(stack, "CLOSE_S", PATIENCE_S)
