"""Prompts that stay on decode: which, and what becomes of an attempt on one node."""

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tandem.router.nodes.state import ClusterState, usable_fingerprint, with_stand_ins
from tandem.router.pairing.pairing import choose, stays_on_decode
from tandem.router.pairing.policy import POLICIES, tokens_to_compute
from tandem.wire.errors import NoNodeAvailable, PeerLost
from tandem.wire.generation import LogprobOptions
from tandem.wire.messages import NodeLoad, Pong, StartColocated, StartDecode, StartPrefill
from tests.patience import until_async
from tests.router.fake_node import FakeNode, request
from tests.router.test_backend import Setup, in_flight, read, reading, watched
from tests.router.test_policy import node, states

THRESHOLD = 8
LONG = range(THRESHOLD + 1)


def able(name="d", backlog=0, **fields):
    return node(name, takes_prompts=True, backlog_tokens=backlog, **fields)


# ── the decision ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("num_tokens", "stays"), [(1, True), (8, True), (9, False)])
def test_prompt_up_to_the_threshold_stays_on_decode(num_tokens, stays):
    assert stays_on_decode(request([1] * num_tokens), able(), THRESHOLD) is stays


@pytest.mark.parametrize(("num_cached", "stays"), [(991, False), (992, True), (1000, True)])
def test_tokens_cached_at_decode_do_not_count_towards_the_threshold(num_cached, stays):
    assert stays_on_decode(request([1] * 1000), able(), THRESHOLD, num_cached) is stays


def test_fully_cached_prompt_still_computes_one_token():
    assert tokens_to_compute(request([1] * 16), 16) == 1


@pytest.mark.parametrize(("start", "num_new"), [(-1, 16), (0, 100), (1, 100), (50, 51), (99, 16)])
def test_cached_tokens_are_not_used_from_the_first_prompt_logprob(start, num_new):
    asked = request([1] * 100, logprobs=LogprobOptions(prompt_start=start))
    assert tokens_to_compute(asked, 84) == num_new


def test_no_prompt_stays_with_threshold_zero_or_on_an_older_node():
    assert not stays_on_decode(request([1]), able(), 0)
    assert not stays_on_decode(request([1]), node(), THRESHOLD)


@given(states, st.integers(0, 3), st.booleans())
def test_decode_nodes_replace_prefill_only_while_no_prefill_is_up(state, threshold, is_able):
    decodes = tuple(replace(n, takes_prompts=is_able) for n in state.decodes)
    state = replace(state, decodes=decodes)
    seen = with_stand_ins(state, threshold)
    able_nodes = tuple(n for n in decodes if n.is_up and is_able)
    if threshold and able_nodes and not any(n.is_up for n in state.prefills):
        assert seen.prefills == able_nodes == tuple(seen.up("decode"))
    else:
        assert seen == state


def test_requests_on_nodes_that_cannot_replace_prefill_still_count():
    """Else the gate takes it for requests that are on no node yet, and lets nobody in for them."""
    draining = able("draining", is_up=False, in_flight_requests=2)
    decodes = (node("old", in_flight_requests=1), draining, able("idle"))
    seen = with_stand_ins(ClusterState((), decodes), THRESHOLD)
    assert [n.url for n in seen.up("decode")] == ["idle"]
    assert sum(n.in_flight_requests for n in seen.decodes) == 3


def test_policy_chooses_only_decode_nodes_that_are_up_and_take_prompts():
    prefill = node("p", role="prefill", is_up=False)
    decodes = (node("old"), able("down", is_up=False), able("new"))
    seen = with_stand_ins(ClusterState((prefill,), decodes), THRESHOLD)
    assert usable_fingerprint(seen) == "a"
    for turn in range(4):
        pair = choose(seen, "a", POLICIES["round_robin"], turn, random.Random(turn))
        assert pair.decode == "new"


def test_decode_does_not_replace_a_prefill_of_a_different_model():
    seen = ClusterState((node("p", role="prefill", fingerprint="b"),), (able(),))
    assert with_stand_ins(seen, THRESHOLD) == seen
    assert usable_fingerprint(seen) is None


# ── the attempt ──────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def cluster(num_decodes=1, is_able=True, prefill=None, threshold=THRESHOLD):
    decodes = [FakeNode("decode", takes_prompts=is_able) for _ in range(num_decodes)]
    prefills = [prefill or FakeNode("prefill")]
    async with AsyncExitStack() as stack:
        for each in prefills + decodes:
            await stack.enter_async_context(each.serving())
        backend = await stack.enter_async_context(
            watched(prefills, decodes, local_prefill_threshold=threshold)
        )
        prefill_nodes = [] if prefill else backend._cluster.prefills
        await until_async(lambda: all(n.is_up for n in prefill_nodes + backend._cluster.decodes))
        yield Setup(prefills, decodes, backend)


def backlog(setup):
    return [n.entry.backlog_tokens for n in setup.backend._cluster.decodes]


def no_prefill():
    return FakeNode("prefill", refusal="still loading")


async def test_short_prompt_is_served_by_decode_alone():
    async with cluster() as setup, reading(setup) as reader:
        decode = setup.decodes[0].engine
        start = await decode.next(StartColocated)
        assert start.request.prompt_ids == [1, 2, 3]
        assert backlog(setup) == [3]
        decode.say(start, 0, [10], cached_tokens=2)
        await until_async(lambda: reader.token_ids == [10])
        assert (backlog(setup), in_flight(setup)) == ([0], [(0, 0), (1, 3)])
        decode.say(start, 1, [11])
        decode.say(start, 2, [12], "length")
        assert await reader.result() == ([10, 11, 12], "length")
        assert in_flight(setup) == [(0, 0), (0, 0)]
        assert setup.prefills[0].engine.is_idle()
        metrics = setup.backend.metrics()
        assert 'tandem_router_local_prompts_total{reason="little_to_compute"} 1.0' in metrics


async def test_long_prompts_and_prompts_for_older_nodes_are_handed_off():
    async with cluster() as setup, reading(setup, request(LONG)):
        await setup.prefills[0].engine.next(StartPrefill)
        start = await setup.decodes[0].engine.next(StartDecode)
        setup.decodes[0].engine.say(start, 0, [1], "stop")
    async with cluster(is_able=False) as setup, reading(setup):
        start = await setup.decodes[0].engine.next(StartDecode)
        setup.decodes[0].engine.say(start, 0, [1], "stop")


async def test_prompt_goes_to_prefill_while_prompts_wait_at_decode():
    async with cluster() as setup, reading(setup, request(range(6))) as first:
        decode = setup.decodes[0].engine
        start = await decode.next(StartColocated)
        async with reading(setup, request(range(3), "r2")) as second:
            other = await decode.next(StartDecode)
            decode.say(other, 0, [1], "stop")
            await second.result()
        decode.say(start, 0, [1], "stop")
        await first.result()
        assert backlog(setup) == [0]


async def test_decode_backlog_counts_tokens_of_all_routers_once():
    async with cluster() as setup:
        (decode,), engine = setup.backend._cluster.decodes, setup.decodes[0].engine
        async with reading(setup, request(range(5))) as reader:
            start = await engine.next(StartColocated)
            told = [NodeLoad(queued_tokens=5), NodeLoad(queued_tokens=7), NodeLoad(queued_tokens=0)]
            for load, num_waiting in zip(told, (5, 7, 5), strict=True):
                engine.load = load
                engine.send(Pong(epoch=engine.epoch, load=load))
                await until_async(lambda load=load: decode.client.load == load)
                assert backlog(setup) == [num_waiting]
            engine.say(start, 0, [1])
            await until_async(lambda: reader.token_ids == [1])
            assert backlog(setup) == [0]
            engine.say(start, 1, [1], "stop")


async def test_group_on_decode_stays_together_above_the_backlog_limit():
    async with cluster() as setup:
        asked = [
            request(request_id=name, group="g") for name in "abcd"
        ]  # 12 tokens on a bound of 8
        async with asyncio.TaskGroup() as tasks:
            for one in asked:
                tasks.create_task(read(setup.backend, one))
            for _ in asked:
                start = await setup.decodes[0].engine.next(StartColocated)
                setup.decodes[0].engine.say(start, 0, [1], "stop")


async def test_node_loss_mid_stream_loses_no_token():
    async with cluster(num_decodes=2) as setup, reading(setup) as reader:
        await until_async(lambda: any(not n.engine.is_idle() for n in setup.decodes))
        (node_,) = [n for n in setup.decodes if not n.engine.is_idle()]
        start = await node_.engine.next(StartColocated)
        node_.engine.say(start, 0, [10])
        node_.engine.say(start, 1, [11])
        await until_async(lambda: reader.token_ids == [10, 11])
        node_.engine.fail(start, PeerLost("gone"))
        engine = setup.others(node_).engine
        again = await engine.next(StartColocated)
        assert (again.request.prompt_ids, again.attempt) == ([1, 2, 3, 10, 11], 1)
        assert again.request.num_prior_tokens == 2
        engine.say(again, 2, [12])
        engine.say(again, 3, [13], "stop")
        assert await reader.result() == ([10, 11, 12, 13], "stop")
        assert backlog(setup) == [0, 0]


@pytest.mark.parametrize(("num_sent", "start_kind"), [(1, StartDecode), (2, StartColocated)])
async def test_replay_that_exceeds_prefills_pool_is_computed_by_decode(num_sent, start_kind):
    prefill = FakeNode("prefill", max_prompt_tokens=10)
    async with cluster(num_decodes=2, prefill=prefill) as setup:
        await until_async(lambda: setup.backend._cluster.prefills[0].is_up)
        async with reading(setup, request(range(9))) as reader:
            await until_async(lambda: any(not n.engine.is_idle() for n in setup.decodes))
            (node_,) = [n for n in setup.decodes if not n.engine.is_idle()]
            start = await node_.engine.next(StartDecode)
            for index in range(num_sent):
                node_.engine.say(start, index, [10])
            await until_async(lambda: len(reader.token_ids) == num_sent)
            node_.engine.fail(start, PeerLost("gone"))
            engine = setup.others(node_).engine
            again = await engine.next(start_kind)
            assert len(again.request.prompt_ids) == 9 + num_sent
            engine.say(again, num_sent, [11], "stop")
            assert await reader.result() == ([10] * num_sent + [11], "stop")


async def test_decode_serves_prompts_of_any_length_without_a_prefill_node():
    async with cluster(prefill=no_prefill()) as setup, reading(setup, request(LONG)) as reader:
        start = await setup.decodes[0].engine.next(StartColocated)
        setup.decodes[0].engine.say(start, 0, [10], "stop")
        assert await reader.result() == ([10], "stop")
        health = setup.backend.health()
        assert health.is_serving
        assert "0 of 1 prefill nodes and 1 of 1 decode nodes" in health.detail
        assert "still loading" in health.detail
        assert 'local_prompts_total{reason="no_prefill"} 1.0' in setup.backend.metrics()


async def test_threshold_zero_without_a_prefill_node_serves_no_request():
    async with cluster(prefill=no_prefill(), threshold=0) as setup:
        with pytest.raises(NoNodeAvailable, match="still loading"):
            await read(setup.backend)
        assert not setup.backend.health().is_serving
