"""A replayed request answers as an undisturbed one does, whatever was asked for."""

import asyncio
import json
import os
import re
import signal

import aiohttp
import pytest

from tests.e2e.clients import ask_all, assert_same, post, unaccounted
from tests.e2e.cluster import ask, running_cluster
from tests.e2e.conftest import FLAGS
from tests.e2e.test_features import CALLS, EXAMPLE, SCHEMA, SEEDED, STORY, native
from tests.patience import eventually, until_async

LONG = {"max_new_tokens": 90, "ignore_eos": True}
DISTURBED = {
    "greedy": native(sampling=LONG),
    "seeded": native(sampling={**SEEDED, **LONG}),
    "a stop string far away": native(sampling={"stop": ["wood", "\n\n\n"], "max_new_tokens": 60}),
    "a stop pattern far away": native(sampling={"stop_regex": "w[a-z]+s", "max_new_tokens": 60}),
    "penalties": native(sampling={"repetition_penalty": 1.3, "frequency_penalty": 0.5, **LONG}),
    "log-probabilities": native(
        STORY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2, sampling=LONG
    ),
    "several of one prompt": native(sampling={**SEEDED, **LONG, "n": 3}),
    "a schema": native(EXAMPLE, sampling={"json_schema": SCHEMA, "max_new_tokens": 120}),
    "a seeded schema": native(
        EXAMPLE, sampling={**SEEDED, "json_schema": SCHEMA, "max_new_tokens": 120}
    ),
    "a schema in a chat": CALLS["a schema in a chat"],
    "log-probabilities of a completion": (
        "/v1/completions",
        {"prompt": STORY[:100], "temperature": 0, "max_tokens": 60, "logprobs": 2},
    ),
}

# Its tokens say that the kill comes between the first and the last, whatever the pace.
ANCHOR = {
    "input_ids": [5, 6, 7, 8] * 20,
    "sampling_params": {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True},
    "stream": True,
}


async def follow(session, url: str, token_ids: list[int]) -> None:
    """Stream the anchor's answer into `token_ids`."""
    async with session.post(f"{url}/generate", json=ANCHOR) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                token_ids[:] = json.loads(line[6:])["output_ids"]


async def ask_anchor(url: str) -> list[int]:
    """Return the anchor's answer."""
    token_ids: list[int] = []
    async with aiohttp.ClientSession() as session:
        await follow(session, url, token_ids)
    return token_ids


async def num_told(token_ids: list[int], wanted: int) -> None:
    """Wait for tokens."""
    await until_async(lambda: len(token_ids) >= wanted)


async def ask_while_killing(cluster) -> tuple[str, list[int], dict]:
    """Send all calls; kill the decode node that gives the anchor's tokens, once it has some of the calls, too.

    Return its URL, the anchor's answer and the others'.
    """
    pids = dict(zip(cluster.decode_urls, (p.pid for p in cluster.processes[1:]), strict=False))

    async def in_flight(url: str) -> int:
        """As the router counts by itself; what nodes say of themselves is up to a second old."""
        async with session.get(f"{cluster.url}/server_info") as response:
            nodes = {node["url"]: node for node in (await response.json())["nodes"]}
        return nodes[url]["in_flight_requests"]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        told: list[int] = []
        anchor = asyncio.ensure_future(follow(session, cluster.url, told))
        await num_told(told, 10)
        (victim,) = [url for url in pids if await in_flight(url)]
        asked = {
            name: asyncio.ensure_future(post(session, cluster.url, path, body))
            for name, (path, body) in DISTURBED.items()
        }
        while await in_flight(victim) < 2:
            await num_told(told, len(told) + 1)
        await num_told(told, 60)
        assert not anchor.done()
        os.kill(pids[victim], signal.SIGKILL)
        await anchor
        return victim, told, {name: await answer for name, answer in asked.items()}


def num_replays(url: str) -> float:
    told = re.findall(
        r"^tandem_router_replays_total\{.*\} (.*)$", ask(f"{url}/metrics")[1], re.MULTILINE
    )
    return sum(map(float, told))


@pytest.mark.slow
def test_no_answer_differs_when_a_node_dies_under_it(embedded_model):
    model = ("--model", str(embedded_model), "--transfer-backend", "shm")
    quick = ("--attention-backend", "torch")  # no kernel to compile at each start
    with running_cluster(*model, *FLAGS, *quick, decodes=2) as cluster:
        undisturbed = ask_all(cluster.url, DISTURBED)
        unbroken = asyncio.run(ask_anchor(cluster.url))
        assert len(unbroken) == 300
        ask(f"{cluster.url}/flush_cache", b"")
        victim, anchor, answers = asyncio.run(ask_while_killing(cluster))
        assert anchor == unbroken
        for name, (status, answer) in answers.items():
            assert status == 200, (name, answer)
            assert_same(answer, undisturbed[name][1])
        assert num_replays(cluster.url) >= 2
        others = [url for url in (*cluster.prefill_urls, *cluster.decode_urls) if url != victim]
        assert eventually(lambda: not any(map(unaccounted, others)))
