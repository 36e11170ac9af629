"""Whole clusters with faults at random: the real code of routers and nodes, in virtual time.

A seed that fails is seen again with `python -m tests.simulation --trace SEED`, and thousands are run with
`--seeds`.
"""

import asyncio

import pytest
import zmq

from tests.sample import sampled
from tests.simulation.ground import simulated
from tests.simulation.mutants import LATE, MUTANTS, OF_STOPPED_WRITERS, WASTEFUL
from tests.simulation.network import NOTICE_S
from tests.simulation.scenarios import (
    Failure,
    run_abandoned,
    run_crowded,
    run_seed,
    run_stopped_writers,
    seconds_to_notice,
    seeds_of,
)
from tests.simulation.threads import TURN_S
from tests.simulation.virtual_time import Stuck, run_in_virtual_time


@pytest.mark.parametrize("first", range(0, 90, 30))
def test_every_request_ends_correctly_and_leaves_no_state(first):
    worlds = [run_seed(seed) for seed in range(first, first + 30)]
    # These are not thirty calm ones.
    assert sum(world.num_faults for world in worlds) > 20
    assert sum(world.replays for world in worlds) > 5
    answered = sum(bool(client.finish) for world in worlds for client in world.plan.clients)
    assert answered > 50
    assert sum(world.num_drained for world in worlds) > 5
    assert sum(world.num_local for world in worlds) > 10


# Some take hundreds of seeds.
CAUGHT_LATE = {
    "decode waits for ever after a Landed that crossed",
    "prefill does not stop its writes when the link is lost",
    "a silent prefill is not noticed",
    "an answer that began ends with its deadline",
}
WRONG = [(rest, name) for rest, mutants in MUTANTS.items() for name in mutants]


@pytest.mark.parametrize(
    ("rest", "name"), sampled(WRONG, *(each for each in WRONG if each[1] not in CAUGHT_LATE))
)
def test_mutant_is_caught(rest, name):
    with MUTANTS[rest][name], pytest.raises(Failure) as caught:
        for seed in seeds_of(rest, 0, 1000):
            run_seed(seed)
    # Of a change that raises by itself nothing is learned.
    assert "mutants.py" not in str(caught.value)


def test_resumed_prefill_never_writes_into_a_reused_page():
    worlds = [run_stopped_writers(seed) for seed in range(6)]
    assert sum(world.replays for world in worlds) > 10


@pytest.mark.parametrize("name", OF_STOPPED_WRITERS)
def test_reuse_of_pages_before_the_fence_is_caught(name):
    with OF_STOPPED_WRITERS[name], pytest.raises(Failure, match="writes into page"):
        for seed in range(20):
            run_stopped_writers(seed)


@pytest.mark.parametrize("target", ["prefill", "decode"])
@pytest.mark.parametrize("kind", ["stop", "power off", "cut off"])
def test_silent_node_in_a_hand_off_is_lost_about_two_seconds_later(kind, target):
    assert NOTICE_S[0] <= seconds_to_notice(kind, target) <= NOTICE_S[1] + TURN_S


def test_request_past_its_deadline_is_not_started():
    outcomes = {client.finish for client in run_crowded().plan.clients}
    assert outcomes == {"length", ""}
    with LATE, pytest.raises(Failure, match="too late"):
        run_crowded()


@pytest.mark.parametrize("how", WASTEFUL)
def test_abandoned_request_is_not_computed(how):
    run_abandoned(how)
    with WASTEFUL[how], pytest.raises(Failure, match="nothing is left"):
        run_abandoned(how)


@pytest.mark.parametrize("seed", [8, 24])  # in the second one several requests wait for a node
def test_seed_is_deterministic(seed):
    assert run_seed(seed, is_traced=True).trace == run_seed(seed, is_traced=True).trace


def test_real_sockets_are_rejected():
    with simulated(), pytest.raises(AssertionError, match="a real socket"):
        zmq.Context()


def test_deadlock_raises_stuck():
    async def wait_for_ever(loop):
        await asyncio.Event().wait()

    with pytest.raises(Stuck):
        run_in_virtual_time(wait_for_ever)


def test_virtual_time_passes_without_waiting():
    async def sleep(loop):
        await asyncio.sleep(3600)
        return loop.time()

    assert run_in_virtual_time(sleep) == 3600
