"""Bad clients: oversized, slow or non-HTTP input, disconnects, slow reading and no reading at all."""

import asyncio
import gzip
import io
import itertools
import json
import select
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.frontend.http.server import listen
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.wire.errors import ConfigInvalid
from tests import loop_watch
from tests.frontend.conftest import serve
from tests.frontend.fakes import FakeBackend, length, say
from tests.frontend.helpers import ROUTES, post, post_large
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
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: \x00\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"BREW /generate HTTP/1.1\r\nHost: localhost\r\n\r\n",
        head("POST", "/generate", "Content-Length: -3"),
        head("POST", "/generate", "Content-Length: 3", "Content-Length: 4"),
        head("POST", "/generate", "Content-Length: 3", CHUNKED) + chunk(b"{}"),
        head("POST", "/generate", CHUNKED) + b"zz\r\n",
    ],
)
async def test_non_http_input_gets_400_and_is_closed(client, sent):
    async with asyncio.timeout(PATIENCE_S), connected(client) as bad:
        await bad.send(sent)
        assert (await bad.reply()).status == 400
        assert await bad.closed()
        assert await is_served(client)


@settings(suppress_health_check=list(HealthCheck))
@given(sent=st.binary(max_size=200), begin=st.integers(0, 150), end=st.integers(0, 150))
async def test_server_survives_arbitrary_client_input(client, sent, begin, end):
    honest = request("/generate", GOOD)
    async with asyncio.timeout(PATIENCE_S):
        async with connected(client) as bad:
            await bad.send(honest[:begin] + sent + honest[end:])
        assert await is_served(client)


async def test_idle_connection_is_closed_before_and_after_an_answer(backend):
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, HURRIED) as client,
        connected(client) as silent,
        connected(client, head("GET", "/health")) as used,
    ):
        assert (await used.reply()).status == 200
        assert await used.closed()
        assert await silent.closed()


async def test_pipelined_requests_are_answered_in_order(client):
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


async def test_expect_100_continue_is_answered(client):
    body = json.dumps(GOOD).encode()
    expecting = f"Content-Length: {len(body)}", "Expect: 100-continue"
    async with asyncio.timeout(PATIENCE_S), connected(client) as careful:
        await careful.send(head("POST", "/generate", *expecting))
        assert (await careful.reply()).status == 100
        await careful.send(body)
        assert (await careful.reply()).status == 200


async def test_override_that_is_no_utf8_is_rejected_by_name(client):
    sent = request("/generate", GOOD, "X-Override-Rid: %").replace(b"%", b"\xff")
    async with asyncio.timeout(PATIENCE_S), connected(client, sent) as bad:
        reply = await bad.reply()
    assert reply.status == 400
    assert reply.json()["error"]["message"] == "X-Override-Rid: must be valid UTF-8"


async def test_half_closed_connection_cancels_its_generation(client, backend):
    backend.script = say([5], asyncio.Event())
    async with asyncio.timeout(PATIENCE_S), connected(client) as half:
        await half.send(request("/generate", GOOD))
        await backend.until(lambda: backend.aborts)
        half.writer.write_eof()
        assert await half.closed()
        await backend.until(lambda: backend.cancelled)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_client_reading_byte_by_byte_is_disconnected(tokenizer, is_stream):
    backend = FakeBackend(tokenizer, context_length=10 * MILLION)
    # 18 bytes of JSON per token: more than all buffers hold.
    backend.script = lambda _: itertools.chain(itertools.repeat([40_000] * 8000, 30), [length(6)])
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        options = FrontendOptions(stall_timeout_s=0.1)
        async with asyncio.timeout(PATIENCE_S), serve(backend, options) as client:
            slow.connect((client._base_url.host, client._base_url.port))
            slow.sendall(request("/generate", {"input_ids": [5], "stream": is_stream}))
            cut_off = select.poll()
            cut_off.register(slow, 0)  # only a reset
            while not cut_off.poll(0):
                assert (await post(client, "/generate", {}))[0] == 400
                if select.select([slow], [], [], 0)[0]:
                    slow.recv(1)


async def test_idle_and_incomplete_connections_do_not_block_others(client):
    async with asyncio.timeout(PATIENCE_S):
        opened = await asyncio.gather(*(open_half_sent(client, index) for index in range(300)))
        assert await is_served(client)
        for writer in opened:
            writer.transport.abort()


async def open_half_sent(client, index: int) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection(client._base_url.host, client._base_url.port)
    writer.write([b"", b"GET /health HT", head("POST", "/generate", CHUNKED) + b"5"][index % 3])
    return writer


async def test_endless_request_head_is_disconnected(backend):
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, HURRIED) as client,
        connected(client, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ") as slow,
    ):
        closed = asyncio.create_task(slow.closed())
        while not closed.done():
            await slow.send(b"a")
            async with connected(client, request("/generate", GOOD)) as other:
                assert (await other.reply()).status == 200
        assert await closed


MESSAGE = [{"role": "user", "content": "a"}]
SLOW_BODY = FrontendOptions(body_timeout_s=0.3)


@pytest.mark.parametrize("line", ["Content-Length: 100", CHUNKED])
async def test_incomplete_body_gets_408_and_generates_nothing(backend, line):
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, SLOW_BODY) as client,
        connected(client) as slow,
    ):
        await slow.send(head("POST", "/generate", line) + b"2\r\n{")
        assert await is_served(client)
        reply = await slow.reply()
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert reply.json()["error"]["code"] == "body_timeout"
    assert len(backend.requests) == 1


@pytest.mark.parametrize(
    ("keys", "line", "status"),
    [
        (("k",), "X-Api-Key: wrong", 401),
        ((), "Origin: https://evil.example", 403),
        ((), "X-Request-Timeout-Ms: soon", 400),
    ],
)
async def test_sender_is_checked_before_the_body_arrives(backend, keys, line, status):
    options = FrontendOptions(http=HttpOptions(api_keys=keys), body_timeout_s=0.3)
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, options) as client,
        connected(client) as bad,
    ):
        await bad.send(head("POST", "/generate", "Content-Length: 100", line))
        assert (await bad.reply()).status == status


async def test_content_length_over_the_limit_is_rejected_before_the_body(backend):
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, SMALL) as client,
        connected(client) as big,
    ):
        await big.send(head("POST", "/generate", "Content-Length: 1001"))
        assert (await big.reply()).status == 413


async def test_chunked_body_over_the_limit_is_rejected(backend):
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, SMALL) as client,
        connected(client) as big,
    ):
        await big.send(head("POST", "/generate", CHUNKED) + chunk(b"[" * 600))
        await big.send(chunk(b"[" * 600))  # without a last chunk
        assert (await big.reply()).status == 413


async def test_compressed_body_is_rejected_without_decompression(client):
    bomb = gzip.compress(b" " * 50 * MILLION)
    lines = (f"Content-Length: {len(bomb)}", "Content-Encoding: gzip")
    async with asyncio.timeout(PATIENCE_S), connected(client) as bad:
        await bad.send(head("POST", "/generate", *lines) + bomb)
        reply = await bad.reply()
        assert (reply.status, reply.json()["error"]["code"]) == (415, "unsupported_encoding")
        await bad.send(head("GET", "/health"))
        assert (await bad.reply()).status == 200


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/generate", GOOD | {"stop": ["a"] * MILLION}, "stop: must have at most 64"),
        ("/generate", GOOD | {"stop": [1] * MILLION}, "stop: must have at most 64"),
        ("/generate", GOOD | {"logit_bias": dict.fromkeys(range(100_000), 1.0)}, "at most 1024"),
        ("/generate", GOOD | {str(key): 1 for key in range(100_000)}, "at most 1000 are allowed"),
        ("/generate", GOOD | {"n": 10**400}, "n: must be"),
        ("/generate", GOOD | {"rid": ["a"] * MILLION}, "rid: must be a string"),
        (
            "/generate",
            {"input_ids": [[1]] * 100_000},
            "the body has 100000 prompts; send at most 1024",
        ),
        ("/generate", {"input_ids": [10**400]}, "outside the vocabulary"),
        ("/v1/completions", {"prompt": ["a"] * 100_000}, "at most 1024"),
        ("/v1/chat/completions", {"messages": MESSAGE * 100_000}, "messages: must have at most"),
        ("/v1/chat/completions", {"messages": ["a"] * MILLION}, "messages: must have at most"),
        ("/v1/chat/completions", {"messages": MESSAGE, "tools": [1] * MILLION}, "tools.0: must be"),
        ("/abort_request", {"rid": "a" * MILLION}, "rid: must have at most 512"),
    ],
)
async def test_oversized_lists_and_numbers_are_rejected(client, backend, path, body, sentence):
    status, answer = await post_large(client, path, body)
    assert (status, backend.requests) == (400, [])
    assert sentence in answer["error"]["message"]


async def test_error_message_length_is_bounded(client):
    status, answer = await post_large(
        client, "/v1/completions", {"prompt": "a", "model": "m" * MILLION}
    )
    assert status == 404
    assert len(answer["error"]["message"]) == 2000


@pytest.mark.parametrize(
    "data",
    [
        b'{"text":' * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"n": ' + b"9" * 100_000 + b"}",
    ],
)
async def test_deeply_nested_or_huge_json_is_rejected(client, data):
    async with client.post("/generate", data=data) as response:
        assert response.status == 400
        assert "not valid JSON" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("part", [b"[],", b'{"a":1},', b'"a",:'])
async def test_body_with_too_many_parts_is_rejected_before_parsing(client, part):
    data = b'{"text": [' + part * MILLION
    async with client.post("/generate", data=io.BytesIO(data)) as response:
        assert response.status == 400
        assert "more than 500000" in (await response.json())["error"]["message"]


def _conversation(num_calls: int) -> dict:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in range(num_calls)]
    return {"messages": [*MESSAGE, {"role": "assistant", "tool_calls": calls}, *MESSAGE]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", _conversation(20_000)),
        ("/v1/chat/completions", {"messages": MESSAGE * 9_900}),
        ("/v1/completions", {"prompt": [7] * 3 * MILLION}),
        ("/generate", {"input_ids": [7] * 3 * MILLION}),
        ("/generate", {"text": '"é' * 2 * MILLION}),
        ("/abort_request", {"rid": "a", "beside": [7] * 4 * MILLION}),
    ],
    ids=["calls", "messages", "prompt", "ids", "text", "abort"],
)
async def test_large_body_is_parsed_in_a_thread(client, monkeypatch, path, body):
    # Parsing takes at least 50 ms of CPU time, and everything else in the loop at most 10 ms.
    monkeypatch.setattr(loop_watch, "MAX_CALLBACK_S", 0.04)
    assert (await post_large(client, path, body))[0] in {200, 400}


STREAM = {"input_ids": [5], "stream": True}
END = [length(6)]
BUFFER_BYTES = 4096  # receive buffer of a slow client


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", ROUTES)
async def test_disconnect_before_the_first_token_cancels(client, backend, path, n, is_stream):
    backend.script = say(asyncio.Event())
    body = ROUTES[path] | {"n": n, "stream": is_stream}
    async with asyncio.timeout(PATIENCE_S):
        async with connected(client, request(path, body)):
            await backend.until(lambda: len(backend.aborts) == n)
        await backend.until(lambda: len(backend.cancelled) == n)


async def test_disconnect_during_a_stream_cancels(client, backend):
    backend.script = say([5], asyncio.Event())
    async with asyncio.timeout(PATIENCE_S):
        async with connected(client, request("/generate", STREAM)) as leaving:
            await leaving.reader.readuntil(b"data: ")
        await backend.until(lambda: backend.cancelled)


async def test_stalled_client_is_disconnected_and_others_are_served(backend):
    backend.script = lambda asked: itertools.repeat([5]) if asked.prompt_ids == [5] else END
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, FrontendOptions(stall_timeout_s=0.3)) as client,
        connected(client, request("/generate", STREAM), BUFFER_BYTES),
    ):
        await backend.until(lambda: backend.num_yielded > 100)
        assert (await post(client, "/generate", {"input_ids": [6]}))[0] == 200
        await backend.until(lambda: backend.cancelled)
        # Data buffered for the client: the kernel's buffers (256 KiB, which Linux doubles) and aiohttp's.
        size_bytes = sum(250 + 4 * index for index in range(backend.num_yielded))
        assert size_bytes < 3 * 1024 * 1024


async def test_client_that_resumes_reading_gets_everything(backend):
    count = 3000
    backend.script = lambda _: itertools.chain(itertools.repeat([5], count), END)
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, FrontendOptions(incremental_streaming_output=True)) as client,
        connected(client, request("/generate", STREAM), BUFFER_BYTES) as slow,
    ):
        await backend.until(lambda: backend.num_yielded > 1000)
        seen = (await slow.reply()).body
    assert seen.endswith(b"data: [DONE]\n\n")
    assert seen.count(b'"output_ids":[5]') == count


@pytest.mark.usefixtures("logs")
async def test_exception_during_a_stream_aborts_the_connection(client, backend):
    backend.script = say([81], "no step at all")
    async with (
        asyncio.timeout(PATIENCE_S),
        connected(client, request("/generate", STREAM)) as cut,
    ):
        await cut.reader.readuntil(b"data: ")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await cut.reader.readuntil(b"[DONE]")


async def test_error_names_a_port_in_use():
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigInvalid, match=f"port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


def test_error_names_a_foreign_address():
    with pytest.raises(ConfigInvalid, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", 0)


def test_listens_on_ipv6():
    with listen("::1", 0) as sock:
        assert sock.family == socket.AF_INET6
