"""What waits at a server, as ours tell it in fact and others' document it."""

import aiohttp
import msgspec
import pytest

from tandem.batch.looks import Watcher, of_metrics, of_node, of_overview
from tandem.router.overview import NodeView, Overview
from tandem.wire.messages import NodeLoad
from tests.tandem.batch.stub import Stub

VLLM = """\
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_running{engine="0",model_name="m"} 9.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m"} 70.0
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m"} 9.0
sglang:num_queue_reqs{model_name="m"} 12.0
"""


def overview(queued: int, **waiting: int) -> bytes:
    nodes = [
        NodeView(id=role, url=role, role=role, state="up", load=NodeLoad(num_waiting=number))
        for role, number in waiting.items()
    ]
    return msgspec.json.encode(
        Overview(
            now_unix_s=0, version="", is_serving=True, detail="", num_queued=queued, nodes=nodes
        )
    )


def test_a_routers_line_and_those_of_its_nodes_count():
    assert of_overview(overview(5, decode=2, prefill=3)) == 7, "a prefill needs a few to be busy"
    assert of_overview(overview(0, decode=0, prefill=20)) == 12


def test_metrics_of_others_are_read():
    assert of_metrics(VLLM.encode()) == 4
    assert of_metrics(SGLANG.encode()) == 12
    with pytest.raises(ValueError, match="no metric"):
        of_metrics(b"up 1\n")


def test_a_node_is_asked_as_a_node():
    assert of_node(b'{"role": "colocated", "load": {"num_waiting": 6}, "more": 1}') == 6
    with pytest.raises(msgspec.ValidationError):
        of_node(b'{"model_path": "a server of another kind"}')


@pytest.mark.parametrize(
    ("pages", "queued"),
    [
        ({"overview": overview(4).decode(), "metrics": SGLANG}, 4),
        ({"server_info": '{"role":"decode","load":{"num_waiting":2}}', "metrics": SGLANG}, 2),
        ({"server_info": '{"version":"x"}', "metrics": SGLANG}, 12),
        ({"metrics": VLLM}, 4),
        ({"metrics": "up 1\n"}, None),
        ({}, None),
    ],
)
async def test_each_server_is_asked_in_the_way_that_it_answers(pages, queued):
    stub = Stub(**pages)
    async with stub.serving() as url, aiohttp.ClientSession() as session:
        watcher = Watcher(session, url)
        assert [await watcher.look(), await watcher.look()] == [queued, queued]
        if queued is None:
            stub.pages["/metrics"] = VLLM
            assert await watcher.look() is None, "it is not asked for ever what it does not know"
            watcher.begin_again()
            assert await watcher.look() == 4


async def test_a_server_that_is_away_may_tell_later(closed_url, closed_port):
    async with aiohttp.ClientSession() as session:
        watcher = Watcher(session, closed_url)
        assert await watcher.look() is None
        async with Stub(metrics=VLLM).serving(closed_port):
            assert await watcher.look() == 4
