"""Streams that are well get all the time they need to prove themselves."""

import pytest

from kvtransfer.transports import tcp_frames
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _has_patience(monkeypatch):
    monkeypatch.setattr(tcp_frames, "HANDSHAKE_TIMEOUT_S", PATIENCE_S)
