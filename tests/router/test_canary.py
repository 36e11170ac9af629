"""Nodes of another engine are tried with a known prompt before clients' requests run on them."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tandem.router.nodes import watch
from tandem.router.nodes.canary import PROMPT_TOKENS
from tandem.wire.errors import EngineFailed
from tandem.wire.messages import StartColocated, StartDecode, StartPrefill
from tests.patience import until_async
from tests.router.fake_node import FakeNode
from tests.router.test_backend import watched

RIGHT, WRONG = [5, 6, 7], [5, 9, 9]


class Cluster:
    """Nodes that answer known prompts.

    Attributes:
        writers: Prefills whose KV decode nodes do not understand, by their bootstrap ports.
        failing: How many starts fail from here on.
        tried: The pairs of ports that were asked.
    """

    def __init__(self) -> None:
        self.writers: set[int] = set()
        self.num_failing = 0
        self.tried: list[int] = []
        self.prefills: list[FakeNode] = []
        self.decodes: list[FakeNode] = []
        self.backend = None

    async def play(self, node: FakeNode) -> None:
        while True:
            start = await node.engine._received.get()
            match start:
                case StartColocated():
                    self.tell(node, start, RIGHT)
                case StartDecode(bootstrap_port=port):
                    self.tried.append(port)
                    self.tell(node, start, WRONG if port in self.writers else RIGHT)
                case StartPrefill():
                    node.engine.say(start, 0, RIGHT[:1], "handed_off")

    def tell(self, node: FakeNode, start, tokens) -> None:
        assert start.request.sampling.max_new_tokens == len(tokens)
        if self.num_failing:
            self.num_failing -= 1
            node.engine.fail(start, EngineFailed("broken"))
        else:
            node.engine.say(start, 0, tokens, "length")

    @property
    def is_up(self) -> bool:
        return all(self.node(node.url).is_up for node in (*self.prefills, *self.decodes))

    def node(self, url: str):
        return self.backend._cluster.node(url)


@asynccontextmanager
async def cluster(ports=(1,), num_decodes=1, writers=(), **info):
    """Run a router over prefills with these bootstrap ports, and decodes."""
    setup = Cluster()
    setup.writers |= set(writers)
    info = {"engine": "vllm", "takes_prompts": True} | info
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        setup.prefills = [FakeNode("prefill", bootstrap_port=port, **info) for port in ports]
        setup.decodes = [FakeNode("decode", **info) for _ in range(num_decodes)]
        playing = []
        for node in (*setup.prefills, *setup.decodes):
            await stack.enter_async_context(node.serving())
            playing.append(tasks.create_task(setup.play(node)))
        setup.backend = await stack.enter_async_context(watched(setup.prefills, setup.decodes))
        yield setup
        for task in playing:
            task.cancel()


async def test_pair_whose_canary_matches_decode_alone_is_used():
    async with cluster() as setup:
        await until_async(lambda: setup.is_up)
        assert setup.tried == [1] * len(PROMPT_TOKENS)
        assert all(setup.node(node.url).is_proven for node in (*setup.prefills, *setup.decodes))
        assert not any(setup.backend.leftovers.values())


async def test_pair_with_incompatible_kv_is_not_used_and_the_reason_is_shown():
    async with cluster(writers=[1]) as setup:
        nodes = [setup.node(node.url) for node in (*setup.prefills, *setup.decodes)]
        await until_async(lambda: any("its KV is incompatible" in node.reason for node in nodes))
        assert [node.is_up for node in nodes].count(True) == 1
        assert "3 of 3 known prompts" in setup.backend.health().detail
        num_tried = len(setup.tried)
        assert num_tried == 2 * len(PROMPT_TOKENS)
        # It is not asked the same again and again.
        refused = next(node for node in nodes if not node.is_up)
        refused.trouble.set()
        await until_async(lambda: not refused.trouble.is_set())
        assert len(setup.tried) == num_tried


async def test_prefill_with_incompatible_kv_is_excluded_whatever_the_start_order():
    async with cluster(ports=(1, 2), num_decodes=2, writers=[1]) as setup:
        bad, good = [setup.node(node.url) for node in setup.prefills]
        decodes = [setup.node(node.url) for node in setup.decodes]
        await until_async(lambda: good.is_proven and all(node.is_up for node in decodes))
        await until_async(lambda: "is incompatible" in bad.reason)
        assert not bad.is_up
        assert setup.backend.health().is_serving


@pytest.mark.parametrize("num_failing", [1, 4])
async def test_failed_canary_is_retried(monkeypatch, num_failing):
    monkeypatch.setattr(watch, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(watch, "LAST_RETRY_S", 0.01)
    async with cluster() as setup:
        setup.num_failing = num_failing
        await until_async(lambda: setup.is_up)
        assert setup.num_failing == 0


async def test_nodes_with_the_tandem_engine_get_no_canary():
    async with cluster(engine="tandem") as setup:
        await until_async(lambda: setup.is_up)
        assert setup.tried == []


async def test_restarted_node_gets_a_new_canary():
    async with cluster() as setup:
        await until_async(lambda: setup.is_up)
        num_tried = len(setup.tried)
        setup.decodes[0].restart_engine()
        node = setup.node(setup.decodes[0].url)
        await until_async(lambda: not node.is_proven)
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(setup.play(setup.decodes[0]))
            await until_async(lambda: node.is_proven and node.is_up)
            playing.cancel()
        assert len(setup.tried) == num_tried + len(PROMPT_TOKENS)
