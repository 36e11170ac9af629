"""Fleets of unmodified `vllm serve` processes with a KV connector, a router in front, and clients that stream."""

import asyncio
import contextlib
import json
import signal
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from tandem.cli.up import free_ports
from tests.patience import eventually
from tests.processes import Process
from tests.with_vllm.nodes import INTERVAL_MS, START_S, get, start

FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "64")
# See `nodes.INTERVAL_MS`.
SLOW = ("--heartbeat-interval-ms", str(INTERVAL_MS))
POOL = ("--num-gpu-blocks-override", "512")
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
ROLES = {"p": "kv_producer", "d": "kv_consumer"}


class Engine:
    """A `vllm serve` at one address, across restarts.

    Args:
        name: Begins with `alone` if it has no connector, else with p for prefill or d for decode.
        is_mooncake: Whether the connector is TandemConnector, which takes MooncakeConnector's transfers.
    """

    def __init__(self, name: str, model: Path, directory: Path, *, is_mooncake: bool) -> None:
        self.name, self._model, self._log = name, model, directory / f"{name}.log"
        self._is_mooncake = is_mooncake
        self.port, self._side, self.bootstrap_port = free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: Process

    def start(self) -> None:
        connector = (
            ()
            if self.name.startswith("alone")
            else ("--kv-transfer-config", json.dumps(self._transfer()))
        )
        self.process = start(
            self._log,
            *("vllm.entrypoints.cli.main", "serve", str(self._model), "--served-model-name", "m"),
            *("--host", "127.0.0.1", "--port", str(self.port), *FLAGS, *POOL, *connector),
            env={
                "UCX_TLS": "tcp",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side),
                "VLLM_NO_USAGE_STATS": "1",
            },
        )

    def _transfer(self) -> dict:
        if not self._is_mooncake:
            return TRANSFER
        return {
            "kv_connector": "TandemConnector",
            "kv_role": ROLES[self.name[0]],
            "kv_connector_extra_config": {
                "bootstrap_port": self._side,
                "query_port": self.bootstrap_port,
            },
        }

    def is_up(self) -> bool:
        assert self.process.is_running(), self._log.read_text()[-3000:]
        return get(f"{self.url}/health")[0] == 200

    def signal(self, number: int) -> None:
        self.process.signal_tree(number)

    def kill(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.kill()

    def num_running(self) -> int:
        """Return the requests that the engine runs or queues, by its metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            int(float(line.rpartition(" ")[2]))
            for line in lines
            if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
        )


class Fleet:
    """Engines by name, and a router in front of those whose names begin with p (prefill) and d (decode)."""

    def __init__(
        self, model: Path, directory: Path, names: Sequence[str], *, is_mooncake: bool = False
    ) -> None:
        self._directory, self._is_mooncake = directory, is_mooncake
        self.engines = {
            name: Engine(name, model, directory, is_mooncake=is_mooncake) for name in names
        }
        self.url = f"http://127.0.0.1:{free_ports(1)[0]}"
        self.router: Process | None = None

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]

    def __enter__(self):
        for engine in self.engines.values():
            engine.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        for process in (*self.engines.values(), self.router):
            if process is not None:
                process.kill()

    def urls(self, role: str) -> list[str]:
        """Return the URLs of a role's engines."""
        return [engine.url for name, engine in self.engines.items() if name[0] == role[0]]

    def wait_up(self) -> None:
        """Wait until all engines serve."""
        for engine in self.engines.values():
            assert eventually(engine.is_up, within_s=START_S)

    def route(self, *flags: str) -> None:
        """Start `tandem lb`, and wait until it uses all engines."""
        nodes = [
            word
            for role in ("prefill", "decode")
            for url in self.urls(role)
            for word in (f"--{role}", f"vllm+{url}")
        ]
        if self._is_mooncake:
            ports = [str(e.bootstrap_port) for name, e in self.engines.items() if name[0] == "p"]
            nodes += ["--prefill-bootstrap-ports", *ports, "--kv-connector", "mooncake"]
        port = self.url.rpartition(":")[2]
        words = ("tandem", "lb", *nodes, "--port", port, *SLOW, *flags)
        self.router = start(self._directory / "lb.log", *words)
        self.wait_routed()

    def wait_routed(self) -> None:
        """Wait until the router uses all engines."""
        assert eventually(self._is_routed, within_s=START_S), get(f"{self.url}/nodes")

    def _is_routed(self) -> bool:
        status, body = get(f"{self.url}/nodes")
        return status == 200 and {node["state"] for node in body["nodes"]} == {"up"}

    def restore(self) -> None:
        """Start the engines that have ended under their addresses, continue the stopped ones, and wait for all."""
        for engine in self.engines.values():
            engine.signal(signal.SIGCONT)
            if not engine.process.is_running():
                engine.start()
        self.wait_routed()

    def num_running(self) -> int:
        """Return the requests in all engines."""
        return sum(engine.num_running() for engine in self.engines.values())


async def stream(
    session: aiohttp.ClientSession, url: str, prompt, num: int, seen: list, **more
) -> str:
    """Append the token ids of a greedy stream to `seen`; return why it ended early, else an empty string."""
    body = {"model": "m", "prompt": prompt, "max_tokens": num, "stream": True}
    body |= {"return_token_ids": True, "temperature": 0, "ignore_eos": True} | more
    finish = ""
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                if answer.status != 200 or "error" in event:
                    return f"{answer.status} {line.decode()[:200]}"
                for choice in event.get("choices", ()):
                    seen += choice.get("token_ids") or []
                    finish = choice.get("finish_reason") or finish
    except (aiohttp.ClientError, OSError) as error:
        return repr(error)[:200]
    return "" if finish else "ended without a finish_reason"


@contextlib.asynccontextmanager
async def client():
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=1 << 20
    ) as session:
        yield session


async def streams(
    session, url: str, prompts, num: int, **more
) -> tuple[list[str], list[list[int]]]:
    """Run greedy streams at once; return why each ended early, and the tokens of each."""
    seen: list[list[int]] = [[] for _ in prompts]
    running = [
        stream(session, url, prompt, num, each, **more)
        for prompt, each in zip(prompts, seen, strict=True)
    ]
    return list(await asyncio.gather(*running)), seen


async def answers(session, url: str, prompts, num: int) -> list[list[int]]:
    """Return the tokens of one greedy stream after the other; each must end well."""
    found = []
    for prompt in prompts:
        seen: list[int] = []
        assert await stream(session, url, prompt, num, seen) == ""
        found.append(seen)
    return found
