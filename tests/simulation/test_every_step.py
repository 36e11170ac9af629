"""One request, and a fault at every step of its life: its client gets each token once, and no error.

The steps are every message and its arrival, every forward and every begin and end of a write. The fault
hits the node that the request was started on, for longer than it takes to notice. What is ordered (to hand
requests over, to be removed at once) uses up no attempt. Each kind is tried here at every third step;
`python -m tests.simulation --every-step` leaves none out.
"""

import functools

import pytest

from tests.simulation.mutants import OF_BLOWS
from tests.simulation.scenarios import BLOWS, Blow, Failure, num_small_steps, run_blow


@functools.cache
def steps(is_local=False):
    return range(1, num_small_steps(is_local=is_local) + 1)


@pytest.mark.parametrize("target", ["prefill", "decode"])
@pytest.mark.parametrize("kind", BLOWS)
def test_client_does_not_notice_a_fault_at_any_step(kind, target):
    some = steps()[BLOWS.index(kind) % 3 :: 3]
    worlds = [run_blow(Blow(kind, target, step)) for step in some]
    # Until decode has all pages, the loss of either costs an attempt.
    assert sum(world.replays for world in worlds) > len(worlds) / 3


@pytest.mark.parametrize("kind", ["kill", "hand over", "remove"])
def test_client_of_decode_alone_does_not_notice_a_fault_at_any_step(kind):
    worlds = [run_blow(Blow(kind, "decode", step, is_local=True)) for step in steps(is_local=True)]
    assert sum(world.num_local for world in worlds) > len(worlds)
    assert sum(world.replays for world in worlds) > len(worlds) / 3


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("hand over", "a hand-over uses up an attempt"),
        ("hand over", "decode that drains forgets prompts of its own"),
        ("remove", "a removal at once looks like a death"),
    ],
)
def test_hand_over_that_loses_the_request_is_caught(kind, name):
    with OF_BLOWS[name], pytest.raises(Failure):
        for step in steps(is_local=True):
            run_blow(Blow(kind, "decode", step, is_local=True))
