from tandem.wire.messages import NodeLoad

BUSY = NodeLoad(
    num_running=3,
    num_waiting=2,
    num_transferring=1,
    num_pages=100,
    pages_free=50,
    pages_cached=10,
    page_size=16,
    queued_tokens=7,
    max_running=64,
)


async def get(client, path):
    async with client.get(path) as response:
        return response.status, await response.json()


async def test_get_load_lists_nodes_as_ranks(client, backend):
    backend.node_loads = [BUSY, NodeLoad()]
    assert await get(client, "/get_load") == (
        200,
        [
            {"dp_rank": 0, "num_reqs": 6, "num_waiting_reqs": 2, "num_tokens": 40 * 16 + 7},
            {"dp_rank": 1, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0},
        ],
    )


async def test_v1_loads_matches_get_load(client, backend):
    backend.node_loads = [BUSY, NodeLoad()]
    status, answer = await get(client, "/v1/loads?include=core")
    busy, idle = answer["loads"]
    assert (status, busy["num_running_reqs"], busy["num_waiting_reqs"]) == (200, 4, 2)
    assert (busy["num_used_tokens"], busy["num_total_tokens"]) == (640, 647)
    assert (busy["token_usage"], idle["token_usage"]) == (0.4, 0)
    _, answer = await get(client, "/v1/loads?dp_rank=1")
    assert [load["dp_rank"] for load in answer["loads"]] == [1]


async def test_unsupported_loads_format_is_rejected(client):
    status, answer = await get(client, "/v1/loads?format=prometheus")
    assert (status, "/metrics" in answer["error"]["message"]) == (400, True)
