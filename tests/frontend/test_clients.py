"""Clients that go away, read slowly, or do not read at all."""

import asyncio
import itertools
import json
import socket
from contextlib import asynccontextmanager

import pytest

from tandem.frontend.options import FrontendOptions
from tandem.frontend.server import listen
from tandem.wire.errors import ConfigInvalid
from tests.frontend.conftest import serve
from tests.frontend.fakes import length, say
from tests.frontend.helpers import post
from tests.patience import PATIENCE_S

PROMPT = {"text": "a"}
END = [length(6)]


@asynccontextmanager
async def raw_request(client, path: str, body: dict):
    """A client of bare sockets with the smallest receive buffer; it reads only when asked to."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    address = (client._base_url.host, client._base_url.port)
    await asyncio.get_running_loop().sock_connect(sock, address)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    await asyncio.get_running_loop().sock_sendall(sock, head + data)
    with sock:
        yield sock


async def read_until(sock: socket.socket, end: bytes) -> bytes:
    seen = b""
    while end not in seen:
        part = await asyncio.get_running_loop().sock_recv(sock, 65536)
        assert part, "the server closed"
        seen += part
    return seen


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", PROMPT),
        ("/generate", PROMPT | {"n": 3}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_a_client_that_goes_away_before_the_first_token_cancels(
    client, backend, path, body, is_stream
):
    backend.script = say(asyncio.Event())
    count = body.get("n", 1)
    async with asyncio.timeout(PATIENCE_S):
        async with raw_request(client, path, body | {"stream": is_stream}):
            await backend.until(lambda: len(backend.aborts) == count)
        await backend.until(lambda: len(backend.cancelled) == count)


async def test_a_client_that_goes_away_in_a_stream_cancels(client, backend):
    backend.script = say([5], asyncio.Event())
    async with asyncio.timeout(PATIENCE_S):
        async with raw_request(client, "/generate", PROMPT | {"stream": True}) as sock:
            await read_until(sock, b"data: ")
        await backend.until(lambda: backend.cancelled)


async def test_a_client_that_does_not_read_is_cut_off_and_others_are_served(backend):
    backend.script = lambda request: itertools.repeat([5]) if request.prompt_ids == [5] else END
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, FrontendOptions(stall_timeout_s=0.3)) as client,
        raw_request(client, "/generate", {"input_ids": [5], "stream": True}),
    ):
        await backend.until(lambda: backend.num_yielded > 100)
        assert (await post(client, "/generate", {"input_ids": [6]}))[0] == 200
        await backend.until(lambda: backend.cancelled)
        # What is held for it: the kernel's buffers (256 KiB asked for, doubled) and aiohttp's.
        size_bytes = sum(250 + 4 * index for index in range(backend.num_yielded))
        assert size_bytes < 3 * 1024 * 1024


async def test_a_client_that_reads_again_gets_everything(backend):
    count = 3000
    backend.script = lambda _: itertools.chain(itertools.repeat([5], count), END)
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, FrontendOptions(incremental_streaming_output=True)) as client,
        raw_request(client, "/generate", {"input_ids": [5], "stream": True}) as sock,
    ):
        await backend.until(lambda: backend.num_yielded > 1000)
        seen = await read_until(sock, b"data: [DONE]\n\n")
    assert seen.count(b'"output_ids":[5]') == count


@pytest.mark.usefixtures("logs")
async def test_a_bug_in_a_stream_cuts_the_connection(client, backend):
    backend.script = say([81], "no step at all")
    async with (
        asyncio.timeout(PATIENCE_S),
        raw_request(client, "/generate", PROMPT | {"stream": True}) as sock,
    ):
        await read_until(sock, b"data: ")
        with pytest.raises((AssertionError, ConnectionResetError)):
            await read_until(sock, b"[DONE]")


async def test_a_port_in_use_is_named():
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigInvalid, match=f"port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


def test_an_address_of_another_machine_is_named():
    with pytest.raises(ConfigInvalid, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", 0)


def test_ipv6_addresses_are_listened_on():
    with listen("::1", 0) as sock:
        assert sock.family == socket.AF_INET6
