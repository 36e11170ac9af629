"""The example of `docs/transports.md`, installed as a package would be and put through the checks of all."""

import inspect
import re
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tandem.kvtransfer.events import Landed, Lost, Safe
from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import TransportConfig
from tandem.kvtransfer.transports.registry import known, transports
from tandem.wire.errors import TransferRefused
from tandem.wire.generation import Room
from tests.kvtransfer import rig as agents
from tests.kvtransfer import test_transports as conformance
from tests.kvtransfer.rig import DECODE_PAGES, PROMPT_PAGES, ROOM
from tests.kvtransfer.test_lies import LyingPrefill

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
    made = conformance.Pair(transport)
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_example_of_the_page_passes(check, pair):
    check(pair)


@pytest.mark.parametrize("destination", [[3, 4], [2, 3, 4, 5, 6]])
def test_the_example_refuses_what_is_not_granted(pair, destination):
    conformance.test_a_write_outside_the_grant_is_refused(pair, destination)


@conformance.LIES
def test_the_example_refuses_copies_that_leave_the_pool(pair, offset, size):
    conformance.test_a_copy_that_leaves_the_pool_is_refused(pair, offset, size)


@pytest.fixture
def cluster(transport):
    """Real agents of both roles that have no transport but the example."""
    with ExitStack() as stack:
        made = agents.Cluster(stack)
        made.use(transport)
        yield made


def test_agents_hand_off_over_the_example_and_report_on_it(cluster):
    prefill, decode = cluster.prefill(verify="always"), cluster.decode()
    for number in range(3):
        room = Room(number)
        prefill.agent.expect(room)
        agents.request(decode, prefill, room=room)
        agents.push_all(prefill, room=room)
        assert decode.next(Landed).room == room
    assert (agents.pages(decode, DECODE_PAGES) == agents.pages(prefill, PROMPT_PAGES)).all()
    told = decode.agent.statistics()
    assert (told.num_links, told.num_landed, told.num_refused) == (1, 3, 0)


def test_a_decode_agent_fences_the_example_and_serves_the_next_prefill(cluster):
    prefill, decode = cluster.prefill(), cluster.decode()
    agents.request(decode, prefill)
    prefill.wait_until(lambda now: now.num_early_grants == 1)
    prefill.agent.close()
    decode.next(Lost)
    assert decode.next() == Safe(ROOM)
    successor = cluster.prefill(epoch=11)
    successor.agent.expect(ROOM)
    agents.request(decode, successor)
    agents.push_all(successor)
    decode.next(Landed)


def test_a_decode_agent_counts_what_the_example_refused(cluster, transport):
    decode = cluster.decode()
    with ExitStack() as stack, MemoryRegion.private(64) as source:
        prefill = LyingPrefill(stack, decode)
        prefill.stand(transport.name)
        connection = transport.connect(prefill.hello.offers[0], source)
        with pytest.raises(TransferRefused):
            connection.write(Room(ROOM + 1), CopyPlan(*(np.array([each]) for each in (0, 0, 64))))
        assert decode.agent.statistics().num_refused == 1
