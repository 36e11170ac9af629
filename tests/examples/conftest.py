"""What the tests of examples begin with."""

from contextlib import ExitStack

import pytest


@pytest.fixture
def stack():
    with ExitStack() as opened:
        yield opened
