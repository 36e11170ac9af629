"""What ranks of a node send each other arrives as it was."""

import os
import socket
import subprocess
import sys
from multiprocessing import Pipe

import numpy as np
import pytest

from tandem.engine.config import EngineConfig
from tandem.engine.forward import ForwardInputs
from tandem.kvtransfer.events import Failed, Lost, Released
from tandem.node import ranks
from tandem.node.config import NodeConfig
from tandem.node.ranks import RankProcess, received
from tandem.node.transfer import RemoteAgent
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


def test_a_rank_that_reads_nothing_does_not_hold_up_its_end(monkeypatch, tmp_path):
    popen, command = subprocess.Popen, [sys.executable, "-c", "import time; time.sleep(1000)"]
    monkeypatch.setattr(subprocess, "Popen", lambda _command, **options: popen(command, **options))
    monkeypatch.setattr(ranks, "STOP_TIMEOUT_S", 0.1)
    ended = []
    config = NodeConfig(role="decode", engine=EngineConfig(model_dir="", tp_size=2, tp_rank=1))
    rank = RankProcess(config, tmp_path / "store", lambda: None, ended.append)
    with socket.socket(fileno=os.dup(rank._link.fileno())) as link, pytest.raises(BlockingIOError):
        while True:
            link.send(bytes(1 << 16), socket.MSG_DONTWAIT)
    for _ in range(2):
        rank.hang_up()
        rank.join()
    assert ended == []
