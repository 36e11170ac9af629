"""Clients that send too much, too slowly, or what is no HTTP, while others are served."""

import asyncio
import itertools
import json
import select
import socket

import pytest

from tandem.frontend.options import FrontendOptions, HttpOptions
from tests.frontend.conftest import serve
from tests.frontend.fakes import FakeBackend, length, say
from tests.frontend.helpers import post
from tests.frontend.raw import chunk, connected, head, request
from tests.patience import PATIENCE_S

GOOD = {"input_ids": [5, 6], "max_new_tokens": 2}
CLOSE = "Connection: close"
CHUNKED = "Transfer-Encoding: chunked"
SMALL = FrontendOptions(http=HttpOptions(max_body_bytes=1000))
HURRIED = FrontendOptions(idle_timeout_s=0.3)
MILLION = 1_000_000


async def is_served(client) -> bool:
    return (await post(client, "/generate", GOOD))[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        head("GET", "/health", "X-Long: " + "a" * MILLION),
        head("GET", "/health", *[f"X-{index}: a" for index in range(50_000)]),
        head("GET", "/" + "a" * MILLION),
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: \x00\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"BREW /generate HTTP/1.1\r\nHost: x\r\n\r\n",
        head("POST", "/generate", "Content-Length: -3"),
        head("POST", "/generate", "Content-Length: 3", "Content-Length: 4"),
        head("POST", "/generate", "Content-Length: 3", CHUNKED) + chunk(b"{}"),
        head("POST", "/generate", CHUNKED) + b"zz\r\n",
    ],
)
async def test_what_is_no_http_is_answered_with_400_and_closed(client, sent):
    async with asyncio.timeout(PATIENCE_S), connected(client) as bad:
        await bad.send(sent)
        assert (await bad.reply()).status == 400
        assert await bad.closed()
        assert await is_served(client)


async def test_an_idle_connection_is_closed_also_after_an_answer(backend):
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, HURRIED) as client,
        connected(client) as silent,
        connected(client, head("GET", "/health")) as used,
    ):
        assert (await used.reply()).status == 200
        assert await used.closed()
        assert await silent.closed()


async def test_pipelined_requests_are_answered_in_order_whatever_they_are(client):
    sent = [
        request("/generate", GOOD | {"stream": True}),
        head("GET", "/health"),
        request("/generate", {"n": "many"}),
        head("GET", "/nowhere"),
        request("/generate", GOOD, CLOSE),
    ]
    async with asyncio.timeout(PATIENCE_S), connected(client) as eager:
        await eager.send(b"".join(sent))
        replies = [await eager.reply() for _ in sent]
        assert await eager.closed()
    assert [reply.status for reply in replies] == [200, 200, 400, 404, 200]
    assert replies[0].body.endswith(b"data: [DONE]\n\n")
    assert replies[1].json()["status"] == "ok"
    assert replies[4].json()["output_ids"] == [5, 6]


async def test_a_client_that_waits_for_100_is_told_to_go_on(client):
    body = json.dumps(GOOD).encode()
    expecting = f"Content-Length: {len(body)}", "Expect: 100-continue"
    async with asyncio.timeout(PATIENCE_S), connected(client) as careful:
        await careful.send(head("POST", "/generate", *expecting))
        assert (await careful.reply()).status == 100
        await careful.send(body)
        assert (await careful.reply()).status == 200


async def test_a_client_that_shut_its_sending_side_does_not_keep_a_generation_running(
    client, backend
):
    backend.script = say([5], asyncio.Event())
    async with asyncio.timeout(PATIENCE_S), connected(client) as half:
        await half.send(request("/generate", GOOD))
        await backend.until(lambda: backend.aborts)
        half.writer.write_eof()
        assert await half.closed()
        await backend.until(lambda: backend.cancelled)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_takes_a_byte_at_a_time_is_cut_off(tokenizer, is_stream):
    backend = FakeBackend(tokenizer, context_length=10 * MILLION)
    backend.script = lambda _: itertools.chain(itertools.repeat([5] * 8000, 200), [length(6)])
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        options = FrontendOptions(stall_timeout_s=0.3)
        async with asyncio.timeout(PATIENCE_S), serve(backend, options) as client:
            slow.connect((client._base_url.host, client._base_url.port))
            slow.sendall(request("/generate", {"input_ids": [5], "stream": is_stream}))
            cut_off = select.poll()
            cut_off.register(slow, 0)  # nothing but a reset
            while not cut_off.poll(0):
                assert (await post(client, "/generate", {}))[0] == 400
                if select.select([slow], [], [], 0)[0]:
                    slow.recv(1)


async def test_many_idle_and_half_sent_connections_leave_others_served(client):
    async with asyncio.timeout(PATIENCE_S):
        opened = await asyncio.gather(*(open_half_sent(client, index) for index in range(300)))
        assert await is_served(client)
        for writer in opened:
            writer.transport.abort()


async def open_half_sent(client, index: int) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection(client._base_url.host, client._base_url.port)
    writer.write([b"", b"GET /health HT", head("POST", "/generate", CHUNKED) + b"5"][index % 3])
    return writer


async def test_a_head_that_never_ends_is_cut_off(backend):
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, HURRIED) as client,
        connected(client, b"GET /health HTTP/1.1\r\nHost: x\r\nX: ") as slow,
    ):
        closed = asyncio.create_task(slow.closed())
        while not closed.done():
            await slow.send(b"a")
            async with connected(client, request("/generate", GOOD)) as other:
                assert (await other.reply()).status == 200
        assert await closed
