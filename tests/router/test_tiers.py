"""What a router knows of tiers, what it makes of their cost, and where a request goes by it."""

import asyncio
from contextlib import aclosing

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tandem.router.nodes.api import NodesApi
from tandem.router.nodes.prefixes import MAX_TIERS, UNKNOWN_SHARE, KnownPrefixes, share_saved
from tandem.router.nodes.state import RosterEntry
from tandem.wire.messages import CacheReport, NodeLoad, Pong, StartPrefill, TierLoad
from tandem.wire.prefixes import BLOCK_TOKENS, MAX_BLOCKS, PrefixJournal, block_names, pack_names
from tests.patience import until_async
from tests.receivers import deltas
from tests.router.fake_node import FakeNode, request
from tests.router.test_backend import cluster as cluster_of
from tests.router.test_policy import asking, chosen, decode, node, prefill

EPOCH, STORE = 1, "redis://store:6379/0#model"
PROMPT = [i % 499 for i in range(10 * BLOCK_TOKENS + 1)]
NAMES = block_names(PROMPT)
ONE = [decode()]


def report(names=(), tier="", position=1, is_whole=False, removed=()) -> CacheReport:
    return CacheReport(
        epoch=EPOCH,
        position=position,
        tier=tier,
        is_whole=is_whole,
        added=pack_names(list(names)),
        removed=pack_names(list(removed)),
    )


def told(known, tiers=(), queued_tokens=0, **has) -> RosterEntry:
    """A prefill as a router knows it: how many of the prompt's blocks it has where."""
    prefixes = known.new_life()
    load = NodeLoad(queued_tokens=queued_tokens, tiers=list(tiers))
    prefixes.set_tiers(load)
    for place, num_blocks in has.items():
        prefixes.take(report(NAMES[:num_blocks], "" if place == "device" else place))
    return RosterEntry(
        url=f"n{id(prefixes)}",
        role="prefill",
        is_up=True,
        fingerprint="a",
        load=load,
        prefixes=prefixes.cached,
        tiers=prefixes.tiers,
    )


def known_blocks(prefixes) -> dict[str, int]:
    return {name: count for (name, _), count in prefixes.num_blocks.items()}


def has(known, name) -> bool:
    return STORE in known.stores and known.stores[STORE].reach([name]) == 1


def saved(entry) -> float:
    return asking(PROMPT).saved_tokens(entry) / BLOCK_TOKENS


costs = st.one_of(st.just(-1.0), st.floats(0, 3))
lengths = st.integers(0, 10)
stacks = st.lists(st.tuples(costs, lengths), max_size=3)


def stacked(device, stack, state="up") -> RosterEntry:
    tiers = [
        TierLoad(name=f"t{place}", token_cost=cost, state=state)
        for place, (cost, _) in enumerate(stack)
    ]
    has = {f"t{place}": length for place, (_, length) in enumerate(stack)}
    return told(KnownPrefixes(), tiers, device=device, **has)


# ── what is saved ────────────────────────────────────────────────────────────────────────────────


def test_each_tier_saves_its_share_of_the_blocks_that_cheaper_tiers_lack():
    entry = stacked(2, [(0.5, 8), (0.25, 6), (0.9, 8)])
    assert saved(entry) == 2 + 4 * 0.75 + 2 * 0.5
    assert asking(PROMPT).found_in(entry) == {
        "device": 2 * BLOCK_TOKENS,
        "t1": 4 * BLOCK_TOKENS,
        "t0": 2 * BLOCK_TOKENS,
    }


@given(lengths, stacks)
def test_saved_tokens_are_between_device_hits_and_all_cached_tokens(device, stack):
    total = saved(stacked(device, stack))
    assert device <= total <= max([device, *(length for _, length in stack)])


@given(lengths, stacks, st.sampled_from(["backing_off", "a_state_of_the_future"]))
def test_empty_expensive_or_unavailable_tiers_save_nothing(device, stack, state):
    empty = [(cost, 0) for cost, _ in stack]
    dear = [(1 + abs(cost), length) for cost, length in stack]
    assert saved(stacked(device, empty)) == saved(stacked(device, dear)) == device
    assert saved(stacked(device, stack, state)) == device


@given(lengths, stacks.filter(bool), st.data())
def test_higher_tier_cost_never_saves_more(device, stack, data):
    place = data.draw(st.integers(0, len(stack) - 1))
    low, high = sorted(data.draw(st.tuples(st.floats(0, 3), st.floats(0, 3))))
    (_, length) = stack[place]
    cheap, dear = (
        saved(stacked(device, [*stack[:place], (cost, length), *stack[place + 1 :]]))
        for cost in (low, high)
    )
    assert dear <= cheap + 1e-9


@pytest.mark.parametrize(
    ("cost", "share"),
    [
        *[(0.0, 1.0), (0.25, 0.75), (1.0, 0.0), (float("inf"), 0.0)],
        *[(-1.0, UNKNOWN_SHARE), (float("nan"), UNKNOWN_SHARE)],
    ],
)
def test_share_saved_is_bounded_for_any_reported_cost(cost, share):
    assert share_saved(TierLoad(name="host", token_cost=cost)) == share


# ── what is known ────────────────────────────────────────────────────────────────────────────────


def test_local_tier_counts_for_its_node_and_a_shared_store_for_all_its_nodes():
    known = KnownPrefixes()
    own, shared = (
        TierLoad(name="host", token_cost=0),
        TierLoad(name="disk", store=STORE, token_cost=0),
    )
    first = told(known, [own, shared], host=3, disk=7)
    second = told(known, [own, replace_name(shared, "nfs")])
    without = told(known, [own])
    assert [saved(each) for each in (first, second, without)] == [7, 7, 0]


def replace_name(tier, name) -> TierLoad:
    return TierLoad(name=name, store=tier.store, token_cost=tier.token_cost)


events = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.integers(0, 2), st.booleans(), st.integers(0, 9)),
        st.tuples(st.just("ask"), st.integers(0, 2)),
        st.tuples(st.just("die"), st.integers(0, 2)),
    ),
    max_size=60,
)


@given(events, st.integers(1, 12))
def test_store_index_has_the_blocks_of_all_live_nodes(drawn, max_changes):
    """Three nodes feed it, by the product's own journals; a node that dies has a new life at once."""
    known = KnownPrefixes()
    load = NodeLoad(tiers=[TierLoad(name="redis", store=STORE)])

    def born():
        prefixes = known.new_life()
        prefixes.set_tiers(load)
        return PrefixJournal(max_changes=max_changes), set(), prefixes

    def ask(each):
        journal, cached, prefixes = each
        if (changes := journal.since(prefixes.tier_positions["redis"])) is not None:
            prefixes.take(
                report(changes.added, "redis", changes.position, changes.is_whole, changes.removed)
            )
        return cached

    nodes = [born() for _ in range(3)]
    asked = [set(), set(), set()]
    for kind, number, *change in drawn:
        journal, cached, prefixes = nodes[number]
        if kind == "ask":
            asked[number] = set(ask(nodes[number]))
        elif kind == "die":
            prefixes.forget()
            nodes[number], asked[number] = born(), set()
        elif change[0] and change[1] not in cached:
            journal.add(change[1])
            cached.add(change[1])
        elif not change[0] and change[1] in cached:
            journal.remove(change[1])
            cached.remove(change[1])
        assert {name for name in range(10) if has(known, name)} == set.union(*asked)
    for _, _, prefixes in nodes:
        prefixes.forget()
        prefixes.forget()
    assert len(known.index) == 0
    assert not any(has(known, name) for name in range(10))


def test_removed_tier_is_forgotten_and_its_late_reports_are_dropped():
    known = KnownPrefixes()
    prefixes = known.new_life()
    host, shared = TierLoad(name="host"), TierLoad(name="disk", store=STORE)
    prefixes.set_tiers(NodeLoad(tiers=[host, shared]))
    for tier in ("", "host", "disk", "unheard"):
        prefixes.take(report(NAMES, tier))
    assert prefixes.tier_positions == {"host": 1, "disk": 1}
    assert known_blocks(prefixes) == {"host": len(NAMES), "disk": len(NAMES)}
    # Another store under the same name begins anew; one that no node has any more is forgotten.
    prefixes.set_tiers(NodeLoad(tiers=[TierLoad(name="disk", store=STORE + "2")]))
    assert prefixes.tier_positions == {"disk": 0}
    assert list(known.stores) == [STORE + "2"]
    prefixes.take(report(NAMES, "host"))
    prefixes.set_tiers(NodeLoad())
    assert (prefixes.tier_positions, prefixes.tiers, len(known.stores)) == ({}, (), 0)
    assert prefixes.position == 1
    prefixes.forget()
    prefixes.set_tiers(NodeLoad(tiers=[host]))  # on its way as the life ended
    prefixes.take(report(NAMES, "host"))
    assert (prefixes.tier_positions, len(known.index)) == ({}, 0)


def test_tiers_and_blocks_per_node_are_bounded():
    known = KnownPrefixes()
    many = [TierLoad(name=f"t{place}") for place in range(3 * MAX_TIERS)]
    liar = known.new_life()
    liar.set_tiers(NodeLoad(tiers=many))
    assert len(liar.tier_positions) == MAX_TIERS
    liar.take(report(range(MAX_BLOCKS + 1), "t0"))
    assert known_blocks(liar)["t0"] == MAX_BLOCKS


# ── where a request goes ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["cache_aware", "session"])
def test_node_that_reads_the_store_is_used_when_the_caching_node_is_busy(policy):
    """As soon as waiting costs more than fetching: the choice follows the measured cost."""
    tokens = len(NAMES) * BLOCK_TOKENS
    for cost in (0.1, 0.5, -1.0, 0.9):
        share = 1 - cost if cost >= 0 else UNKNOWN_SHARE
        for queued, taken in ((-1, "warm"), (1, "other")):
            tier = TierLoad(name="redis", store=STORE, token_cost=cost)
            known, wait = KnownPrefixes(), round(tokens * (1 - share)) + queued
            warm = told(known, [tier], wait, device=10, redis=10)
            other = told(known, [tier])
            urls = {"warm": warm.url, "other": other.url}
            assert chosen(policy, [other, warm], ONE, asking(PROMPT)).prefill == urls[taken]


def test_decode_tiers_count_only_when_decode_replaces_prefill():
    known, host = KnownPrefixes(), TierLoad(name="host", token_cost=0)
    behind = replace(told(known, [host], host=10), role="decode", url="behind")
    cold = node("cold", "decode")
    pairs = [chosen("cache_aware", [prefill()], [cold, behind], asking(PROMPT), t) for t in (0, 1)]
    assert {pair.decode for pair in pairs} == {"cold", "behind"}
    alone = [chosen("cache_aware", [cold, behind], [cold], asking(PROMPT), t) for t in (0, 1)]
    assert {pair.prefill for pair in alone} == {"behind"}


async def taken_by(backend, prefills):
    """Return which prefill is given the prompt."""
    async with aclosing(deltas(backend, request(PROMPT))) as parts:
        first = asyncio.ensure_future(anext(parts))
        await until_async(lambda: not all(each.engine.is_idle() for each in prefills))
        [taken] = [each for each in prefills if not each.engine.is_idle()]
        start = await taken.engine.next(StartPrefill)
        taken.engine.say(start, 0, [7], reason="stop")
        await first
    return taken


async def test_busy_node_loses_a_prompt_to_a_node_that_reads_the_shared_store():
    warm, other = FakeNode("prefill"), FakeNode("prefill")

    async def says(each, cost, queued_tokens=0):
        tier = TierLoad(name="redis", store=STORE, token_cost=cost)
        each.engine.load = NodeLoad(queued_tokens=queued_tokens, tiers=[tier])
        each.engine.send(Pong(epoch=each.engine.epoch, load=each.engine.load))
        of_it = cluster.node(each.url)
        await until_async(lambda: of_it.client.load == each.engine.load)

    async with cluster_of(prefills=[warm, other], policy="cache_aware") as setup:
        backend, cluster = setup.backend, setup.backend._cluster
        warm.engine.tell_cached(NAMES)
        warm.engine.tell_cached(NAMES, tier="redis")
        for cost in (0.2, 0.8):
            for each in (warm, other):
                await says(each, cost)
            await until_async(
                lambda: known_blocks(cluster.node(other.url).prefixes) == {"redis": 10}
            )
            await until_async(lambda: cluster.node(warm.url).prefixes.cached.num_blocks == 10)
            assert await taken_by(backend, [warm, other]) is warm
            # Half a prompt in line costs more than fetching it at a fifth, and less than at four fifths.
            await says(warm, cost, queued_tokens=len(PROMPT) // 2)
            await says(other, cost)
            assert await taken_by(backend, [warm, other]) is (other if cost == 0.2 else warm)
        life = cluster.node(warm.url).prefixes
        warm.restart_engine()
        await until_async(lambda: cluster.node(warm.url).prefixes is not life)
        # The one that told of it is gone, and with it what it told.
        assert known_blocks(cluster.node(other.url).prefixes) == {"redis": 0}


async def test_metrics_count_cached_blocks_and_prompt_tokens_per_tier():
    first, second = FakeNode("prefill"), FakeNode("prefill")
    tiers = [TierLoad(name="host", num_pages=7), TierLoad(name="redis", store=STORE)]
    for each in (first, second):
        each.engine.load = NodeLoad(tiers=tiers)
    async with cluster_of(prefills=[first, second], policy="cache_aware") as setup:
        backend, cluster = setup.backend, setup.backend._cluster
        first.engine.tell_cached(NAMES[:2])
        first.engine.tell_cached(NAMES[:5], tier="host")
        second.engine.tell_cached(NAMES[:5], tier="host")
        second.engine.tell_cached(NAMES, tier="redis")
        await until_async(lambda: cluster.tier_blocks() == {"host": 10, "redis": 10})
        await until_async(lambda: cluster.node(first.url).prefixes.cached.num_blocks == 2)
        async with TestClient(TestServer(app_of(cluster))) as client, client.get("/nodes") as shown:
            nodes = {node["url"]: node["tiers"] for node in (await shown.json())["nodes"]}
        assert [tier["name"] for tier in nodes[first.url]] == ["host", "redis"]
        assert [tier["num_blocks"] for tier in nodes[first.url]] == [5, 10]
        assert (nodes[first.url][0]["num_pages"], nodes[first.url][1]["store"]) == (7, STORE)
        assert await taken_by(backend, [first, second]) is first
        lines = backend.metrics().splitlines()
        for line in (
            'tandem_router_tier_blocks{tier="host"} 10.0',
            'tandem_router_tier_blocks{tier="redis"} 10.0',
            'tandem_router_prompt_tokens_total{found="device"} 256.0',
            'tandem_router_prompt_tokens_total{found="host"} 384.0',
            'tandem_router_prompt_tokens_total{found="redis"} 640.0',
            'tandem_router_prompt_tokens_total{found="nowhere"} 1.0',
        ):
            assert line in lines


def app_of(cluster) -> web.Application:
    app = web.Application()
    app.add_routes(NodesApi(cluster, link=None).routes())
    return app
