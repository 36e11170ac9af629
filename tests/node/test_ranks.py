"""Messages between the ranks of a node."""

import os
import socket
import subprocess
import sys
from multiprocessing import Pipe

import numpy as np
import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.scheduling.forward import ForwardInputs
from tandem.kvtransfer.events import RoomFailed, RoomLost, RoomReleased
from tandem.node.config import NodeConfig
from tandem.node.ranks import ranks
from tandem.node.ranks.ranks import RankProcess, Ranks, messages_of
from tandem.node.ranks.transfer import RemoteAgent
from tandem.wire.errors import EngineFailed, OutOfPages, PeerLost, error_from_info
from tandem.wire.generation import Room
from tests.engine.test_tensor_parallel import inputs_of

ROOM = Room(1 << 62)


def over_the_pipe(*messages):
    one, other = Pipe()
    for message in messages:
        one.send(message)
    one.close()
    arrived = list(messages_of(other))
    other.close()
    return arrived


@pytest.mark.parametrize("kind", [RoomFailed, RoomLost, RoomReleased])
@pytest.mark.parametrize("error", [PeerLost("x"), OutOfPages(5, 3)])
def test_errors_keep_type_and_message(kind, error):
    (arrived,) = over_the_pipe(kind(ROOM, error))
    assert type(arrived) is kind
    assert type(arrived.error) is type(error)
    assert arrived.error.info() == error.info()
    # Also an error that was received from a different node.
    (again,) = over_the_pipe(kind(ROOM, error_from_info(error.info())))
    assert again.error.info() == error.info()


def test_forward_inputs_survive_the_pipe():
    inputs = inputs_of([5, 9, 7], [-1, 0, 1])
    (arrived,) = over_the_pipe(inputs)
    for name in ForwardInputs.__slots__:
        here, there = getattr(inputs, name), getattr(arrived, name)
        assert np.array_equal(here, there), name
        assert getattr(here, "dtype", None) == getattr(there, "dtype", None), name


class NotedRank:
    def __init__(self):
        self.calls = []

    def call(self, *call, **options):
        self.calls.append((*call, options))


def test_group_command_is_a_call_on_the_rank():
    rank = NotedRank()
    agent = RemoteAgent(rank)
    agent.finish(ROOM, 5, 9, cached_tokens=8)
    agent.push_by_layer([])(3)
    assert rank.calls == [
        ("agent", "finish", ROOM, 5, 9, {"cached_tokens": 8}),
        ("rank", "push_by_layer", [], {}),
    ]


@pytest.fixture
def hung_ranks(monkeypatch):
    """Make ranks hang at their start."""
    popen, command = subprocess.Popen, [sys.executable, "-c", "import time; time.sleep(1000)"]
    monkeypatch.setattr(subprocess, "Popen", lambda _command, **options: popen(command, **options))
    monkeypatch.setattr(ranks, "STOP_TIMEOUT_S", 0.1)


@pytest.mark.usefixtures("hung_ranks")
def test_node_does_not_wait_forever_for_a_rank_that_hangs_at_its_start():
    ended = []
    config = NodeConfig(role="decode", engine=EngineConfig(model_dir="/model", tp_size=3))
    others = Ranks(config, lambda: None, ended.append)
    try:
        others.others[0].is_ready.set()
        with pytest.raises(EngineFailed, match="rank 2 was not ready 0 s after rank 0"):
            others.wait_ready(timeout_s=0)
    finally:
        others.close()
    assert ended == []


@pytest.mark.usefixtures("hung_ranks")
def test_rank_that_reads_nothing_can_be_ended(tmp_path):
    ended = []
    config = NodeConfig(
        role="decode", engine=EngineConfig(model_dir="/model", tp_size=2, tp_rank=1)
    )
    rank = RankProcess(config, tmp_path / "store", lambda: None, ended.append)
    with socket.socket(fileno=os.dup(rank._link.fileno())) as link, pytest.raises(BlockingIOError):
        while True:
            link.send(bytes(1 << 16), socket.MSG_DONTWAIT)
    for _ in range(2):
        rank.hang_up()
        rank.join()
    assert ended == []
