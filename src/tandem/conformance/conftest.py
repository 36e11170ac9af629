"""What is under test, by the options of `plugin`."""

from collections.abc import Iterator
from contextlib import closing
from importlib import import_module

import pytest

from tandem.conformance.nodes import DecodeNode, PrefillNode
from tandem.conformance.pair import Pair
from tandem.conformance.play_decode import DecodePlayer
from tandem.conformance.play_prefill import PrefillPlayer
from tandem.kvtransfer.transports.base import TransportConfig, TransportFactory


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


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Both ends of the transport under test."""
    module, _, name = _given(request, "--transport").partition(":")
    factory: TransportFactory = getattr(import_module(module), name)
    is_one_sided = bool(request.config.getoption("--one-sided"))
    with closing(Pair(factory(TransportConfig()), is_one_sided=is_one_sided)) as made:
        yield made
