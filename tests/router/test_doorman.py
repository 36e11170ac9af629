"""Who is given a connection, with doors and clients of one process."""

import asyncio
import math
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from tandem.frontend import server
from tandem.frontend.app import create_app
from tandem.frontend.options import FrontendOptions, HttpOptions, TlsFiles
from tandem.frontend.server import listen
from tandem.router.control import Status
from tandem.router.doorman import STUCK_AFTER_S, Candidate, Door, Doorman, least_loaded
from tests.certificates import make_certificates
from tests.frontend.fakes import FakeBackend
from tests.patience import PATIENCE_S
from tests.router.fake_node import until


def busy(
    num_handed=0, *, closed=0, streams=0, turn=0, is_stuck=False, is_serving=True
) -> Candidate:
    status = Status(
        is_open=True,
        is_serving=is_serving,
        num_received=num_handed,
        num_closed=closed,
        num_streams=streams,
    )
    return Candidate(status, num_handed, turn, is_stuck)


CLOSED = Candidate(Status())


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        pytest.param([busy(3), busy(2), busy(4)], 1, id="fewest connections"),
        pytest.param([busy(9, closed=8), busy(2)], 0, id="closed ones do not count"),
        pytest.param([busy(1, streams=64), busy(9, streams=9)], 1, id="a batch counts its streams"),
        pytest.param([busy(5, streams=5), busy(5, streams=1)], 1, id="equal: fewer streams"),
        pytest.param([busy(1, turn=4), busy(1, turn=2), busy(1, turn=3)], 1, id="equal: by turns"),
        pytest.param([CLOSED, busy(7)], 1, id="only who is open"),
        pytest.param([busy(0, is_serving=False), busy(7)], 1, id="who met no nodes refuses"),
        pytest.param([busy(3, is_serving=False), CLOSED], 0, id="unless nobody met any"),
        pytest.param([busy(0, is_stuck=True), busy(7)], 1, id="stuck is passed over"),
        pytest.param([busy(3, is_stuck=True), CLOSED], 0, id="unless all are stuck"),
        pytest.param([CLOSED, CLOSED], None, id="nobody is open"),
    ],
)
def test_the_least_loaded_worker_is_chosen(candidates, chosen):
    assert least_loaded(candidates) == chosen


class Idle:
    is_serving = True
    num_streams = 0


class Known:
    """A worker as its parent knows it."""

    def __init__(self) -> None:
        self.status = Status()

    def report(self, status: Status) -> None:
        self.status = status


class Workers:
    """A doorman and the workers that a test starts, each answering with its index."""

    def __init__(self, sock) -> None:
        self.known, self._address = [Known(), Known()], sock.getsockname()
        self.now = 0.0
        self.tls: TlsFiles | None = None
        self.stall_timeout_s = 60.0
        self.doorman = Doorman(sock, self.known, clock=lambda: self.now)
        self._writers = []

    @asynccontextmanager
    async def working(self, *indices: int):
        async with AsyncExitStack() as stack:
            for index in indices:
                door = Door(self.door_of(index), Idle(), self.known[index].report)
                await stack.enter_async_context(door.serving(self._app(index), 0.1))
            yield

    def door_of(self, index: int):
        # The doors are ends of this process: a worker process would inherit them.
        return self.doorman._doorways[index].workers

    def _app(self, index: int) -> web.Application:
        async def answer(_request: web.Request) -> web.Response:
            return web.Response(text=str(index))

        http = HttpOptions(tls=self.tls)
        options = FrontendOptions(http=http, stall_timeout_s=self.stall_timeout_s)
        app = create_app(FakeBackend(None), options)
        app.router.add_get("/", answer)
        return app

    async def connect(self):
        client = await asyncio.open_connection(*self._address)
        self._writers.append(client[1])
        return client

    async def ask(self, client) -> int:
        """Return which worker answers on a connection."""
        reader, writer = client
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            return int(await reader.readexactly(1))

    async def who_answers(self, num_clients: int) -> list[int]:
        """Return who answers on so many connections, opened at once and kept."""
        clients = await asyncio.gather(*(self.connect() for _ in range(num_clients)))
        answers = await asyncio.gather(*(self.ask(client) for client in clients))
        return sorted(answers)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self.doorman.close()


@pytest.fixture
async def workers():
    with listen("127.0.0.1", 0) as sock:
        made = Workers(sock)
        made.doorman.open()
        yield made
        made.close()


async def test_connections_opened_at_once_are_spread_evenly(workers):
    async with workers.working(0, 1):
        assert await workers.who_answers(40) == [0] * 20 + [1] * 20


async def test_connections_that_closed_make_room_for_others(workers):
    async with workers.working(0, 1):
        clients = [await workers.connect() for _ in range(6)]
        owners = [await workers.ask(client) for client in clients]
        for owner, (_, writer) in zip(owners, clients, strict=True):
            if owner == 0:
                writer.close()
        await until(lambda: workers.known[0].status.num_connections == 0)
        assert await workers.who_answers(3) == [0, 0, 0]


async def test_a_connection_waits_until_a_worker_is_open(workers):
    asking = asyncio.ensure_future(workers.who_answers(1))
    await until(lambda: workers.doorman._resuming is not None)
    async with workers.working(1):
        assert await asking == [1]


async def test_what_waits_for_a_worker_that_died_goes_to_another(workers):
    workers.known[0].report(
        Status(is_open=True, is_serving=True)
    )  # it took nothing from its door yet
    asking = asyncio.ensure_future(workers.who_answers(100))  # more than are handed in one turn
    await until(lambda: workers.doorman._doorways[0].turn == 100)
    async with workers.working(1):
        workers.known[0].report(Status())
        workers.doorman.worker_gone(0)
        assert await asking == [1] * 100


async def test_a_worker_that_takes_nothing_is_passed_over(workers):
    workers.known[0].report(Status(is_open=True, is_serving=True))
    await workers.connect()
    await until(lambda: workers.doorman._doorways[0].turn)
    workers.now += STUCK_AFTER_S + 0.1
    async with workers.working(1):
        assert await workers.who_answers(5) == [1] * 5


async def test_a_full_door_holds_connections_back_and_loses_none(workers):
    workers.known[0].report(Status(is_open=True, is_serving=True))
    asking = asyncio.ensure_future(workers.who_answers(400))
    # A door holds fewer: the doorman waits, and tries again.
    await until(lambda: workers.doorman._resuming is not None)
    async with workers.working(0):
        assert await asking == [0] * 400


async def test_a_status_has_what_its_worker_has(workers):
    async with workers.working(0, 1):
        await workers.who_answers(6)
        await until(lambda: [one.status.num_connections for one in workers.known] == [3, 3])
        assert all(one.status.is_open for one in workers.known)
    assert not any(one.status.is_open for one in workers.known)


async def test_a_client_that_never_says_hello_does_not_hold_up_the_end(
    workers, tmp_path, monkeypatch
):
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 10 * PATIENCE_S)
    files = make_certificates(tmp_path)
    workers.tls = TlsFiles(files.cert, files.key)
    async with asyncio.timeout(PATIENCE_S):
        async with workers.working(0):
            reader, _ = await workers.connect()
            await until(lambda: workers.known[0].status.num_connections == 1)
        assert await reader.read() == b""


async def test_a_connection_that_cannot_be_served_is_closed_and_its_worker_goes_on(workers):
    workers.stall_timeout_s = math.nan  # which no socket takes, and which is no OSError
    with capture_logs() as logs:
        async with asyncio.timeout(PATIENCE_S), workers.working(0):
            for number in (1, 2):
                reader, _ = await workers.connect()
                assert await reader.read() == b""
                await until(lambda: workers.known[0].status.num_closed == number)  # noqa: B023
            assert workers.known[0].status.is_open
    assert [log["event"] for log in logs] == ["edge_worker.connection_failed"] * 2
