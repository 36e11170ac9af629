"""What the connector tells the node of its workers' reports, without an engine."""

from collections import Counter
from types import SimpleNamespace

import pytest

from tandem.vllm.halves import DecodeHalves, First, Group, PrefillHalves, Reports, Source
from tandem.wire.generation import Room

# What vLLM imports warns of its own age.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


GROUPS = (Group(4),)


@pytest.fixture
def connector():
    """Return the scheduler's side alone: vLLM makes it with an engine around."""
    from tandem.vllm.connector import TandemConnector

    made = object.__new__(TandemConnector)
    made._prefill, made._decode = PrefillHalves(GROUPS, 2), DecodeHalves(GROUPS)
    made._news, made._loading, made.moved_bytes = Reports(), {}, 0
    return made


def heard(connector, **reports):
    from tandem.vllm.connector import StepReports

    told = SimpleNamespace(kv_connector_worker_meta=StepReports(Reports(**reports)))
    connector.update_connector_output(told)
    return connector.take_news()


def test_a_prompt_is_handed_off_once_every_rank_has_told_so(connector):
    connector._prefill.begin("a", Room(1), 4)
    connector._prefill.finished("a", 9, ([1],))
    assert not heard(connector, handed_off=Counter(a=1)).handed_off
    assert heard(connector, handed_off=Counter(a=1)).handed_off == Counter(a=1)


def test_a_landing_that_ranks_tell_in_different_steps_is_told_once(connector):
    connector._decode.allocated("a", Source(Room(1), "localhost", 1), ([1],), 4, 4)
    connector._loading["a"] = SimpleNamespace(kv_transfer_params={})
    assert heard(connector, landed={"a": First(9, 0)}).landed == {"a": First(9, 0)}
    assert not heard(connector, landed={"a": First(9, 0)}).landed
