"""Makes the packages of `contrib/` importable, installed or not."""

import pytest

from tandem.kvtransfer.transports import one_sided
from tests.kvtransfer.makers import cross_process
from tests.patience import PATIENCE_S

collect_ignore = [
    f"test_{name}.py"
    for name in ("mooncake", "mooncake_store")
    if "mooncake" not in cross_process()
]


@pytest.fixture(autouse=True)
def _has_patience(monkeypatch):
    monkeypatch.setattr(one_sided, "CONNECT_TIMEOUT_S", PATIENCE_S)
