"""Short pauses and long timeouts, for machines of any speed."""

import pytest

from tests.kept_port import kept_port


@pytest.fixture
def closed_port():
    """A port where nobody listens unless the test does."""
    with kept_port() as port:
        yield port


@pytest.fixture
def closed_url(closed_port):
    return f"http://127.0.0.1:{closed_port}"


@pytest.fixture(autouse=True)
def short_pauses_and_long_connect_timeout(monkeypatch):
    monkeypatch.setattr("tandem.tools.batch.client.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("tandem.tools.batch.client.MAX_PAUSE_S", 0.02)
    monkeypatch.setattr("tandem.tools.batch.client.CONNECT_TIMEOUT_S", 600.0)
