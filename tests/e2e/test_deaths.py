"""An edge worker that dies takes its own streams with it, and no others.

What other deaths cost is in `tests/faults/test_matrix.py`, `test_replay.py` and `test_tensor_parallel.py`.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import psutil
import pytest

from tests.e2e.clients import PROMPTS, stream, stream_all, unaccounted
from tests.e2e.cluster import MAX_ROUNDS, ask, load_now, running_cluster
from tests.patience import eventually, patiently
from tests.processes import children

FLAGS = (
    *("--page-size", "8", "--chunked-prefill-size", "32", "--max-total-tokens", "4096"),
    *("--attention-backend", "torch"),  # no kernel to compile at each start
)


@pytest.mark.slow
def test_a_killed_edge_worker_takes_its_own_streams_with_it_and_its_requests_off_the_nodes(
    tiny_model, capsys
):
    flags = ("--model", str(tiny_model("llama")), "--num-threads", "1", *FLAGS)
    router_flags = ("--workers", "2")
    with running_cluster(*flags, router_flags=router_flags) as cluster:
        assert eventually(lambda: is_whole(cluster))
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
            assert eventually(lambda: is_whole(cluster))
        assert took_s is not None
        with capsys.disabled():
            sys.stdout.write(f"\ncancelled on decode {took_s:.3f} s after the kill\n")
        urls = (*cluster.prefill_urls, *cluster.decode_urls)
        assert eventually(lambda: not any(map(unaccounted, urls)))


def is_whole(cluster) -> bool:
    """Tell whether both edge workers serve, and the parent knows of the one that died."""
    workers = edge_workers(cluster.url)
    are_serving = len(workers) == 2 and all(worker["is_serving"] for worker in workers)
    return are_serving and len(children(cluster.router.pid)) == 2


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
