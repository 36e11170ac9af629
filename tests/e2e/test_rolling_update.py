"""A rolling update under load: each part's new version joins, its old one is told to end, and no client notices."""

import asyncio
import contextlib
import itertools
import json
import random
import signal

import aiohttp
import pytest

from tandem.cli.up import free_ports
from tests.e2e.clients import QUIET, SIMULATED, expected, unaccounted
from tests.e2e.cluster import wait_healthy
from tests.e2e.test_membership import states
from tests.patience import eventually
from tests.processes import Process

NUM_CLIENTS = 4
ROUTER_FLAGS = (
    *("--discover-announced", "--local-prefill-threshold", "0"),
    # What a balancer is given to notice: it looks twenty times a second, on a machine that may stand still for seconds.
    *("--shutdown-delay-s", "15"),
    # Nodes that stood still with it are away for as long.
    *("--node-wait-s", "60"),
)
NEW_VERSION = ("--page-size", "16")


@pytest.fixture
def node_flags(embedded_model, profile) -> tuple[str, ...]:
    """Of nodes whose prompts and answers take long enough to be met by every signal."""
    model = ("--model", str(embedded_model))
    return (*model, *SIMULATED, *QUIET, "--sim-kv", "none", *profile(0.05, 8))


class Balancer:
    """Knows which routers take new requests, as their /health says; what runs it leaves alone."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self._ready: list[str] = []
        self._turns = itertools.count()

    async def run(self) -> None:
        # No connection is kept: a real one probes with new connections, too.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            while True:
                healthy = [await self._is_healthy(session, url) for url in self.urls]
                self._ready = list(itertools.compress(self.urls, healthy))
                await asyncio.sleep(0.05)

    async def _is_healthy(self, session, url: str) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{url}/health") as response:
                return response.status == 200
        return False

    def is_ready(self, url: str) -> bool:
        return url in self._ready

    def choose(self) -> str:
        """Return the next of those that are ready; of all when none is, as balancers do."""
        ready = self._ready or self.urls
        return ready[next(self._turns) % len(ready)]


class Load:
    """Clients that ask one thing after another, streamed and not, and check every token.

    Their connections are kept alive: a router that ends has to send them away.

    Args:
        choose: Returns the URL for the next request.
    """

    def __init__(self, choose, model) -> None:
        self._choose, self._model = choose, model
        self.num_answered = 0
        self._is_over = False

    async def client(self, seed: int) -> None:
        rng = random.Random(seed)
        async with aiohttp.ClientSession() as session:
            while not self._is_over:
                prompt = [rng.randrange(5, 5000) for _ in range(rng.randrange(1, 400))]
                num_new = rng.choice([1, 10, 40, 200])
                token_ids = await ask(session, self._choose(), prompt, num_new, rng)
                assert token_ids == expected(self._model, prompt, num_new)
                self.num_answered += 1

    async def more(self, count: int) -> None:
        """Wait until so many more answers have come."""
        wanted = self.num_answered + count
        while self.num_answered < wanted:  # noqa: ASYNC110 - the clients' progress has no event
            await asyncio.sleep(0.02)

    def end(self) -> None:
        self._is_over = True


async def ask(session, url: str, prompt: list[int], num_new: int, rng) -> list[int]:
    """Return the tokens of an answer."""
    params = {"max_new_tokens": num_new, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "stream": rng.random() < 0.7}
    async with session.post(f"{url}/generate", json=body) as response:
        text = await response.text()
    assert response.status == 200, text
    last = text.split("\n\n")[-3].removeprefix("data: ") if body["stream"] else text
    answer = json.loads(last)
    assert answer["meta_info"]["finish_reason"]["type"] == "length", answer
    return answer["output_ids"]


class Deployment:
    """The processes of one cluster, whose nodes announce themselves to every router there will be."""

    def __init__(self, node_flags: tuple[str, ...]) -> None:
        ports = free_ports(2)
        self.router_urls = [f"http://127.0.0.1:{port}" for port in ports]
        self._announce = [flag for url in self.router_urls for flag in ("--router", url)]
        self._node_flags = node_flags
        self.processes: list[Process] = []

    def node(self, role: str, *flags: str) -> tuple[Process, str]:
        """Start a node and return it with its URL."""
        port, bootstrap_port = free_ports(2)
        argv = [role, "--port", str(port), "--bootstrap-port", str(bootstrap_port)]
        process = Process(*argv, *self._node_flags, *self._announce, *flags)
        self.processes.append(process)
        return process, f"http://127.0.0.1:{port}"

    def router(self, url: str) -> Process:
        process = Process("lb", "--port", url.rpartition(":")[2], *ROUTER_FLAGS, *QUIET)
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in self.processes:
            process.interrupt()
        for process in self.processes:
            process.stop()


@contextlib.asynccontextmanager
async def under_load(choose, model):
    """Yield the load that goes on inside the block; its first wrong answer ends the block."""
    load = Load(choose, model)
    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(load.client(seed)) for seed in range(NUM_CLIENTS)]
        yield load
        load.end()
        await asyncio.wait(clients)


@pytest.mark.slow
async def test_no_request_is_lost_while_prefill_decode_and_router_are_updated(
    node_flags, embedded_model
):
    deployment, balancer = Deployment(node_flags), Balancer()
    probing = asyncio.create_task(balancer.run())
    try:
        old_url, new_url = deployment.router_urls
        old_router = deployment.router(old_url)
        old = {role: deployment.node(role) for role in ("prefill", "decode")}
        await asyncio.to_thread(wait_healthy, old_url, *deployment.processes)
        balancer.urls.append(old_url)
        await becomes(lambda: balancer.is_ready(old_url))
        async with under_load(balancer.choose, embedded_model) as load:
            await load.more(NUM_CLIENTS)
            new = {role: deployment.node(role, *NEW_VERSION) for role in old}
            new_router = deployment.router(new_url)
            for role, (process, url) in old.items():
                await replaced(old_url, load, process, url, *new[role])

            await asyncio.to_thread(wait_healthy, new_url, new_router)
            balancer.urls.append(new_url)
            await becomes(lambda: balancer.is_ready(new_url))
            old_router.signal(signal.SIGTERM)
            await load.more(NUM_CLIENTS)
            assert await asyncio.to_thread(old_router.wait) == 0, old_router.output()
            await load.more(NUM_CLIENTS)
        new_urls = {url for _, url in new.values()}
        # A router that started as a node ended may have heard it arrive, and not leave: it forgets it.
        await becomes(lambda: set(states(new_url)) == new_urls)
        assert load.num_answered >= 7 * NUM_CLIENTS
        assert eventually(lambda: not any(map(unaccounted, new_urls)))
    finally:
        probing.cancel()
        await asyncio.to_thread(deployment.stop)


async def replaced(
    router: str, load: Load, old: Process, old_url: str, new: Process, new_url: str
) -> None:
    """Wait until a node's new version has joined, and have the old one end."""
    await asyncio.to_thread(wait_healthy, new_url, new)
    await becomes(lambda: states(router).get(new_url) == "up")
    old.signal(signal.SIGTERM)
    await load.more(NUM_CLIENTS)
    assert await asyncio.to_thread(old.wait) == 0, old.output()
    await becomes(lambda: old_url not in states(router))
    await load.more(NUM_CLIENTS)


async def becomes(is_so) -> None:
    assert await asyncio.to_thread(eventually, is_so)
