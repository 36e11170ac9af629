"""Long time limits, so that a slow machine fails no test."""

import pytest

from tandem.kvtier import disk, stack
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _has_patience(monkeypatch):
    """Give healthy mounts and tiers ample time. Tests of hanging ones set shorter limits."""
    monkeypatch.setattr(disk, "START_S", PATIENCE_S)
    monkeypatch.setattr(stack, "CLOSE_S", PATIENCE_S)
