"""What the tests of hand-offs begin with. Connections that are well get all the time they need to be made."""

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
