"""Several workers accept from one socket: here in one process, on one loop."""

import asyncio
import math
import socket
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tandem.frontend.http.server import listen
from tandem.router.workers import accepting
from tandem.router.workers.accepting import AWAY, Acceptor, OpenConnections
from tests.patience import until_async


class Server:
    """Counts connections as aiohttp's server does."""

    def __init__(self) -> None:
        self.connections: list[asyncio.Protocol] = []

    def __call__(self) -> asyncio.Protocol:
        server = self

        class Connection(asyncio.Protocol):
            def connection_made(self, transport) -> None:
                server.connections.append(self)
                self.transport = transport

            def connection_lost(self, _error) -> None:
                server.connections.remove(self)

        return Connection()


@asynccontextmanager
async def pool(tmp_path, num_running: int, num_workers: int = 2):
    """Yield the socket, the servers of those workers that run, and what all share; the others are stopped."""
    shared = OpenConnections(str(tmp_path), num_workers)
    servers = [Server() for _ in range(num_running)]
    for index in range(num_workers):
        shared.publish(index, 0)
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(listen("127.0.0.1", 0))
        for index, server in enumerate(servers):
            inherited = stack.enter_context(sock.dup())
            acceptor = Acceptor(shared, index)
            await stack.enter_async_context(acceptor.accepting(server, inherited, None))
        yield sock, servers, shared
        for connection in [each for server in servers for each in server.connections]:
            connection.transport.close()
        await until_async(lambda: not any(server.connections for server in servers))


def connect(stack: AsyncExitStack, sock: socket.socket, count: int) -> list[socket.socket]:
    """Connect a burst of clients before any worker runs."""
    return [stack.enter_context(socket.create_connection(sock.getsockname())) for _ in range(count)]


def num_open(servers) -> list[int]:
    return [len(server.connections) for server in servers]


@pytest.mark.parametrize(("count", "most_apart"), [(6, 0), (7, 1), (300, 40)])
async def test_connection_burst_is_balanced_over_workers(monkeypatch, tmp_path, count, most_apart):
    monkeypatch.setattr(accepting, "YIELD_S", math.inf)
    async with pool(tmp_path, 2) as (sock, servers, _), AsyncExitStack() as clients:
        connect(clients, sock, count)
        await until_async(lambda: sum(num_open(servers)) == count)
        assert abs(len(servers[0].connections) - len(servers[1].connections)) <= most_apart


async def test_worker_with_closed_connections_accepts_the_next_ones(monkeypatch, tmp_path):
    monkeypatch.setattr(accepting, "YIELD_S", math.inf)
    async with pool(tmp_path, 2) as (sock, servers, _), AsyncExitStack() as clients:
        connect(clients, sock, 8)
        await until_async(lambda: num_open(servers) == [4, 4])
        for connection in servers[1].connections:
            connection.transport.close()
        await until_async(lambda: num_open(servers) == [4, 0])
        connect(clients, sock, 4)
        await until_async(lambda: sum(num_open(servers)) == 8)
        # One of them may go to the other worker, if that wakes first: this one counts anew when it wakes.
        assert num_open(servers)[1] >= 3


async def test_stopped_worker_only_delays_the_others(tmp_path):
    async with pool(tmp_path, 1) as (sock, servers, _), AsyncExitStack() as clients:
        connect(clients, sock, 20)
        await until_async(lambda: num_open(servers) == [20])


async def test_workers_do_not_yield_to_an_exited_worker(monkeypatch, tmp_path):
    monkeypatch.setattr(accepting, "YIELD_S", math.inf)
    async with pool(tmp_path, 1) as (sock, servers, shared), AsyncExitStack() as clients:
        shared.publish(1, AWAY)
        connect(clients, sock, 20)
        await until_async(lambda: num_open(servers) == [20])


async def test_leaving_worker_closes_its_socket_and_leaves_the_backlog_to_others(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(accepting, "YIELD_S", math.inf)
    shared = OpenConnections(str(tmp_path), 2)
    shared.publish(1, 0)
    with listen("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()):
        inherited = sock.dup()
        async with Acceptor(shared, 0).accepting(Server(), inherited, None):
            shared.publish(0, 5)
        assert shared.others(1) == [AWAY]
        assert inherited.fileno() == -1, "the kernel refuses clients once no process listens"
        sock.accept()[0].close()


async def test_worker_out_of_file_descriptors_retries_accept(monkeypatch, tmp_path):
    accept, failures = Acceptor._accept_one, iter([OSError(24, "Too many open files")])

    def failing(self):
        for error in failures:
            raise error
        return accept(self)

    monkeypatch.setattr(Acceptor, "_accept_one", failing)
    monkeypatch.setattr(accepting, "PAUSE_S", 0.0)
    async with pool(tmp_path, 2) as (sock, servers, _), AsyncExitStack() as clients:
        connect(clients, sock, 2)
        await until_async(lambda: sum(num_open(servers)) == 2)
