"""What is under test, by the options of `plugin`."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tandem.conformance.nodes import DecodeNode, PrefillNode
from tandem.conformance.play_decode import DecodePlayer
from tandem.conformance.play_prefill import PrefillPlayer


def _given(request: pytest.FixtureRequest, flag: str) -> str:
    value = str(request.config.getoption(flag))
    if not value:
        pytest.skip(f"{flag} is not given")
    return value


@pytest.fixture(scope="session")
def prefill_node(request: pytest.FixtureRequest) -> Iterator[PrefillNode]:
    """The prefill node under test."""
    with closing(PrefillNode(_given(request, "--prefill-url"))) as node:
        yield node


@pytest.fixture
def decode(prefill_node: PrefillNode) -> Iterator[DecodePlayer]:
    """A decode half at the prefill node under test."""
    with closing(DecodePlayer(prefill_node)) as player:
        yield player


@pytest.fixture(scope="session")
def decode_node(request: pytest.FixtureRequest) -> Iterator[DecodeNode]:
    """The decode node under test."""
    with closing(DecodeNode(_given(request, "--decode-url"))) as node:
        yield node


@pytest.fixture
def prefill(decode_node: DecodeNode) -> Iterator[PrefillPlayer]:
    """A prefill half for the decode node under test."""
    with closing(PrefillPlayer(decode_node)) as player:
        yield player
