"""Fixtures of the hand-off tests. Healthy connections get generous timeouts."""

from contextlib import ExitStack

import pytest

from tandem.kvtransfer.transports import one_sided, tcp_stream
from tests.kvtransfer import rig
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _has_patience(monkeypatch):
    monkeypatch.setattr(one_sided, "CONNECT_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(tcp_stream, "HANDSHAKE_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def stack():
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def cluster(stack):
    return rig.Cluster(stack)
