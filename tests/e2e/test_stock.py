"""Our router over SGLang's contract, which our own nodes accept: the same answers as over the node protocol."""

import asyncio
from contextlib import contextmanager

import aiohttp
import pytest

from tests.e2e.clients import are_up, load_of, nodes_of, stream, stream_all, unaccounted
from tests.e2e.cluster import ask, running, running_cluster
from tests.e2e.conftest import FLAGS
from tests.e2e.test_other_routers import answers, assert_same
from tests.e2e.test_replay import num_replays
from tests.patience import eventually

PROMPTS = [[5 + i, 6, 7, 8] * 20 for i in range(8)]


@contextmanager
def stock_router(cluster, model):
    """Start a router that drives a cluster's nodes as SGLang's servers; yield its URL."""
    prefills = [f"sglang+{url}" for url in cluster.prefill_urls]
    decodes = [f"sglang+{url}" for url in cluster.decode_urls]
    nodes = ("--prefill", *prefills, "--decode", *decodes)
    with running("lb", *nodes, "--tokenizer", str(model)) as (url, _):
        assert eventually(lambda: are_up(url))
        yield url


@pytest.fixture(scope="module")
def url(cluster, embedded_model):
    with stock_router(cluster, embedded_model) as url:
        yield url


def test_answers_over_sglangs_contract_are_those_of_the_node_protocol(cluster, url):
    model = ask(f"{cluster.url}/v1/models")[1]["data"][0]["id"]
    found = asyncio.run(answers(url, model))
    assert_same(found, asyncio.run(answers(cluster.url, model)))


def test_closed_streams_leave_nothing_on_either_node(cluster, url):
    [decode] = cluster.decode_urls
    before = load_of(decode)["num_aborted"]
    asyncio.run(open_and_close(url))
    assert eventually(lambda: load_of(decode)["num_aborted"] == before + len(PROMPTS))
    assert eventually(lambda: not any(map(is_busy, (*cluster.prefill_urls, decode))))


async def open_and_close(url) -> None:
    """Close all streams once they flow."""
    async with aiohttp.ClientSession() as session:
        started = [asyncio.Event() for _ in PROMPTS]
        pairs = zip(PROMPTS, started, strict=True)
        streams = [asyncio.create_task(stream(session, url, *pair)) for pair in pairs]
        for event in started:
            await event.wait()
        for each in streams:
            each.cancel()
        await asyncio.wait(streams)


def is_busy(url) -> bool:
    load = load_of(url)
    counts = (load["num_running"], load["num_waiting"], load["num_transferring"])
    return any(counts) or unaccounted(load) != 0


@pytest.mark.thorough
def test_streams_outlive_a_killed_decode_with_the_same_tokens(embedded_model):
    nodes = ("--model", str(embedded_model), "--transfer-backend", "shm", *FLAGS)
    with (
        running_cluster(*nodes, "--attention-backend", "torch", decodes=2) as cluster,
        stock_router(cluster, embedded_model) as url,
    ):
        undisturbed = asyncio.run(stream_all(url, prompts=PROMPTS))
        by_url = dict(zip(cluster.decode_urls, cluster.processes[1:], strict=False))

        def kill_the_busier() -> None:
            decodes = [each for each in nodes_of(url) if each["role"] == "decode"]
            busier = max(decodes, key=lambda each: each["in_flight_requests"])
            by_url.pop(f"http://{busier['url'].rpartition('/')[2]}").kill()

        assert asyncio.run(stream_all(url, kill_the_busier, prompts=PROMPTS)) == undisturbed
        assert num_replays(url) > 0
        rest = (*cluster.prefill_urls, *by_url)
        assert eventually(lambda: not any(map(is_busy, rest)))
