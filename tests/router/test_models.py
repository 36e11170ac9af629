"""Several models behind one router: each has its own nodes, queue, places and adapters."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tandem.router.nodes import cluster as cluster_module
from tandem.wire.errors import InvalidRequest, ModelNotFound, NoNodeAvailable
from tandem.wire.messages import LoadedAdapter, ModelInfo, NodeLoad, Pong, StartDecode, StartPrefill
from tests.patience import until_async
from tests.receivers import deltas
from tests.router.fake_node import FakeNode, request
from tests.router.test_backend import cluster


def model(name, fingerprint="", **fields) -> ModelInfo:
    return ModelInfo(
        name=name,
        fingerprint=fingerprint or f"fp-{name}",
        context_length=100,
        vocab_size=50,
        eos_token_ids=[2],
        **fields,
    )


def pair(name, fingerprint="", **fields) -> list[FakeNode]:
    return [
        FakeNode(role, model=model(name, fingerprint, **fields)) for role in ("prefill", "decode")
    ]


@asynccontextmanager
async def serving(*nodes, **settings):
    """Yield a router of these nodes, once it has reached all."""
    prefills, decodes = (
        [node for node in nodes if node.role == role] for role in ("prefill", "decode")
    )
    async with cluster(prefills=prefills, decodes=decodes, **settings) as setup:
        yield setup.backend


def names(backend) -> list[tuple[str, ...]]:
    return [each.names for each in backend.models().models]


async def read(backend, name, request_id="r1"):
    return [part async for part in deltas(backend, request(request_id=request_id), model=name)]


async def answered(backend, nodes, name, request_id) -> None:
    """Check that a request for a model runs on these nodes."""
    prefill, _ = nodes
    reading = asyncio.create_task(read(backend, name, request_id))
    start = await prefill.engine.next(StartPrefill)
    prefill.engine.say(start, 0, [7], reason="stop")
    assert [part.token_ids for part in await reading] == [[7]]


async def gone(backend, node) -> None:
    """Lose a node, and wait until the router has noticed."""
    node.refusal = "gone"
    node.restart_engine()
    await until_async(lambda: not backend._cluster.node(node.url).is_up)


async def test_requests_go_to_the_nodes_of_their_model():
    a, b = pair("a"), pair("b", aliases=["bee"])
    async with serving(*a, *b) as backend:
        assert names(backend) == [("a",), ("b", "bee")]
        for number in range(3):
            await answered(backend, a, "a", f"a{number}")
            await answered(backend, b, "b", f"b{number}")
        assert all(node.engine.is_idle() for node in (a[0], b[0]))
        assert not any(backend.leftovers.values())
        with pytest.raises(ModelNotFound, match="serves 'a', 'b', 'bee'"):
            backend.models().choose("c")
        with pytest.raises(InvalidRequest, match="this router serves 'a', 'b', 'bee'"):
            backend.models().choose(None)


async def test_model_without_a_pair_is_unavailable_while_the_other_serves():
    a, b = pair("a"), pair("b")
    async with serving(*a, *b) as backend:
        assert names(backend) == [("a",), ("b",)]
        await gone(backend, a[1])
        health = backend.health()
        assert health.is_serving
        assert f"a: no decode node reachable: {a[1].url}" in health.detail
        assert "b: 1 of 1 prefill nodes and 1 of 1 decode nodes serve" in health.detail
        with pytest.raises(NoNodeAvailable, match=a[1].url):
            await read(backend, backend.models().choose("a").name)
        with pytest.raises(InvalidRequest):  # it must not go to the model that is left
            backend.models().choose(None)
        await answered(backend, b, "b", "b1")
        await gone(backend, b[1])
        assert not backend.health().is_serving


async def test_model_that_never_had_a_pair_leaves_the_only_other_one_the_default():
    a, stray = pair("a"), FakeNode("decode", model=model("b"))
    async with serving(*a, stray) as backend:
        assert names(backend) == [("a",)]
        assert backend.models().choose(None).name == "a"
        assert backend.models().choose("c").name == "a", "its API refuses the name"
        with pytest.raises(NoNodeAvailable, match="no prefill node is known"):
            backend.models().choose("b")
        await answered(backend, a, "", "a1")


async def test_decode_nodes_compute_prompts_unless_a_prefill_node_has_a_different_model():
    a = pair("a")
    lonely = FakeNode("decode", model=model("b"), takes_prompts=True)
    async with serving(*a, lonely) as backend:
        assert names(backend) == [("a",), ("b",)]
    wrong = FakeNode("prefill", model=model("a"))
    lonely = FakeNode("decode", model=model("b"), takes_prompts=True)
    async with serving(wrong, lonely) as backend:
        health = backend.health()
        assert not health.is_serving
        assert "prefill serves fp-a and decode serves fp-b" in health.detail
        with pytest.raises(NoNodeAvailable, match="prefill serves fp-a and decode serves fp-b"):
            backend.models()


async def test_nodes_with_equal_fingerprints_serve_one_model_under_all_their_names():
    prefill = FakeNode("prefill", model=model("a", "same"))
    decode = FakeNode("decode", model=model("b", "same"))
    async with serving(prefill, decode) as backend:
        assert names(backend) == [("a", "b")]
        await answered(backend, (prefill, decode), "a", "a1")


async def test_node_of_the_same_name_with_a_different_fingerprint_is_not_used():
    a, other = pair("a"), FakeNode("decode", model=model("a", "other"))
    async with serving(*a, other) as backend:
        assert names(backend) == [("a",)]
        assert f"decode {other.url} serves another model: other" in backend.health().detail
        for number in range(3):
            await answered(backend, a, "", f"a{number}")
        assert other.engine.is_idle()


async def test_router_with_a_configured_name_serves_one_model():
    a, b = pair("a"), pair("b")
    async with serving(*a, *b, served_model_names=("x", "y")) as backend:
        assert names(backend) == [("x", "y")]
        assert f"prefill {b[0].url} serves another model: fp-b" in backend.health().detail
        await answered(backend, a, "x", "a1")


async def test_full_node_of_one_model_does_not_delay_the_other():
    a, b = pair("a"), pair("b")
    a[1].engine.load = NodeLoad(max_running=1, num_edges=1, num_pages=9, pages_free=9, page_size=16)
    async with serving(*a, *b) as backend, asyncio.TaskGroup() as tasks:
        first, second = (
            tasks.create_task(anext(deltas(backend, request(request_id=name), model="a")))
            for name in ("a1", "a2")
        )
        start = await a[0].engine.next(StartPrefill)
        await a[1].engine.next(StartDecode)
        await answered(backend, b, "b", "b1")
        assert backend.counts().num_queued == 1
        assert 'tandem_router_queued_requests{model_name="a"} 1.0' in backend.metrics()
        assert 'tandem_router_queued_requests{model_name="b"} 0.0' in backend.metrics()
        assert await backend.abort("a2"), "it waits in the queue of its model"
        assert (await second).finish.reason == "abort"
        a[0].engine.say(start, 0, [7], reason="stop")
        await first
        assert backend.counts().num_queued == 0


async def test_waiting_request_starts_when_a_node_of_its_model_reports_room():
    a, b = pair("a"), pair("b")
    b[1].engine.load = NodeLoad(num_pages=9, page_size=16)
    async with serving(*a, *b) as backend, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(answered(backend, b, "b", "b1"))
        await until_async(lambda: backend.counts().num_queued == 1)
        await answered(backend, a, "a", "a1")
        assert backend.counts().num_queued == 1
        b[1].engine.load = load = NodeLoad(num_pages=9, pages_free=9, page_size=16)
        b[1].engine.send(Pong(epoch=b[1].engine.epoch, load=load))
        await waiting


async def test_adapter_is_loaded_on_the_nodes_of_its_model_only():
    a, b = pair("a"), pair("b")
    for node in (*a, *b):
        node.engine.disk = {"/sql": "1"}
    async with serving(*a, *b) as backend:
        await backend.load_adapter("sql", "/sql", in_place=False, model="b")
        served = backend.models()
        assert [each.adapters for each in served.models] == [{}, {"sql": "sql@1"}]
        assert served.choose("sql").name == "b"
        held = [node.engine.load.adapters for node in (*a, *b)]
        assert held == [[], [], *[[LoadedAdapter(id="sql@1", path="/sql")]] * 2]
        await backend.unload_adapter("sql", "b")
        assert backend.models().choose("b").adapters == {}


async def test_model_is_forgotten_a_while_after_its_last_node_changed(monkeypatch):
    monkeypatch.setattr(cluster_module, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(cluster_module, "FORGET_S", 0.03)
    a, b = pair("a"), pair("b")
    async with serving(*a, *b) as backend:
        assert names(backend) == [("a",), ("b",)]
        for node in b:
            node.now_has({}, model("c"))
        await until_async(lambda: names(backend) == [("a",), ("c",)])
        await answered(backend, b, "c", "c1")
        await until_async(lambda: not backend.models().unavailable)
        for node in b:
            node.now_has({}, model("a"))
        await until_async(lambda: names(backend) == [("a",)])
        await until_async(lambda: not backend.models().unavailable)
        assert backend.models().choose(None).name == "a"


async def test_model_whose_nodes_were_removed_is_unavailable_and_no_default():
    a, b = pair("a"), pair("b")
    async with serving(*a, *b) as backend:
        served = backend._cluster.members
        assert names(backend) == [("a",), ("b",)]
        left = [each for each in served.members if each.url in {node.url for node in b}]
        backend._cluster.apply(type(served)(members=left))
        await until_async(lambda: names(backend) == [("b",)])
        assert backend.models().choose(None).name == "b"
        with pytest.raises(NoNodeAvailable):
            backend.models().choose("a")


async def test_metrics_count_requests_by_model():
    a, b = pair("a"), pair("b")
    async with serving(*a, *b) as backend:
        await answered(backend, a, "a", "a1")
        await answered(backend, b, "b", "b1")
        text = backend.metrics()
        for name in ("a", "b"):
            count = f'tandem_router_requests_total{{model_name="{name}",outcome="finished"}} 1.0'
            assert count in text
        assert backend.counts().totals.num_finished == 2
        assert 'tandem_router_nodes_up{role="decode"} 2.0' in text


async def test_metrics_follow_a_model_that_is_renamed():
    nodes = pair("a")
    async with serving(*nodes) as backend:
        await answered(backend, nodes, "a", "a1")
        await answered(backend, nodes, "b", "b1")
        text = backend.metrics()
        for name in ("a", "b"):
            assert f'tandem_router_queue_wait_seconds_count{{model_name="{name}"}} 1.0' in text
