"""What ranks of a node send each other arrives as it was."""

from multiprocessing import Pipe

import numpy as np
import pytest

from tandem.engine.forward import ForwardInputs
from tandem.kvtransfer.events import Failed, Granted, Landed, Lost, PushDone, Released, Safe
from tandem.node.ranks import RemoteAgent, received
from tandem.wire.errors import OutOfPages, PeerLost, error_from_info
from tandem.wire.generation import Room
from tests.engine.test_tensor_parallel import inputs_of

ROOM = Room(1 << 62)


def over_the_pipe(*messages):
    one, other = Pipe()
    for message in messages:
        one.send(message)
    one.close()
    arrived = list(received(other))
    other.close()
    return arrived


@pytest.mark.parametrize(
    "event", [Granted(ROOM, 16), PushDone(ROOM, 1 << 40), Landed(ROOM, 5, 1 << 62, 8), Safe(ROOM)]
)
def test_an_event_arrives_as_it_was(event):
    assert over_the_pipe(event, event) == [event, event]


@pytest.mark.parametrize("kind", [Failed, Lost, Released])
@pytest.mark.parametrize("error", [PeerLost("x"), OutOfPages(5, 3)])
def test_errors_keep_their_kind_and_words(kind, error):
    (arrived,) = over_the_pipe(kind(ROOM, error))
    assert type(arrived) is kind
    assert type(arrived.error) is type(error)
    assert arrived.error.info() == error.info()
    # As does one that came from another node.
    (again,) = over_the_pipe(kind(ROOM, error_from_info(error.info())))
    assert again.error.info() == error.info()


def test_a_forward_arrives_as_it_was():
    inputs = inputs_of([5, 9, 7], [-1, 0, 1])
    (arrived,) = over_the_pipe(inputs)
    for name in ForwardInputs.__slots__:
        here, there = getattr(inputs, name), getattr(arrived, name)
        assert np.array_equal(here, there), name
        assert getattr(here, "dtype", None) == getattr(there, "dtype", None), name


def test_what_follows_an_order_to_end_is_not_heard():
    assert over_the_pipe(1, None, 2) == [1]


class NotedRank:
    def __init__(self):
        self.calls = []

    def call(self, *call, **options):
        self.calls.append((*call, options))


def test_a_command_of_the_group_is_a_call_at_the_rank():
    rank = NotedRank()
    agent = RemoteAgent(rank)
    agent.finish(ROOM, 5, 9, cached_tokens=8)
    agent.push_by_layer([])(3)
    assert rank.calls == [
        ("agent", "finish", ROOM, 5, 9, {"cached_tokens": 8}),
        ("rank", "push_by_layer", [], {}),
    ]
