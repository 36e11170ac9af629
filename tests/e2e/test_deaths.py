"""A node that dies under its requests costs and repeats no token."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import aiohttp
import psutil
import pytest

from tests.e2e.clients import PROMPTS, children, is_alive, stream, stream_all, unaccounted
from tests.e2e.cluster import (
    MAX_ROUNDS,
    START_TIMEOUT_S,
    Process,
    ask,
    eventually,
    load_now,
    running_cluster,
)
from tests.patience import patiently

FLAGS = (
    *("--page-size", "8", "--chunked-prefill-size", "32", "--max-total-tokens", "4096"),
    *("--attention-backend", "torch"),  # no kernel to compile at each start
)


@pytest.mark.slow
def test_streams_go_on_when_a_decode_node_or_its_engine_is_killed(tiny_model):
    flags = ("--model", str(tiny_model("llama")), "--num-threads", "1", *FLAGS)
    with running_cluster(*flags, "--log-level", "warning", decodes=3) as cluster:
        undisturbed = asyncio.run(stream_all(cluster.url))
        _, first, second, *_ = cluster.processes
        others = [*cluster.prefill_urls, *cluster.decode_urls[1:]]
        (engine,) = children(first.pid)
        kill_node = partial(os.kill, first.pid, signal.SIGKILL)
        assert asyncio.run(stream_all(cluster.url, kill_node)) == undisturbed
        assert eventually(lambda: not first.is_running() and not is_alive(engine))
        assert eventually(lambda: not any(map(unaccounted, others)))

        others = [*cluster.prefill_urls, *cluster.decode_urls[2:]]
        (engine,) = children(second.pid)
        kill_engine = partial(os.kill, engine, signal.SIGKILL)
        assert asyncio.run(stream_all(cluster.url, kill_engine)) == undisturbed
        assert eventually(lambda: not second.is_running() and not is_alive(engine))
        assert eventually(lambda: not any(map(unaccounted, others)))


@pytest.mark.slow
def test_no_client_notices_that_a_prefill_node_was_killed_under_its_prompts(tiny_model):
    flags = ("--model", str(tiny_model("llama")), "--num-threads", "1", *FLAGS)
    with running_cluster(*flags, "--log-level", "warning", prefills=2) as cluster:
        victim, decode = cluster.processes[0], cluster.decode_urls[0]
        (engine,) = children(victim.pid)
        undisturbed = asyncio.run(burst(cluster.url))
        for url in (*cluster.prefill_urls, decode):  # so that prompts are computed again
            ask(f"{url}/flush_cache", b"")
        disturbed = asyncio.run(burst(cluster.url, lambda: os.kill(engine, signal.SIGKILL)))
        assert disturbed == undisturbed
        assert eventually(lambda: not victim.is_running())
        others = (cluster.prefill_urls[1], decode)
        assert eventually(lambda: not any(unaccounted(url) for url in others))


@pytest.mark.slow
def test_a_killed_edge_worker_takes_its_own_streams_with_it_and_its_requests_off_the_nodes(
    tiny_model, capsys
):
    flags = ("--model", str(tiny_model("llama")), "--num-threads", "1", *FLAGS)
    router_flags = ("--detokenizers", "2")
    with running_cluster(*flags, router_flags=router_flags) as cluster:
        assert eventually(lambda: all(worker["is_serving"] for worker in edge_workers(cluster.url)))
        undisturbed = asyncio.run(stream_all(cluster.url))
        # Again where decode was done with some of them before the kill.
        for _ in range(MAX_ROUNDS):
            ends, took_s = asyncio.run(kill_an_edge_worker(cluster))
            lost = [end for end in ends if isinstance(end, aiohttp.ClientPayloadError)]
            for end, expected in zip(ends, undisturbed, strict=True):
                assert end in lost or end == expected
            assert len(lost) <= 3
            if took_s is not None:
                break
            assert eventually(lambda: all(w["is_serving"] for w in edge_workers(cluster.url)))
        assert took_s is not None
        with capsys.disabled():
            sys.stdout.write(f"\ncancelled on decode {took_s:.3f} s after the kill\n")
        urls = (*cluster.prefill_urls, *cluster.decode_urls)
        assert eventually(lambda: not any(map(unaccounted, urls)))


def edge_workers(url: str) -> list[dict]:
    return ask(f"{url}/server_info")[1]["workers"]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process inside the block; it has stopped when the block begins."""
    os.kill(pid, signal.SIGSTOP)
    try:
        assert eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def kill_an_edge_worker(cluster) -> tuple[list, float | None]:
    """Return how each stream ended, and how long decode went on with those of the victim.

    The latter is None when it was not cancelling that ended each of them.
    """
    decode, took_s = cluster.decode_urls[0], None
    started = [asyncio.Event() for _ in PROMPTS]
    async with aiohttp.ClientSession() as session:

        def num_lost() -> int:
            return sum(task.done() and task.exception() is not None for task in streams)

        before = load_now(decode)["num_aborted"]
        streams = []
        victim, other = children(cluster.router.pid)
        # A burst of connections may go to one worker: each has half of them.
        for away, prompts in ((other, PROMPTS[:3]), (victim, PROMPTS[3:])):
            with stopped(away):
                for prompt in prompts:
                    event = started[len(streams)]
                    work = stream(session, cluster.url, prompt, event)
                    streams.append(asyncio.create_task(work))
                for event in started[: len(streams)]:
                    await event.wait()
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        for _ in patiently():
            is_over = all(stream.done() for stream in streams)
            load = await asyncio.to_thread(load_now, decode)
            if took_s is None and 0 < num_lost() <= load["num_aborted"] - before:
                took_s = time.monotonic() - killed
            if is_over and (took_s is not None or not load["num_running"]):
                break
        return await asyncio.gather(*streams, return_exceptions=True), took_s


async def burst(url: str, after_the_first=None) -> list[list[int]]:
    """Send many long prompts at once; return their tokens in order."""

    async def one(session, index: int) -> list[int]:
        prompt = [5 + index % 200, 6, 7, 8, 9] * 80
        params = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params}
        async with session.post(f"{url}/generate", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer["output_ids"]

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(one(session, index)) for index in range(40)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        if after_the_first is not None:
            after_the_first()
    return [task.result() for task in asked]


@pytest.mark.slow
def test_nothing_outlives_a_killed_launcher(tiny_model):
    model = ("--model", str(tiny_model("llama")), "--num-threads", "1", *FLAGS)
    serve = Process("serve", "--port", "0", *model, is_fresh=True)
    assert eventually(lambda: children(serve.pid) != [], START_TIMEOUT_S)
    (engine,) = children(serve.pid)
    serve.signal(signal.SIGKILL)
    serve.wait()
    serve.log.close()
    assert eventually(lambda: not is_alive(engine))
