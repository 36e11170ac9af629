"""Clients that go away, read slowly, or do not read at all."""

import asyncio
import itertools
import socket

import pytest

from tandem.frontend.options import FrontendOptions
from tandem.frontend.server import listen
from tandem.wire.errors import ConfigInvalid
from tests.frontend.conftest import serve
from tests.frontend.fakes import length, say
from tests.frontend.helpers import ROUTES, post
from tests.frontend.raw import connected, request
from tests.patience import PATIENCE_S

STREAM = {"input_ids": [5], "stream": True}
END = [length(6)]
SMALL = 4096  # the receive buffer of a client that reads slowly


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", ROUTES)
async def test_a_client_that_goes_away_before_the_first_token_cancels(
    client, backend, path, n, is_stream
):
    backend.script = say(asyncio.Event())
    body = ROUTES[path] | {"n": n, "stream": is_stream}
    async with asyncio.timeout(PATIENCE_S):
        async with connected(client, request(path, body)):
            await backend.until(lambda: len(backend.aborts) == n)
        await backend.until(lambda: len(backend.cancelled) == n)


async def test_a_client_that_goes_away_in_a_stream_cancels(client, backend):
    backend.script = say([5], asyncio.Event())
    async with asyncio.timeout(PATIENCE_S):
        async with connected(client, request("/generate", STREAM)) as leaving:
            await leaving.reader.readuntil(b"data: ")
        await backend.until(lambda: backend.cancelled)


async def test_a_client_that_does_not_read_is_cut_off_and_others_are_served(backend):
    backend.script = lambda asked: itertools.repeat([5]) if asked.prompt_ids == [5] else END
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, FrontendOptions(stall_timeout_s=0.3)) as client,
        connected(client, request("/generate", STREAM), SMALL),
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
        connected(client, request("/generate", STREAM), SMALL) as slow,
    ):
        await backend.until(lambda: backend.num_yielded > 1000)
        seen = (await slow.reply()).body
    assert seen.endswith(b"data: [DONE]\n\n")
    assert seen.count(b'"output_ids":[5]') == count


@pytest.mark.usefixtures("logs")
async def test_a_bug_in_a_stream_cuts_the_connection(client, backend):
    backend.script = say([81], "no step at all")
    async with (
        asyncio.timeout(PATIENCE_S),
        connected(client, request("/generate", STREAM)) as cut,
    ):
        await cut.reader.readuntil(b"data: ")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await cut.reader.readuntil(b"[DONE]")


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
