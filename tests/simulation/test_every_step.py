"""One request, and a fault at every step of its life: its client gets each token once, and no error.

The steps are every message and its arrival, every forward and every begin and end of a write. The fault
hits the node that the request was started on, for longer than it takes to notice.
"""

import functools

import pytest

from tests.simulation.scenarios import BLOWS, Blow, num_small_steps, run_blow


@functools.cache
def num_steps() -> int:
    return num_small_steps()


@pytest.mark.parametrize("target", ["prefill", "decode"])
@pytest.mark.parametrize("kind", BLOWS)
def test_a_client_does_not_notice(kind, target):
    worlds = [run_blow(Blow(kind, target, step)) for step in range(1, num_steps() + 1)]
    # Until decode has all pages, the loss of either costs an attempt.
    assert sum(world.replays for world in worlds) > len(worlds) / 3
