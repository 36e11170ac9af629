"""The connector's reports of ended transfers to the node, without an engine."""

from collections import Counter
from types import SimpleNamespace

import pytest

from tandem.vllm.hand_offs import (
    DecodeHandOffs,
    FirstToken,
    LayerGroup,
    PrefillHandOffs,
    PromptSource,
    WorkerReports,
)
from tandem.wire.generation import Room

# vLLM's dependencies raise deprecation warnings on import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


GROUPS = (LayerGroup(4),)


@pytest.fixture
def connector():
    """Return only the scheduler side of the connector, made without an engine."""
    from tandem.vllm.connector import TandemConnector

    connector = object.__new__(TandemConnector)
    connector._prefill, connector._decode = PrefillHandOffs(GROUPS, 2), DecodeHandOffs(GROUPS)
    connector._transfers, connector.moved_bytes = WorkerReports(), 0
    return connector


def report(connector, **reports):
    from tandem.vllm.connector import StepReports

    output = SimpleNamespace(kv_connector_worker_meta=StepReports(WorkerReports(**reports)))
    connector.update_connector_output(output)
    return connector.take_transfers()


def test_prompt_is_handed_off_once_every_rank_reports_it(connector):
    connector._prefill.begin("a", Room(1), 4)
    connector._prefill.on_finished("a", [0, 0, 0, 0, 9], ([1],))
    assert not report(connector, handed_off=Counter(a=1)).handed_off
    assert report(connector, handed_off=Counter(a=1)).handed_off == Counter(a=1)


def test_landing_reported_by_ranks_in_different_steps_is_returned_once(connector):
    connector._decode.on_allocated("a", PromptSource(Room(1), "localhost", 1), ([1],), 4, 4)
    assert report(connector, landed={"a": FirstToken(9, 0)}).landed == {"a": FirstToken(9, 0)}
    assert not report(connector, landed={"a": FirstToken(9, 0)}).landed
