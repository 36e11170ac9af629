"""Connections that are well get all the time they need to be made."""

import pytest

from tandem.kvtransfer.transports import one_sided, tcp_frames
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _has_patience(monkeypatch):
    monkeypatch.setattr(one_sided, "CONNECT_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(tcp_frames, "HANDSHAKE_TIMEOUT_S", PATIENCE_S)
