"""Fixtures of the tests of examples."""

from contextlib import ExitStack

import pytest


@pytest.fixture
def stack():
    with ExitStack() as opened:
        yield opened
