"""After anything, every page of both nodes is free or cached again."""

import asyncio
import random

import aiohttp
import pytest

from tests.e2e.clients import unaccounted
from tests.e2e.cluster import MAX_ROUNDS, eventually, running_cluster
from tests.tiny_models import VOCAB_SIZE

NUM_REQUESTS = 500
NUM_AT_ONCE = 24
FLAGS = (
    *("--page-size", "8", "--chunked-prefill-size", "32", "--max-total-tokens", "4096"),
    *("--attention-backend", "torch"),  # no kernel to compile at each start
)
# Nobody is to be lost, not even who stands still for a while: its requests would fail at a node, and be replayed.
CALM = ("--heartbeat-interval-ms", "20000")


async def ask(session, url: str, rng: random.Random) -> None:
    """Send one request; a third go away after a random number of events, or before the first."""
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 7, 8, 9, 40, 120, 300)))]
    params = {"max_new_tokens": rng.choice((1, 2, 20, 60)), "temperature": 0.8, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "stream": rng.random() < 0.7}
    leaves_after = rng.choice((0, 0, 1, 3, 10)) if rng.random() < 1 / 3 else None
    if leaves_after is None:
        async with session.post(f"{url}/generate", json=body) as response:
            await response.read()
            assert response.status == 200
        return
    body["stream"] = True
    try:
        # The time a client that sees no event stays varies too: it leaves while waiting, while
        # pages are pushed, or while tokens flow.
        async with asyncio.timeout(rng.random() * 0.3 if leaves_after == 0 else 60):
            async with session.post(f"{url}/generate", json=body) as response:
                for _ in range(leaves_after or 10**6):
                    if not await response.content.readline():
                        break
                response.close()
    except TimeoutError:
        pass


async def ask_many(url: str, num: int) -> None:
    rng = random.Random(20)
    limit = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(session, seed: int) -> None:
        async with limit:
            await ask(session, url, random.Random(seed))

    timeout = aiohttp.ClientTimeout(total=600)  # it guards against a hang alone
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(num):
            tasks.create_task(one(session, rng.randrange(2**32)))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_no_page_is_lost_by_500_requests_of_which_a_third_are_aborted(tiny_model, transport):
    flags = ("--model", str(tiny_model("llama")), "--transfer-backend", transport, *FLAGS)
    quiet = ("--num-threads", "1", "--log-level", "warning")
    with running_cluster(*flags, *quiet, *CALM, router_flags=CALM) as cluster:
        # Again where prefill was so fast that nobody left while it computed.
        for _ in range(MAX_ROUNDS):
            asyncio.run(ask_many(cluster.url, NUM_REQUESTS))
            is_clean = eventually(lambda: not any(map(unaccounted, cluster.loads())))
            loads = cluster.loads()
            assert is_clean, loads
            assert [load["num_failed"] for load in loads] == [0, 0]
            if is_aborted := all(load["num_aborted"] > 0 for load in loads):
                break
        assert is_aborted
        asyncio.run(ask_many(cluster.url, 20))
