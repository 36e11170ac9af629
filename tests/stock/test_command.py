"""`tandem lb` and `tandem adopt` with fake engines, and what they report of engines that cannot be used."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tandem.cli.up import free_ports
from tandem.stock.command import main
from tandem.wire.errors import ConfigInvalid
from tests.patience import until_async
from tests.processes import Process
from tests.stock.fake_vllm import FakeVllm, connect, continued
from tests.stock.fleet import adapter, model_files, target

PROMPT = [5, 6, 7]


@asynccontextmanager
async def running(*argv, log, is_fresh=False):
    process = Process(*argv, log=log, is_fresh=is_fresh)
    try:
        yield process
    finally:
        await asyncio.to_thread(process.kill)


async def generate(session, url) -> list[int]:
    sampling = {"max_new_tokens": 8, "temperature": 0}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    async with session.post(f"{url}/generate", json=body) as answer:
        return (await answer.json())["output_ids"] if answer.status == 200 else []


async def is_healthy(session, url) -> bool:
    try:
        async with session.get(f"{url}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


@asynccontextmanager
async def engines(tmp_path):
    model = str(model_files(tmp_path / "model"))
    prefill, decode = FakeVllm(model), FakeVllm(model)
    connect([prefill], [decode])
    async with prefill.running(), decode.running(), aiohttp.ClientSession() as session:
        yield prefill, decode, session


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_one_command_serves_two_engines_and_outlives_its_adapter(tmp_path):
    (port,), log = free_ports(1), tmp_path / "lb.log"
    url = f"http://127.0.0.1:{port}"
    async with engines(tmp_path) as (prefill, decode, session):
        nodes = ("--prefill", f"vllm+{prefill.url}", "--decode", f"vllm+{decode.url}")
        async with running("lb", *nodes, "--port", str(port), log=log, is_fresh=True) as process:
            await until_async(lambda: is_healthy(session, url))
            assert await generate(session, url) == continued(PROMPT, 8)
            (adapter_pid,) = [
                pid for pid in process.tree() if b"tandem.stock.adapter" in command_line(pid)
            ]
            os.kill(adapter_pid, signal.SIGKILL)
            await until_async(lambda: "adapter.crashed" in log.read_text())
            await until_async(lambda: is_healthy(session, url))
            assert await generate(session, url) == continued(PROMPT, 8)


async def test_adapters_next_to_the_engines_serve_a_router(tmp_path):
    ports = [str(port) for port in free_ports(3)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with engines(tmp_path) as (prefill, decode, session):
        adopted = [
            ("adopt", f"vllm+{engine.url}", "--role", role, "--port", port)
            for engine, role, port in zip(
                (prefill, decode), ("prefill", "decode"), ports[:2], strict=True
            )
        ]
        nodes = ("--prefill", urls[0], "--decode", urls[1], "--port", ports[2])
        log = tmp_path / "log"
        async with (
            running(*adopted[0], log=log),
            running(*adopted[1], log=log),
            running("lb", *nodes, log=log),
        ):
            await until_async(lambda: is_healthy(session, urls[2]))
            assert await generate(session, urls[2]) == continued(PROMPT, 8)


async def reason(engine, tokenizer_dir="") -> str:
    """Return why the adapter's node of an engine cannot be used."""
    found = ""
    node = target(engine, "decode")
    async with adapter([node], tokenizer_dir) as base, aiohttp.ClientSession() as session:

        async def is_known() -> bool:
            nonlocal found
            async with session.get(f"{base}/{node.path}/server_info") as answer:
                body = await answer.json()
                assert answer.status == 503, body
                found = body["error"]["message"]
            return "not been reached yet" not in found

        await until_async(is_known)
    return found


async def test_engine_without_the_connector_is_told_which_flag_to_set(tmp_path):
    engine = FakeVllm(str(model_files(tmp_path / "model")))
    engine.has_connector = False
    async with engine.running():
        assert "--kv-transfer-config" in await reason(engine)


async def test_unknown_model_asks_for_the_tokenizer():
    engine = FakeVllm("/models/that/are/elsewhere")
    async with engine.running():
        assert "pass --tokenizer DIR" in await reason(engine)


async def test_directory_without_config_is_named(tmp_path):
    engine = FakeVllm("/models/that/are/elsewhere")
    async with engine.running():
        assert f"{tmp_path} has no config.json" in await reason(engine, str(tmp_path))


async def test_engine_that_has_not_started_is_waited_for():
    assert "wait until the engine has started" in await reason(FakeVllm(""))


@pytest.mark.parametrize("url", ["sglang+http://127.0.0.1:7000", "sglang+http://localhost:7000"])
def test_prefill_that_only_its_own_host_reaches_is_refused(url):
    with pytest.raises(ConfigInvalid, match="use the address by which other hosts reach it"):
        main([url, "--role", "prefill", "--host", "0.0.0.0"])
