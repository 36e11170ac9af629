import asyncio
import json
import os
import signal
import socket
import ssl
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.certificates import make_certificates
from tests.router.fake_node import FakeNode, until
from wire.messages import Cancel, StartDecode, StartPrefill

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = ("--prefill", "http://127.0.0.1:1", "8998", "--decode", "http://127.0.0.1:2")


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", *flags), cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )


async def next_event(process, event: str) -> dict:
    async with asyncio.timeout(20):
        async for line in process.stderr:
            logged = json.loads(line)
            if logged["event"] == event:
                return logged
    raise AssertionError(f"the router ended without {event}")


@asynccontextmanager
async def router(*flags: str):
    """Yield a router's process and URL; it is gone afterwards."""
    process = await start("--port", "0", *flags)
    try:
        url = (await next_event(process, "router.listening"))["url"]
        await next_event(process, "edge_worker.ready")
        yield process, url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


def workers_of(process) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def is_gone(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


async def exit_status(process) -> int:
    async with asyncio.timeout(10):
        return await process.wait()


async def get_health(url: str) -> tuple[int, dict]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
        return response.status, await response.json()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_router_and_workers_with_status_0(number):
    async with router(*NOWHERE, "--detokenizers", "2") as (process, _):
        workers = workers_of(process)
        assert len(workers) == 2
        process.send_signal(number)
        assert await exit_status(process) == 0
        assert all(is_gone(pid) for pid in workers)


async def test_a_router_without_nodes_serves_503_and_says_what_is_missing():
    async with router(*NOWHERE) as (_, url):
        status, body = await get_health(url)
        assert status == 503
        assert "http://127.0.0.1:2" in body["detail"]


async def test_a_worker_that_crashes_is_replaced():
    async with router(*NOWHERE) as (process, url):
        (worker,) = workers_of(process)
        os.kill(worker, signal.SIGKILL)
        crashed = await next_event(process, "edge_worker.crashed")
        assert crashed["status"] == -signal.SIGKILL
        await next_event(process, "edge_worker.ready")
        assert workers_of(process) != [worker]
        assert (await get_health(url))[0] == 503


async def test_workers_do_not_outlive_a_parent_that_was_killed():
    async with router(*NOWHERE) as (process, _):
        (worker,) = workers_of(process)
        process.kill()
        await until(lambda: is_gone(worker))


async def test_a_port_in_use_is_refused_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = await start(*NOWHERE, "--port", str(taken.getsockname()[1]))
        _, said = await process.communicate()
    assert process.returncode == 2
    assert b"in use: choose another --port" in said


async def test_a_tokenizer_that_is_none_ends_the_router_instead_of_restarting_it(tmp_path):
    process = await start(*NOWHERE, "--port", "0", "--tokenizer", str(tmp_path))
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"no tokenizer.json" in said


async def test_every_worker_speaks_tls_and_asks_for_a_key_of_the_file(tmp_path):
    files = make_certificates(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsk-one\n")
    trusting = ssl.create_default_context(cafile=files.ca)
    tls = ("--ssl-certfile", files.cert, "--ssl-keyfile", files.key)
    async with (
        router(*NOWHERE, *tls, "--api-key-file", str(keys)) as (_, url),
        aiohttp.ClientSession(url) as client,
    ):
        assert url.startswith("https://")
        for headers, status in (({}, 401), ({"Authorization": "bearer sk-one"}, 503)):
            async with client.get("/v1/models", headers=headers, ssl=trusting) as response:
                assert response.status == status


async def test_files_of_tls_that_cannot_work_end_the_router_with_one_sentence(tmp_path):
    files = make_certificates(tmp_path)
    process = await start(*NOWHERE, "--ssl-certfile", files.cert, "--ssl-keyfile", files.other_key)
    _, said = await process.communicate()
    assert process.returncode == 2
    assert said.decode() == (
        f"tandem lb: error: --ssl-keyfile {files.other_key}: is not the key of {files.cert}\n"
    )


@asynccontextmanager
async def posted(prefill, decode, url):
    """Post a streamed request, yield the response and what its nodes were told."""
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3}, "stream": True}
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        posting = tasks.create_task(session.post(f"{url}/generate", json=body))
        starts = [await prefill.engine.next(StartPrefill), await decode.engine.next(StartDecode)]
        prefill.engine.say(starts[0], 0, [10], "handed_off")
        async with await posting as response:
            yield response, *starts


async def test_a_client_is_streamed_to_over_ipv6_and_its_leaving_cancels():
    async with FakeNode("prefill").serving() as prefill, FakeNode("decode").serving() as decode:
        flags = ("--prefill", prefill.url, "--decode", decode.url, "--host", "::1")
        async with router(*flags) as (process, url):
            await next_event(process, "cluster.serving")
            assert url.startswith("http://[::1]:")
            async with posted(prefill, decode, url) as (response, _, start_decode):
                decode.engine.say(start_decode, 0, [10, 11, 12], "length")
                events = (await response.text()).split("\n\n")
                assert json.loads(events[-3].removeprefix("data: "))["output_ids"] == [10, 11, 12]
            async with posted(prefill, decode, url) as (response, _, _):
                await response.content.readline()
            await decode.engine.next(Cancel)
