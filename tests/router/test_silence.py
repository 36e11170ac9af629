"""Nodes that lie, fall silent or hang, and requests that are placed again: a whole cluster in virtual time."""

import asyncio

import pytest

from tandem.router.config import AdmissionConfig
from tandem.router.nodes.watch import FIRST_ANSWER_TIMEOUT_S, SILENCE_S
from tandem.wire.generation import GenerateRequest, SamplingParams
from tests.patience import until_async
from tests.simulation.clients import Client
from tests.simulation.nodes import NodeShape
from tests.simulation.scenarios import run_plan
from tests.simulation.world import Plan

# An operator's patience, and the limit that docs/replay.md promises for a loss.
NOTICED_WITHIN_S = 2.0
NODE = NodeShape(num_pages=50, page_size=4)


def client(name="q", num_tokens=150, **fields) -> Client:
    """A client whose request runs for seconds."""
    sampling = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return Client(
        request=GenerateRequest(
            request_id=name, prompt_ids=[9, 8, 7, 6], sampling=sampling, **fields
        )
    )


def run(misfortune, clients=(), num_decodes=2, **fields):
    plan = Plan(
        prefills=[NODE], decodes=[NODE] * num_decodes, clients=list(clients), pace=0.02, **fields
    )
    return run_plan("silence", plan, 0, misfortune)


def known(world, node):
    """Return a node as the router knows it."""
    return world.routers[0].cluster.node(node.url)


@pytest.mark.parametrize("how", ["kill", "power off", "stop"])
def test_dead_or_stopped_node_is_marked_down_within_two_seconds(how):
    async def misfortune(world):
        decode = world.nodes[1]
        assert known(world, decode).is_up
        if how == "stop":
            decode.stop()
        else:
            decode.kill(is_silent=how == "power off")
        await until_async(lambda: not known(world, decode).is_up, NOTICED_WITHIN_S)
        assert known(world, decode).client.lost.is_set()

    run(misfortune)


def test_node_with_a_hung_loop_and_a_live_link_is_unused_until_the_loop_runs():
    async def misfortune(world):
        decode = world.nodes[1]
        node = known(world, decode)
        # It lies: healthy over HTTP, its link is alive, and its loop reports nothing.
        mute(decode)
        assert node.is_up
        took_s = await until_async(lambda: not node.is_up, SILENCE_S + NOTICED_WITHIN_S)
        assert took_s > SILENCE_S - 1.0  # a long step of an engine is no reason
        assert "reported nothing" in node.reason
        assert not node.client.lost.is_set()
        cluster, told = world.routers[0].cluster, []
        cluster.on_node_up = lambda: told.append(world.loop.time())
        await asyncio.sleep(10.0)
        assert not node.is_up
        assert told == []  # no request is told to look
        unmute(decode)
        await until_async(lambda: node.is_up, NOTICED_WITHIN_S)

    run(misfortune)


def mute(node) -> None:
    """Have a node's engine answer no ping, though all else of it goes on."""
    node._loop._answers.pong = lambda _peer, _load: None


def unmute(node) -> None:
    del node._loop._answers.pong


def test_node_with_healthy_http_and_a_silent_engine_is_not_used():
    async def misfortune(world):
        decode = world.nodes[1]
        decode.kill()
        await until_async(lambda: not known(world, decode).is_up, NOTICED_WITHIN_S)
        decode.restart()
        mute(decode)
        node, limit_s = known(world, decode), FIRST_ANSWER_TIMEOUT_S + NOTICED_WITHIN_S
        await until_async(lambda: "does not answer" in node.reason, limit_s)
        for _ in range(50):
            assert not node.is_up
            await asyncio.sleep(0.1)
        unmute(decode)
        await until_async(lambda: node.is_up, limit_s)

    run(misfortune)


def test_drain_is_detected_over_the_link_without_http_polling():
    async def misfortune(world):
        decode, asked = world.nodes[1], []
        original = world.server_info

        async def counted(process, url):
            asked.append(url)
            return await original(process, url)

        world.server_info = counted
        await asyncio.sleep(5.0)
        assert asked == []
        decode.drain(60.0, ends=False)
        took_s = await until_async(lambda: not known(world, decode).is_up, NOTICED_WITHIN_S)
        assert took_s < 1.0
        assert known(world, decode).state == "draining"
        decode.resume()
        await until_async(lambda: known(world, decode).is_up, NOTICED_WITHIN_S)

    run(misfortune)


def test_replayed_request_counts_once_and_releases_its_share_of_the_dead_node():
    clients = [client(f"q{number}") for number in range(3)]

    async def misfortune(world):
        backend, cluster = world.routers[0].backend, world.routers[0].cluster
        await until_async(lambda: all(len(each.token_ids) >= 3 for each in clients), 30.0)
        first = world.nodes[1]
        num_there = known(world, first).entry.in_flight_requests
        assert num_there >= 1
        first.kill(is_silent=True)
        await until_async(known(world, first).client.lost.is_set, NOTICED_WITHIN_S)
        await until_async(lambda: world.replays >= num_there, 30.0)
        # A dead node holds nothing; each request has one place, at one decode.
        assert known(world, first).entry.in_flight_requests == 0
        assert known(world, first).entry.in_flight_tokens == 0
        assert sum(node.entry.in_flight_requests for node in cluster.decodes) == 3
        assert backend.leftovers["started"] == 3
        running = [use.num_running for use in backend.pairing.uses.values()]
        assert sum(running) == 3

    run(misfortune, clients)


def test_replayed_request_keeps_its_place_until_it_finishes():
    # Room for one request at each decode, of which one dies: the second request waits for the first to end.
    clients = [client("first", 80), client("second", 80)]

    async def misfortune(world):
        backend = world.routers[0].backend
        await until_async(lambda: all(len(each.token_ids) >= 2 for each in clients), 30.0)
        third = client("third", 5)
        reading = asyncio.ensure_future(third.run(world.routers[0]))
        await asyncio.sleep(0.5)
        assert backend.leftovers["queued"] == 1
        on_first = [node for node in world.nodes[1:] if known(world, node).entry.in_flight_requests]
        on_first[0].kill(is_silent=True)
        await until_async(lambda: world.replays >= 1, 30.0)
        # The request that moved is at the other decode, beside the one there: no place became free.
        assert backend.leftovers["started"] == 2
        assert backend.leftovers["queued"] == 1
        await reading
        assert len(third.token_ids) == 5

    run(misfortune, clients, admission=AdmissionConfig(max_in_flight=1))
