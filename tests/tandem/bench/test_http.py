"""Connections against a server that does what a test scripted."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from tandem.bench.answer import Answer, Broken, Tally
from tandem.bench.http import Address, Connections

EVENTS = (
    b'data: {"meta_info": {"prompt_tokens": 4, "completion_tokens": 2, "finish_reason": "length"}}'
    b"\n\ndata: [DONE]\n\n"
)
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(EVENTS), EVENTS)

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Scripted:
    """Runs the next script for each connection; `heads` are of the requests that came."""

    def __init__(self, *scripts: Script) -> None:
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.num_connections = 0
        self.is_asked = asyncio.Event()
        self.scripts = list(scripts)
        self.handlers: list[asyncio.Task | None] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.handlers.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self.scripts.pop(0)(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def request(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        self.heads.append(head)
        self.bodies.append(await reader.readexactly(int(size.split(b":")[1])))
        self.is_asked.set()

    def answering(self, *answers: bytes) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for answer in answers:
                await self.request(reader)
                writer.write(answer)
                await writer.drain()

        return script

    async def silent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.request(reader)
        await reader.read()


@contextlib.asynccontextmanager
async def connections(scripted: Scripted, timeout_s: float = 60.0, key: str = ""):
    server = await asyncio.start_server(scripted, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        held = Connections(Address.of(f"http://127.0.0.1:{port}/generate", key), timeout_s)
        yield held
        held.close()
        await asyncio.gather(*scripted.handlers)


async def post(held: Connections, body: bytes = b"{}") -> Answer:
    answer = Answer("native", 0.0, Tally())
    await held.post(body, answer)
    return answer


async def test_a_connection_is_used_again():
    scripted = Scripted()
    scripted.scripts.append(scripted.answering(WHOLE, WHOLE))
    async with connections(scripted, key="secret") as held:
        answers = [await post(held, b'{"a": 1}'), await post(held, b'{"a": 23}')]
    assert [answer.output_tokens for answer in answers] == [2, 2]
    assert scripted.num_connections == 1
    assert scripted.bodies == [b'{"a": 1}', b'{"a": 23}']
    assert scripted.heads[0].startswith(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization: Bearer secret\r\n" in scripted.heads[0]


async def test_a_connection_is_used_again_after_a_refusal():
    scripted = Scripted()
    refusal = b"HTTP/1.1 429 x\r\nContent-Length: 0\r\n\r\n"
    scripted.scripts.append(scripted.answering(refusal, WHOLE))
    async with connections(scripted) as held:
        with pytest.raises(Broken):
            await post(held)
        await post(held)
    assert scripted.num_connections == 1


async def test_requests_at_once_have_connections_of_their_own_without_a_limit():
    scripted = Scripted()
    everyone = asyncio.Barrier(150)

    async def script(reader, writer) -> None:
        await scripted.request(reader)
        await everyone.wait()
        writer.write(WHOLE)

    scripted.scripts = [script] * 150
    async with connections(scripted) as held:
        await asyncio.gather(*(post(held) for _ in range(150)))
    assert scripted.num_connections == 150


async def test_a_connection_that_had_been_closed_meanwhile_is_replaced():
    scripted = Scripted()

    async def closing(reader, writer) -> None:
        await scripted.answering(WHOLE)(reader, writer)
        await reader.read(1)  # the next request, which is not answered

    scripted.scripts = [closing, scripted.answering(WHOLE)]
    async with connections(scripted) as held:
        await post(held)
        assert (await post(held)).output_tokens == 2
    assert scripted.num_connections == 2


async def test_a_server_that_asks_for_the_connection_to_be_closed_has_its_way():
    closing = WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    unmeasured = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + EVENTS
    scripted = Scripted()
    scripted.scripts = [scripted.answering(closing), scripted.answering(unmeasured)]
    async with connections(scripted) as held:
        assert [(await post(held)).output_tokens for _ in range(2)] == [2, 2]
    assert scripted.num_connections == 2


REFUSAL = b'{"error": {"message": "the queue is full"}}'
CUT = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n"


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        (b"HTTP/1.1 429 x\r\nContent-Length: 43\r\n\r\n" + REFUSAL, "HTTP 429", "queue is full"),
        (b"HTTP/1.1 500 x\r\nContent-Length: 4\r\n\r\noops", "HTTP 500", "oops"),
        (CUT, "disconnected", "closed the connection"),
        (b"", "disconnected", "closed the connection"),
        (b"220 smtp.example.com\r\n", "bad HTTP", "HTTP"),
    ],
)
async def test_what_goes_wrong_is_told_by_its_kind(answer, kind, told):
    scripted = Scripted()
    scripted.scripts.append(scripted.answering(answer))
    async with connections(scripted) as held:
        with pytest.raises(Broken, match=told) as raised:
            await post(held)
    assert raised.value.kind == kind


async def test_a_server_that_says_nothing_is_given_up():
    scripted = Scripted()
    scripted.scripts.append(scripted.silent)
    # To connect it has as long, by the real clock; what is silent is told the time.
    async with connections(scripted, timeout_s=600.0) as held:
        asking = asyncio.create_task(post(held))
        await scripted.is_asked.wait()
        held.fail_silent(599.0)
        assert not asking.done()
        held.fail_silent(600.1)
        with pytest.raises(Broken, match="nothing came for 600 s"):
            await asking


async def test_a_port_where_nobody_listens_is_refused():
    scripted = Scripted()
    async with connections(scripted) as held:
        pass
    with pytest.raises(Broken) as raised:
        await post(held)
    assert raised.value.kind == "refused"
