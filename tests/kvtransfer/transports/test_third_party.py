"""The example of `docs/transports.md`, installed like a package, passes the tests of every transport."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.transports.base import TransportConfig
from tandem.kvtransfer.transports.registry import known, transports
from tandem.wire.errors import TransferRefused
from tests.conformance import test_transport as conformance
from tests.conformance.pair import Pair
from tests.kvtransfer import rig as agents
from tests.kvtransfer.rig import DECODE_PAGES, PROMPT_PAGES, ROOM

PAGE = Path(__file__).parents[3] / "docs" / "transports.md"
CHECKS = [
    check
    for name, check in vars(conformance).items()
    if name.startswith("test_") and list(inspect.signature(check).parameters) == ["pair"]
]


@pytest.fixture
def transport(tmp_path, monkeypatch):
    """The example, found by its entry point."""
    text = PAGE.read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [entry_point] = re.findall(
        r"```toml\n\[project\.entry-points\.\"(.*?)\"\]\n(.*?)```", text, re.DOTALL
    )
    group, line = entry_point
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "pipe.py").write_text(code)
    installed = tmp_path / "my_package-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{group}]\n{line.replace(chr(34), '')}")
    monkeypatch.syspath_prepend(tmp_path)
    [found] = transports("pipe", TransportConfig())
    assert "pipe" in known()
    return found


@pytest.fixture
def pair(transport):
    made = Pair(transport)
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_example_of_the_page_passes(check, pair):
    check(pair)


@pytest.mark.parametrize("destination", [[3, 4], [2, 3, 4, 5, 6]])
def test_the_example_refuses_pages_that_are_not_granted(pair, destination):
    conformance.test_a_write_outside_the_grant_is_refused(pair, destination)


@conformance.LIES
def test_the_example_refuses_copies_that_leave_the_pool(pair, offset, size):
    conformance.test_a_copy_that_leaves_the_pool_is_refused(pair, offset, size)


def test_agents_hand_off_over_the_example_and_count_its_refusals(stack, transport):
    cluster = agents.Cluster(stack)
    cluster.use(transport)
    prefill, decode = cluster.prefill(verify="always"), cluster.decode()
    agents.serve_the_next(prefill, decode)
    assert (agents.pages(decode, DECODE_PAGES) == agents.pages(prefill, PROMPT_PAGES)).all()
    (link,) = prefill.agent._bootstrap.links.values()
    with pytest.raises(TransferRefused):
        link.connection.write(ROOM, CopyPlan(*(np.array([each]) for each in (0, 0, 64))))
    assert decode.agent.statistics().num_refused == 1
