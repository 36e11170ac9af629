"""Limits of time and ports that no machine's pace and no other process decides."""

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
def patient_client(monkeypatch):
    """Wait for servers of the tests however long the machine stands still; whoever is away refuses at once."""
    for name in ("client.CONNECT_TIMEOUT_S", "attempt.CONNECT_TIMEOUT_S", "looks.LOOK_TIMEOUT_S"):
        monkeypatch.setattr(f"tandem.batch.{name}", 600.0)
