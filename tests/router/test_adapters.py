"""LoRA adapters on a cluster: a name is served if a pair has the same content, and nodes agree on it."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tandem.router.nodes.adapters import AdapterChanges
from tandem.router.nodes.fleet import servable_adapters
from tandem.router.nodes.state import ClusterState, RosterEntry
from tandem.wire.errors import (
    AdapterGone,
    AdapterLoaded,
    AdapterNotFound,
    InvalidRequest,
    TandemError,
)
from tandem.wire.messages import LoadAdapter, LoadedAdapter, NodeLoad, UnloadAdapter
from tests.patience import until_async
from tests.router.fake_node import FakeNode, request
from tests.router.test_backend import cluster, read, reading

DISK = {"/sql": "1", "/new": "2"}


@asynccontextmanager
async def loaded(disks=(DISK, DISK), *names, roles=("prefill", "decode"), **settings):
    """Yield a cluster whose nodes have these adapters on their disks, and have loaded some."""
    nodes = [FakeNode(role) for role in roles]
    for node, disk in zip(nodes, disks, strict=True):
        node.engine.disk = dict(disk)
        adapters = [LoadedAdapter(id=f"{name}@1", path=f"/{name}") for name in names]
        node.engine.load = NodeLoad(adapters=adapters)
    by_role = {
        role: [node for node in nodes if node.role == role] for role in ("prefill", "decode")
    }
    async with cluster(prefills=by_role["prefill"], decodes=by_role["decode"], **settings) as setup:
        setup.nodes = nodes
        yield setup


def served(setup):
    return dict(setup.backend.models().choose(None).adapters)


def held(node):
    return [each.id for each in node.engine.load.adapters]


async def load(setup, name="sql", path="/sql", *, in_place=False):
    await setup.backend.load_adapter(name, path, in_place=in_place)


async def restarted(setup, fake):
    """Restart a node, and wait until it is used again."""
    node = setup.backend._cluster.node(fake.url)
    before = node.client
    fake.restart_engine()
    await until_async(lambda: node.is_up and node.client is not before)


async def test_loaded_adapter_is_served_by_its_id_and_an_unloaded_one_no_more():
    async with loaded() as setup:
        await load(setup)
        assert served(setup) == {"sql": "sql@1"}
        async with reading(setup, request(adapter="sql@1")) as reader:
            prefill, start_prefill, _, start_decode = await setup.pair_of()
            adapters = {start_prefill.request.adapter, start_decode.request.adapter}
            assert adapters == {"sql@1"}
            prefill.engine.say(start_prefill, 0, [2], "stop")
            await reader.result()
        await setup.backend.unload_adapter("sql")
        assert (served(setup), [held(node) for node in setup.nodes]) == ({}, [[], []])
        with pytest.raises(AdapterNotFound, match="'sql' cannot be found"):
            await setup.backend.unload_adapter("sql")


async def test_adapter_is_not_served_until_both_halves_have_it():
    async with loaded() as setup:
        (decode,) = setup.decodes
        decode.engine.is_loading = True
        loading = asyncio.create_task(load(setup))
        message = await decode.engine.next(LoadAdapter)
        await until_async(lambda: held(setup.prefills[0]) == ["sql@1"])
        await until_async(lambda: setup.backend.loads()[0].adapters)
        assert (served(setup), loading.done()) == ({}, False)
        decode.engine.change(message)
        await loading
        assert served(setup) == {"sql": "sql@1"}


async def test_load_that_fails_on_one_node_is_taken_back_on_the_others_and_names_the_node():
    async with loaded((DISK, {})) as setup:
        with pytest.raises(TandemError) as failed:
            await load(setup)
        url = setup.decodes[0].url
        assert (
            failed.value.message
            == f"decode {url}: Loading lora sql failed: No adapter found for /sql"
        )
        assert failed.value.status == 404
        assert [held(node) for node in setup.nodes] == [[], []]


async def test_failed_load_in_place_keeps_the_old_adapter():
    async with loaded((DISK, {"/sql": "1"}), "sql") as setup:
        with pytest.raises(TandemError, match="No adapter found for /new"):
            await load(setup, path="/new", in_place=True)
        assert [held(node) for node in setup.nodes] == [["sql@1"], ["sql@1"]]
        assert served(setup) == {"sql": "sql@1"}


async def test_failed_load_keeps_what_a_node_had_before():
    async with loaded((DISK, {}), "sql") as setup:
        (prefill,), (decode,) = setup.prefills, setup.decodes
        decode.engine.change(UnloadAdapter(adapter="sql@1"))
        await until_async(lambda: not served(setup))
        with pytest.raises(TandemError, match="No adapter found for /sql"):
            await load(setup)
        assert (held(prefill), held(decode)) == (["sql@1"], [])


async def test_different_files_on_the_nodes_are_refused():
    async with loaded((DISK, {"/sql": "9"})) as setup:
        with pytest.raises(
            InvalidRequest, match=r"differ: prefill .* has sql@1, decode .* has sql@9"
        ):
            await load(setup)
        assert [held(node) for node in setup.nodes] == [[], []]


async def test_name_in_use_is_refused_unless_a_node_lacks_it():
    async with loaded((DISK, DISK), "sql") as setup:
        with pytest.raises(AdapterLoaded, match="'sql' has already been loaded"):
            await load(setup)
        decode = setup.decodes[0]
        decode.engine.change(UnloadAdapter(adapter="sql@1"))
        await until_async(lambda: not served(setup))
        await load(setup)
        assert served(setup) == {"sql": "sql@1"}


async def test_load_in_place_serves_the_old_content_until_the_last_node_has_the_new_one():
    async with loaded((DISK, DISK), "sql") as setup:
        (decode,) = setup.decodes
        decode.engine.is_loading = True
        loading = asyncio.create_task(load(setup, path="/new", in_place=True))
        message = await decode.engine.next(LoadAdapter)
        await until_async(lambda: len(setup.backend.loads()[0].adapters) == 2)
        assert served(setup) == {"sql": "sql@1"}
        decode.engine.change(message)
        unload = await decode.engine.next(UnloadAdapter)
        assert served(setup) == {"sql": "sql@2"}
        decode.engine.change(unload)
        await loading
        assert [held(node) for node in setup.nodes] == [["sql@2"], ["sql@2"]]


async def test_two_routers_that_load_in_place_at_once_do_not_unload_each_others_content():
    disk = DISK | {"/other": "3"}
    async with loaded((disk, disk), "sql") as setup:
        (decode,), second = setup.decodes, AdapterChanges(setup.backend._cluster.fleets[0].clients)
        decode.engine.is_loading = True
        loads = [
            asyncio.create_task(load(setup, path="/new", in_place=True)),
            asyncio.create_task(second.load("sql", "/other", in_place=True)),
        ]
        messages = [await decode.engine.next(LoadAdapter) for _ in loads]
        decode.engine.is_loading = False
        for message in messages:
            decode.engine.change(message)
        await asyncio.gather(*loads)
        assert [set(held(node)) for node in setup.nodes] == 2 * [{"sql@2", "sql@3"}]


async def test_client_that_disconnects_does_not_leave_an_adapter_on_some_nodes():
    async with loaded((DISK, {})) as setup:
        (prefill,), (decode,) = setup.prefills, setup.decodes
        decode.engine.is_loading = True
        loading = asyncio.create_task(load(setup))
        message = await decode.engine.next(LoadAdapter)
        await until_async(lambda: held(prefill) == ["sql@1"])
        loading.cancel()
        await asyncio.wait([loading])
        decode.engine.change(message)
        await until_async(lambda: held(prefill) == [])


async def test_node_that_is_lost_during_a_load_does_not_fail_it():
    roles, disks = ("prefill", "decode", "decode"), (DISK, DISK, DISK)
    async with loaded(disks, roles=roles) as setup:
        lost = setup.decodes[0]
        lost.engine.is_loading = True
        loading = asyncio.create_task(load(setup))
        await lost.engine.next(LoadAdapter)
        lost.engine.close()
        await loading
        assert served(setup) == {"sql": "sql@1"}


async def test_restarted_node_has_the_adapters_of_the_others_before_it_is_used():
    async with loaded() as setup:
        await load(setup)
        node, (decode,) = setup.backend._cluster.decodes[0], setup.decodes
        decode.restart_engine()
        decode.engine.is_loading = True
        message = await decode.engine.next(LoadAdapter)
        assert (message.name, message.path, message.digest) == ("sql", "/sql", "1")
        assert not node.is_up
        decode.engine.change(message)
        await until_async(lambda: node.is_up)
        assert served(setup) == {"sql": "sql@1"}


async def test_restarted_node_with_other_files_serves_the_base_model_only():
    async with loaded() as setup:
        await load(setup)
        (decode,) = setup.decodes
        decode.engine.disk["/sql"] = "9"
        await restarted(setup, decode)
        assert (served(setup), held(decode)) == ({}, [])


async def test_late_node_does_not_bring_back_what_was_unloaded():
    roles, disks = ("prefill", "decode", "decode"), (DISK, DISK, DISK)
    async with loaded(disks, "sql", roles=roles) as setup:
        prefill, (_, decode) = setup.prefills[0], setup.decodes
        kept = prefill.engine.load
        await setup.backend.unload_adapter("sql")
        prefill.engine.load = kept  # as if the request had not reached it
        await until_async(lambda: setup.backend.loads()[0].adapters)
        await restarted(setup, decode)
        assert (served(setup), held(decode)) == ({}, [])


async def test_pairs_have_the_adapter_of_the_request():
    roles, disks = ("prefill", "decode", "decode"), (DISK, DISK, DISK)
    async with loaded(disks, "sql", roles=roles) as setup:
        lacking, having = setup.decodes
        lacking.engine.change(UnloadAdapter(adapter="sql@1"))
        await until_async(lambda: setup.backend.loads()[1].adapters == [])
        for number in range(4):
            wanted = request(request_id=f"r{number}", adapter="sql@1")
            async with reading(setup, wanted) as reader:
                prefill, start_prefill, decode, _ = await setup.pair_of()
                assert decode is having
                prefill.engine.say(start_prefill, 0, [2], "stop")
                await reader.result()
            await having.engine.next(object)  # the cancel


async def test_group_leaves_a_pair_that_no_longer_has_its_adapter():
    roles, disks = ("prefill", "decode", "decode"), (DISK, DISK, DISK)
    async with loaded(disks, "sql", roles=roles) as setup:
        first, second = (
            request(request_id=name, adapter="sql@1", group="g") for name in ("r1", "r2")
        )
        async with reading(setup, first) as reader:
            prefill, start_prefill, decode, _ = await setup.pair_of()
            decode.engine.change(UnloadAdapter(adapter="sql@1"))
            await until_async(lambda: [] in [each.adapters for each in setup.backend.loads()])
            async with reading(setup, second) as other:
                _, start_other, moved, _ = await setup.pair_of()
                assert moved is setup.others(decode)
                prefill.engine.say(start_other, 0, [2], "stop")
                await other.result()
            prefill.engine.say(start_prefill, 0, [2], "stop")
            await reader.result()


async def test_request_whose_adapter_is_gone_fails_at_once_and_may_be_sent_again():
    async with loaded((DISK, DISK), "sql", node_wait_s=60) as setup:
        await load(setup, path="/new", in_place=True)
        with pytest.raises(AdapterGone) as failed:
            await read(setup.backend, request(adapter="sql@1"))
        assert (failed.value.status, failed.value.is_retryable) == (503, True)


def nodes(role, *contents):
    return tuple(
        RosterEntry(
            url=f"{role}{number}",
            role=role,
            is_up=True,
            fingerprint="m",
            load=NodeLoad(adapters=[LoadedAdapter(id=f"sql@{each}", path="") for each in own]),
        )
        for number, own in enumerate(contents)
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ((["1"],), (["1"],), "1"),
        ((["1"],), (["2"],), None),
        ((["1"],), ([],), None),
        ((["1", "2"],), (["1"],), "1"),
        ((["1", "2"], ["1", "2"]), (["1", "2"], ["1"]), "1"),
        ((["1", "2"], ["1", "2"]), (["1", "2"], ["1", "2"]), "2"),
        ((["2"], ["1", "2"]), (["1", "2"], ["2"]), "2"),
        ((["1"], ["2"]), (["2"],), "2"),
    ],
)
def test_content_of_a_name_is_that_which_a_pair_and_most_nodes_have(prefill, decode, expected):
    state = ClusterState(prefills=nodes("p", *prefill), decodes=nodes("d", *decode))
    found = servable_adapters(state, "m")
    assert found == ({} if expected is None else {"sql": f"sql@{expected}"})
    assert servable_adapters(state, "other") == {}
