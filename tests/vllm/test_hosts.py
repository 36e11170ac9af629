import contextlib
import socket
import threading

import pytest

from tandem.vllm import hosts
from tandem.vllm.hosts import join_hosts
from tandem.wire.errors import ConfigInvalid, EngineFailed
from tests.patience import PATIENCE_S

HOST, OTHER = "127.0.0.1", "127.0.0.2"


class Played:
    """The other ranks of a node: plays what they gather, and their connections."""

    def __init__(self) -> None:
        self.lost = threading.Event()
        self.own: tuple[str, int, bytes, str] | None = None

    def join(self, index, *others):
        def gather(own):
            self.own = own
            return [*others[:index], own, *others[index:]]

        return join_hosts(HOST, index, "same", gather, self.lost.set)

    def connect(self, token):
        _, port, *_ = self.own
        connection = socket.create_connection((HOST, port))
        connection.sendall(token)
        return connection


@pytest.fixture
def played():
    return Played()


def test_ranks_learn_the_host_of_each_rank(played):
    assert played.join(0, (HOST, 0, b"", "same"), (OTHER, 0, b"", "same")) == [HOST, HOST, OTHER]


def test_hosts_with_different_settings_do_not_join_and_end_with_each_other(played):
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigInvalid, match="have different models or flags"):
            played.join(1, (HOST, port, b"token", "other"))
        connection, _ = server.accept()
        connection.close()
    assert played.lost.wait(PATIENCE_S)


def test_first_rank_notices_the_end_of_any_other(played):
    played.join(0, (HOST, 0, b"", "same"), (OTHER, 0, b"", "same"))
    _, _, token, _ = played.own
    with played.connect(token), played.connect(token) as second:
        assert not played.lost.is_set()
        second.close()
        assert played.lost.wait(PATIENCE_S)


def test_connection_without_the_token_is_no_rank(played):
    played.join(0, (OTHER, 0, b"", "same"))
    _, _, token, _ = played.own
    with played.connect(bytes(len(token))) as foreign:
        assert foreign.recv(1) == b""
    with played.connect(token) as rank:
        assert not played.lost.is_set()
        rank.close()
        assert played.lost.wait(PATIENCE_S)


def test_silent_connections_do_not_keep_ranks_out(played):
    played.join(0, (OTHER, 0, b"", "same"))
    _, _, token, _ = played.own
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(played.connect(b""))
        with played.connect(token) as rank:
            assert not played.lost.is_set()
            rank.close()
            assert played.lost.wait(PATIENCE_S)


def test_rank_that_never_connects_is_lost(played, monkeypatch):
    monkeypatch.setattr(hosts, "JOIN_S", 0.05)
    played.join(0, (OTHER, 0, b"", "same"))
    assert played.lost.wait(PATIENCE_S)


def test_other_rank_notices_the_end_of_the_first(played):
    with socket.create_server((HOST, 0)) as server:
        played.join(1, (HOST, server.getsockname()[1], b"token", "same"))
        connection, _ = server.accept()
        with connection:
            assert connection.recv(5) == b"token"
            assert not played.lost.is_set()
        assert played.lost.wait(PATIENCE_S)


def test_unreachable_first_rank_fails_the_start_with_a_remedy(played):
    with socket.socket() as closed:
        closed.bind((HOST, 0))
        with pytest.raises(EngineFailed, match="set --host"):
            played.join(1, (HOST, closed.getsockname()[1], b"token", "same"))
