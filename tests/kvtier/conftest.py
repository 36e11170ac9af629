"""Nothing is left behind for being slow."""

import pytest

from tandem.kvtier import disk, stack
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _has_patience(monkeypatch):
    """A mount and a tier that are well get all the time they need; tests of those that hang take less."""
    monkeypatch.setattr(disk, "START_S", PATIENCE_S)
    monkeypatch.setattr(stack, "CLOSE_S", PATIENCE_S)
