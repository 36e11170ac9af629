"""Selects the node or transport under test: the one that an option names, else those of this repository.

    pytest tests/conformance --prefill-url http://127.0.0.1:7000
    pytest tests/conformance --decode-url http://127.0.0.1:7001
    pytest tests/conformance --transport my_package:MyTransport

The cluster's secret is TANDEM_CLUSTER_KEY. A node must have one rank, enable `tcp` and serve nobody else.
"""

from contextlib import ExitStack, closing
from importlib import import_module

import pytest

from tandem.kvtransfer.region import SHM_DIR
from tandem.kvtransfer.transports import one_sided, tcp_stream
from tandem.kvtransfer.transports.base import TransportConfig
from tests.conformance import agents
from tests.conformance.nodes import DecodeNode, PrefillNode
from tests.conformance.pair import OWN_NAME, Pair
from tests.conformance.played import PlayedHalf
from tests.conformance.played_decode import PlayedDecode
from tests.conformance.played_prefill import PlayedPrefill
from tests.patience import PATIENCE_S

# By fixture: the option that names what is tested.
OPTIONS = {"decode": "--prefill-url", "prefill": "--decode-url", "pair": "--transport"}
# Their owner sees no write: nothing but the fence keeps out a peer that breaks the protocol.
ONE_SIDED = {"nixl", "mooncake"}


def pytest_addoption(parser):
    group = parser.getgroup("conformance", "the hand-off protocol of Tandem")
    group.addoption("--prefill-url", help="HTTP address of a prefill node")
    group.addoption("--decode-url", help="HTTP address of a decode node")
    group.addoption("--transport", help="a transport, as package.module:Class")
    told = "the owner of the pool sees no write, as with RDMA: leave out what it could refuse"
    group.addoption("--one-sided", action="store_true", help=told)


def _given(config, fixture):
    return config.getoption(
        OPTIONS[fixture], None
    )  # None also where only a conftest above was read


def pytest_generate_tests(metafunc):
    for fixture in OPTIONS.keys() & set(metafunc.fixturenames):
        given = _given(metafunc.config, fixture)
        cases = [given] if given else CASES[fixture]()
        metafunc.parametrize(fixture, cases, indirect=True)


def _transports():
    from tests.kvtransfer.makers import NAMES

    return NAMES


CASES = {
    "decode": lambda: ["agent"],
    "prefill": lambda: ["agent", "example"],
    "pair": _transports,
}


def pytest_collection_modifyitems(config, items):
    """Leave out the rest if something to test is named."""
    if named := {fixture for fixture in OPTIONS if _given(config, fixture)}:
        items[:] = [each for each in items if named & set(getattr(each, "fixturenames", ()))]


@pytest.fixture
def stack(monkeypatch):
    monkeypatch.setattr(one_sided, "CONNECT_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(tcp_stream, "HANDSHAKE_TIMEOUT_S", PATIENCE_S)
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def make_decode(stack):
    """Make a decode half for a new prefill agent; a rhythm is for tests of time."""
    return lambda rhythm="": _closed(stack, PlayedDecode(agents.PrefillAgent(stack, rhythm)))


@pytest.fixture
def make_prefill(stack):
    """Make a prefill half for a new decode agent."""
    return lambda rhythm="": _closed(stack, PlayedPrefill(agents.DecodeAgent(stack, rhythm)))


def _closed(stack, half):
    stack.callback(half.close)
    return half


@pytest.fixture
def decode(request, stack, make_decode, monkeypatch):
    """A decode half for the prefill node under test."""
    if url := _given(request.config, "decode"):
        return _closed(stack, PlayedDecode(stack.enter_context(closing(PrefillNode(url)))))
    monkeypatch.setattr(PlayedHalf, "settle_s", 0.05)
    return make_decode(agents.rhythm_of(request.function))


@pytest.fixture
def prefill(request, stack, make_prefill, monkeypatch):
    """A prefill half for the decode node under test."""
    if url := _given(request.config, "prefill"):
        return _closed(stack, PlayedPrefill(stack.enter_context(closing(DecodeNode(url)))))
    monkeypatch.setattr(PlayedHalf, "settle_s", 0.05)
    rhythm = agents.rhythm_of(request.function)
    if request.param == "agent":
        return make_prefill(rhythm)
    return agents.before_example(stack, rhythm, monkeypatch)


@pytest.fixture
def pair(request, stack):
    """Both ends of the transport under test."""
    if place := _given(request.config, "pair"):
        module, _, name = place.partition(":")
        transport = getattr(import_module(module), name)(TransportConfig())
        is_one_sided = request.config.getoption("--one-sided")
    else:
        from tests.kvtransfer.makers import make

        transport, is_one_sided = make(request.param), request.param in ONE_SIDED
    with closing(Pair(transport, is_one_sided=is_one_sided)) as made:
        yield made
    assert not list(SHM_DIR.glob(f"tandem-{OWN_NAME}-*"))
