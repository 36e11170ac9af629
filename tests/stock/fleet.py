"""A router's backend with stock nodes: fake engines, and the adapter in this process."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack, asynccontextmanager

from tandem.router.stock_options import StockOptions
from tandem.router.workers.adapter import AdapterStart, EngineTarget
from tandem.stock.adapter import serve
from tests.patience import until_async
from tests.router.test_backend import watched
from tests.stock.fake_sglang import FakeSglang, connect_sglang
from tests.stock.fake_vllm import FakeEngine, FakeVllm, connect


class NodeUrl:
    """The URL of a node that the adapter serves."""

    def __init__(self, url: str) -> None:
        self.url = url


class Fleet:
    """Fake engines, and the router's backend over them."""

    def __init__(self, prefills, decodes) -> None:
        self.prefills, self.decodes, self.backend = prefills, decodes, None

    def node(self, engine: FakeEngine):
        """Return the router's node of an engine."""
        return next(
            node for node in self.backend._cluster.roster if node.url.endswith(f":{engine.port}")
        )

    async def until_up(self, *engines) -> None:
        """Wait until the nodes of these engines serve; without any, until all do."""
        engines = engines or (*self.prefills, *self.decodes)
        await until_async(lambda: all(self.node(each).is_up for each in engines))


def model_files(directory, **more):
    """Write the files of a model without a tokenizer; return their directory."""
    directory.mkdir(exist_ok=True)
    config = {"vocab_size": 100, "eos_token_id": 2} | more
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@asynccontextmanager
async def adapter(targets, tokenizer_dir="", **options) -> str:
    """Run an adapter; yield the start of its nodes' URLs."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        start = AdapterStart(
            targets=targets,
            socket_fd=-1,
            heartbeat_interval_ms=500.0,
            tokenizer_dir=tokenizer_dir,
            options=StockOptions(**options),
            log_level="info",
            log_format="auto",
        )
        stopping = asyncio.Event()
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(start, sock, None, stopping))
            try:
                yield url
            finally:
                stopping.set()


def target(engine: FakeEngine, role: str) -> EngineTarget:
    return EngineTarget(
        engine=engine.engine, http_url=engine.url, role=role, bootstrap_port=engine.port
    )


def vllm_engines(model, num_prefills, num_decodes):
    prefills = [FakeVllm(model) for _ in range(num_prefills)]
    decodes = [FakeVllm(model) for _ in range(num_decodes)]
    connect(prefills, decodes)
    return prefills, decodes


def sglang_engines(model, num_prefills, num_decodes, **settings):
    prefills = [FakeSglang(model, "prefill", **settings) for _ in range(num_prefills)]
    decodes = [FakeSglang(model, "decode", **settings) for _ in range(num_decodes)]
    connect_sglang(prefills, decodes)
    return prefills, decodes


@asynccontextmanager
async def fleet(
    directory,
    num_prefills=1,
    num_decodes=1,
    num_adapters=1,
    options=None,
    make=vllm_engines,
    **settings,
):
    """Run fake engines and the backend. With two adapters, prefill and decode have one each.

    Args:
        options: Fields of `StockOptions`.
        make: Returns the engines of both roles, by the model's directory and their numbers.
    """
    model = str(model_files(directory / "model"))
    prefills, decodes = make(model, num_prefills, num_decodes)
    settings = {"local_prefill_threshold": 0} | settings
    async with AsyncExitStack() as stack:
        for engine in (*prefills, *decodes):
            await stack.enter_async_context(engine.running())
        groups = [
            [target(each, "prefill") for each in prefills],
            [target(each, "decode") for each in decodes],
        ]
        if num_adapters == 1:
            groups = [groups[0] + groups[1]]
        urls = {"prefill": [], "decode": []}
        for group in groups:
            base = await stack.enter_async_context(adapter(group, **options or {}))
            for each in group:
                urls[each.role].append(NodeUrl(f"{base}/{each.path}"))
        found = Fleet(prefills, decodes)
        backend = watched(urls["prefill"], urls["decode"], node_wait_s=30.0, **settings)
        found.backend = await stack.enter_async_context(backend)
        await found.until_up()
        yield found
