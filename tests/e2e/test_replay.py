"""A replayed request answers as an undisturbed one does, whatever was asked for."""

import asyncio
import contextlib
import os
import re
import signal
import urllib.request

import aiohttp
import pytest

from tests.e2e.cluster import eventually, running_cluster
from tests.e2e.conftest import FLAGS
from tests.e2e.test_deaths import unaccounted
from tests.e2e.test_features import (
    CALLS,
    EXAMPLE,
    SCHEMA,
    SEEDED,
    STORY,
    ask_all,
    assert_same,
    native,
    post,
)

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


async def ask_while_killing(url: str, pid: int, victim_url: str) -> dict:
    """Send all calls; kill a node while it gives tokens of several of them."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        asked = {
            name: asyncio.ensure_future(post(session, url, path, body))
            for name, (path, body) in DISTURBED.items()
        }
        async with asyncio.timeout(60):
            # More than two need not be there at once: on a slow machine one prefill feeds two decodes slowly.
            while await num_running(session, victim_url) < 2:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        return {name: await answer for name, answer in asked.items()}


async def num_running(session, url: str) -> int:
    async with session.get(f"{url}/server_info") as response:
        return (await response.json())["load"]["num_running"]


def num_replays(url: str) -> float:
    with contextlib.closing(urllib.request.urlopen(f"{url}/metrics")) as response:
        told = response.read().decode()
    return sum(
        map(float, re.findall(r"^tandem_router_replays_total\{.*\} (.*)$", told, re.MULTILINE))
    )


@pytest.mark.slow
def test_no_answer_differs_when_a_node_dies_under_it(embedded_model):
    model = ("--model", str(embedded_model), "--transfer-backend", "shm")
    quick = ("--attention-backend", "torch")  # no kernel to compile at each start
    with running_cluster(*model, *FLAGS, *quick, decodes=2) as cluster:
        undisturbed = ask_all(cluster.url, DISTURBED)
        urllib.request.urlopen(f"{cluster.url}/flush_cache", b"").close()
        victim, url = cluster.processes[1], cluster.decode_urls[0]
        answers = asyncio.run(ask_while_killing(cluster.url, victim.pid, url))
        for name, (status, answer) in answers.items():
            assert status == 200, (name, answer)
            assert_same(answer, undisturbed[name][1])
        assert num_replays(cluster.url) >= 1
        others = [*cluster.prefill_urls, cluster.decode_urls[1]]
        assert eventually(lambda: not any(map(unaccounted, others)))
