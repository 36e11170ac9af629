"""`tandem batch` through a real cluster, killed again and again: nothing is lost, nothing written is asked twice."""

import asyncio
import json
import os
import random
import signal
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from tandem.batch import BatchRequest, run_batch
from tests.e2e.cluster import ROOT, running_cluster

NUM_REQUESTS, NUM_KILLS = 300, 4
FLAGS = ("--engine", "simulated", "--sim-kv", "none", "--log-level", "warning")


class Counting:
    """Passes everything on to the cluster, and counts.

    Attributes:
        asked: Names of requests that came to the cluster, in order.
        kill: Called when so many more answers were given back.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self.asked: list[str] = []
        self.num_until_kill, self.kill = 0, lambda: None
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self._pass_on)

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.method == "POST":
            self.asked.append(json.loads(body)["user"])
        url = f"{self._target}{request.path_qs}"
        async with self._session.request(request.method, url, data=body, headers=HEADERS) as answer:
            content = await answer.read()
        if request.method == "POST":
            self.num_until_kill -= 1
            if self.num_until_kill == 0:
                self.kill()
        return web.Response(body=content, status=answer.status, content_type=answer.content_type)

    @asynccontextmanager
    async def serving(self):
        runner = web.AppRunner(self.app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as self._session:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
            await runner.cleanup()


HEADERS = {"Content-Type": "application/json"}


def body_of(number: int) -> dict:
    # What a simulated engine says to a greedy request is a function of the prompt.
    prompt, num_tokens = f"Tell {number} of the rivers.", 4 + number % 9
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "user": f"r{number}"}


def done(path) -> set[int]:
    """Return the numbers whose results are whole lines of the output."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return {int(json.loads(line)["custom_id"][1:]) for line in lines}


async def run_killed(files, counting: Counting, url: str, num_until_kill: int) -> int:
    """Run the command until it ends or so many answers were given to it; return its status."""
    argv = [str(files["in"]), "-o", str(files["out"]), "--url", url]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tandem", "batch", *argv), cwd=ROOT
    )
    counting.num_until_kill = num_until_kill
    counting.kill = lambda: os.kill(process.pid, signal.SIGKILL)
    return await process.wait()


async def run_with_kills(files, cluster_url: str, rng: random.Random) -> list[int]:
    counting, statuses = Counting(cluster_url), []
    async with counting.serving() as url:
        written: set[int] = set()
        for kills_left in range(NUM_KILLS, -1, -1):
            counting.asked.clear()
            left = NUM_REQUESTS - len(written)
            share = left // (kills_left + 1)
            at = rng.randint(1, share) if kills_left else 0
            statuses.append(await run_killed(files, counting, url, at))
            again = {f"r{number}" for number in written} & set(counting.asked)
            assert not again, "what was written is not asked again"
            if kills_left:
                before, written = written, done(files["out"])
                assert before <= written, "what was written stays"
    return statuses


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_without_losing_or_repeating(embedded_model, tmp_path):
    files = {"in": tmp_path / "in", "out": tmp_path / "out"}
    with files["in"].open("w") as out:
        for number in range(NUM_REQUESTS):
            head = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions"}
            out.write(json.dumps(head | {"body": body_of(number)}) + "\n")
    asked = [BatchRequest(f"r{n}", body_of(n), "/v1/completions") for n in range(NUM_REQUESTS)]
    with running_cluster(*FLAGS) as cluster:
        expected = [result.text for result in run_batch(asked, cluster.url)]
        statuses = asyncio.run(run_with_kills(files, cluster.url, random.Random(8)))
    assert statuses == [-signal.SIGKILL] * NUM_KILLS + [0]
    results = [json.loads(line) for line in files["out"].read_text().splitlines()]
    assert len(results) == NUM_REQUESTS, "no line is there twice"
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in results}
    assert texts == {f"r{n}": expected[n] for n in range(NUM_REQUESTS)}
    assert len(set(expected)) > NUM_REQUESTS * 0.9, "answers tell requests apart"
