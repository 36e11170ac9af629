"""Forty links of one decode node, for as long as it takes. `python -m tests.faults.many_links` goes on for minutes."""

import asyncio

import pytest

from tandem.wire.channel import Heartbeat
from tests.faults.many_links import many_links

NUM_LINKS = 40
# So that nobody is lost for being slow on a busy machine.
SELDOM = Heartbeat(20.0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_decode_node_serves_over_forty_links_at_once_and_none_costs_more_than_its_share(backend):
    report = asyncio.run(many_links(0.0, NUM_LINKS, backend, SELDOM))
    assert report["problems"] == []
    assert report["links"] == NUM_LINKS
    assert report["right"] == 2 * NUM_LINKS
