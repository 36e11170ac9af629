"""Clients that send too much, too slowly, or what is no HTTP, while others are served."""

import asyncio
import gzip
import itertools
import json
import select
import socket

import pytest

from frontend.options import FrontendOptions, HttpOptions
from tests.frontend.conftest import serve
from tests.frontend.fakes import FakeBackend, length, say
from tests.frontend.helpers import post, post_large
from tests.frontend.raw import chunk, connected, head, request

DEADLINE_S = 10
MESSAGE = [{"role": "user", "content": "a"}]
GOOD = {"input_ids": [5, 6], "max_new_tokens": 2}
CLOSE = "Connection: close"
CHUNKED = "Transfer-Encoding: chunked"
SMALL = FrontendOptions(http=HttpOptions(max_body_bytes=1000))
IMPATIENT = FrontendOptions(idle_timeout_s=0.3, body_timeout_s=0.3, stall_timeout_s=0.3)
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
    async with asyncio.timeout(DEADLINE_S), connected(client) as bad:
        await bad.send(sent)
        assert (await bad.reply()).status == 400
        assert await bad.closed()
        assert await is_served(client)


async def test_a_head_that_never_ends_is_cut_off(backend):
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(backend, IMPATIENT) as client,
        connected(client) as slow,
    ):
        await slow.send(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
        closed = asyncio.create_task(slow.closed())
        while not closed.done():
            await slow.send(b"a")
            assert await is_served(client)
        assert await closed


async def test_an_idle_connection_is_closed_also_after_an_answer(backend):
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(backend, IMPATIENT) as client,
        connected(client) as silent,
        connected(client) as used,
    ):
        await used.send(head("GET", "/health"))
        assert (await used.reply()).status == 200
        assert await used.closed()
        assert await silent.closed()


@pytest.mark.parametrize("line", ["Content-Length: 100", CHUNKED])
async def test_a_body_that_never_ends_is_answered_with_408_and_generates_nothing(backend, line):
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(backend, IMPATIENT) as client,
        connected(client) as slow,
    ):
        await slow.send(head("POST", "/generate", line) + b"2\r\n{")
        assert await is_served(client)
        reply = await slow.reply()
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert reply.json()["error"]["code"] == "body_timeout"
    assert len(backend.requests) == 1


async def test_a_body_over_the_limit_is_refused_before_it_is_sent(backend):
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(backend, SMALL) as client,
        connected(client) as big,
    ):
        await big.send(head("POST", "/generate", "Content-Length: 1001"))
        assert (await big.reply()).status == 413


async def test_a_body_of_chunks_is_refused_once_it_passes_the_limit(backend):
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(backend, SMALL) as client,
        connected(client) as big,
    ):
        await big.send(head("POST", "/generate", CHUNKED) + chunk(b"[" * 600))
        await big.send(chunk(b"[" * 600))  # and no last chunk
        assert (await big.reply()).status == 413


async def test_a_body_of_chunks_within_the_limit_is_served(backend):
    body = json.dumps(GOOD).encode()
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(backend, SMALL) as client,
        connected(client) as good,
    ):
        sent = b"".join(chunk(body[index : index + 1]) for index in range(len(body)))
        await good.send(head("POST", "/generate", CHUNKED) + sent + b"0\r\n\r\n")
        assert (await good.reply()).status == 200


async def test_a_compressed_body_is_refused_and_never_inflated(client):
    bomb = gzip.compress(b" " * 50 * MILLION)
    lines = (f"Content-Length: {len(bomb)}", "Content-Encoding: gzip")
    async with asyncio.timeout(DEADLINE_S), connected(client) as bad:
        await bad.send(head("POST", "/generate", *lines) + bomb)
        reply = await bad.reply()
        assert (reply.status, reply.json()["error"]["code"]) == (415, "unsupported_encoding")
        await bad.send(head("GET", "/health"))
        assert (await bad.reply()).status == 200


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/generate", GOOD | {"stop": ["a"] * MILLION}, "stop: must have at most 64"),
        ("/generate", GOOD | {"stop_regex": ["a"] * MILLION}, "stop_regex: must have at most 16"),
        (
            "/generate",
            GOOD | {"stop_token_ids": [1] * MILLION},
            "stop_token_ids: must have at most",
        ),
        (
            "/generate",
            GOOD | {"logit_bias": dict.fromkeys(range(MILLION // 10), 1.0)},
            "at most 1024",
        ),
        ("/generate", GOOD | {"stop": [1] * MILLION}, "stop.0: must be a string"),
        (
            "/generate",
            GOOD | {str(key): 1 for key in range(MILLION // 10)},
            "fields; at most 1000 may be",
        ),
        (
            "/v1/chat/completions",
            {"messages": MESSAGE * (MILLION // 10)},
            "messages: must have at most 8192",
        ),
        (
            "/v1/chat/completions",
            {"messages": MESSAGE, "tools": [1] * MILLION},
            "tools.0: must be an",
        ),
        ("/generate", GOOD | {"n": 10**9}, "n: must be at most 128"),
        ("/generate", GOOD | {"n": 10**400}, "n: must be"),
        ("/generate", {"input_ids": [[1]] * 100_000}, "100000 prompts were sent; at most 1024"),
        ("/generate", {"text": ["a"] * 100_000}, "100000 prompts were sent; at most 1024"),
        ("/v1/completions", {"prompt": ["a"] * 100_000}, "at most 1024"),
        ("/v1/completions", {"prompt": "a", "stop": ["a"] * MILLION}, "stop: must have at most 64"),
        ("/v1/chat/completions", {"messages": ["a"] * MILLION}, "messages.0: must be an object"),
        ("/generate", {"input_ids": [10**400]}, "outside the vocabulary"),
        ("/generate", GOOD | {"rid": ["a"] * MILLION}, "rid: must be a string"),
        ("/abort_request", {"rid": "a" * MILLION}, "rid: must have at most 512"),
    ],
)
async def test_lists_and_numbers_without_measure_are_refused(client, backend, path, body, sentence):
    status, answer = await post_large(client, path, body)
    assert (status, backend.requests) == (400, [])
    assert sentence in answer["error"]["message"]


async def test_an_error_does_not_quote_a_megabyte(client):
    status, answer = await post_large(
        client, "/v1/completions", {"prompt": "a", "model": "m" * MILLION}
    )
    assert status == 404
    assert len(answer["error"]["message"]) == 2000


async def test_an_answer_of_a_billion_tokens_is_cut_to_the_context(client, backend):
    backend.script = say(length(6))
    assert (await post(client, "/generate", GOOD | {"max_new_tokens": 10**9}))[0] == 200
    assert backend.requests[0].sampling.max_new_tokens == 8192 - 2


@pytest.mark.parametrize(
    "data",
    [
        b'{"text":' * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"n": ' + b"9" * 100_000 + b"}",
    ],
)
async def test_json_nested_or_long_without_end_is_refused(client, data):
    async with client.post("/generate", data=data) as response:
        assert response.status == 400
        assert "not valid JSON" in (await response.json())["error"]["message"]


async def test_pipelined_requests_are_answered_in_order_whatever_they_are(client):
    sent = [
        request("/generate", GOOD | {"stream": True}),
        head("GET", "/health"),
        request("/generate", {"n": "many"}),
        head("GET", "/nowhere"),
        request("/generate", GOOD, CLOSE),
    ]
    async with asyncio.timeout(DEADLINE_S), connected(client) as eager:
        await eager.send(b"".join(sent))
        replies = [await eager.reply() for _ in sent]
        assert await eager.closed()
    assert [reply.status for reply in replies] == [200, 200, 400, 404, 200]
    assert replies[0].body.endswith(b"data: [DONE]\n\n")
    assert replies[1].json()["status"] == "ok"
    assert replies[4].json()["output_ids"] == [5, 6]


async def test_an_error_does_not_end_or_confuse_a_connection(backend):
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(backend, SMALL) as client,
        connected(client) as kept,
    ):
        for body in ({}, {"text": 1}, {"text": "a" * 2000}, {"input_ids": [-1]}):
            await kept.send(request("/generate", body))
            assert (await kept.reply()).status in {400, 413}
            await kept.send(request("/generate", GOOD))
            assert (await kept.reply()).json()["output_ids"] == [5, 6]


async def test_a_client_that_waits_for_100_is_told_to_go_on(client):
    body = json.dumps(GOOD).encode()
    expecting = f"Content-Length: {len(body)}", "Expect: 100-continue"
    async with asyncio.timeout(DEADLINE_S), connected(client) as careful:
        await careful.send(head("POST", "/generate", *expecting))
        assert (await careful.reply()).status == 100
        await careful.send(body)
        assert (await careful.reply()).status == 200


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (("Content-Length: 1001", "Expect: 100-continue"), 413),
        (("Content-Length: 9", "Expect: 100-continue", "Content-Encoding: gzip"), 415),
        (("Content-Length: 9", "Expect: miracles"), 417),
    ],
)
async def test_a_client_that_waits_in_vain_is_told_why(backend, lines, status):
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(backend, SMALL) as client,
        connected(client) as bad,
    ):
        await bad.send(head("POST", "/generate", *lines))
        reply = await bad.reply()
    assert reply.status == status
    assert reply.json()["error"]["message"]


async def test_methods_are_answered_as_http_has_them(client):
    async with asyncio.timeout(DEADLINE_S), connected(client) as kept:
        for method, path, status in (
            ("HEAD", "/health", 200),
            ("HEAD", "/generate", 405),
            ("OPTIONS", "/generate", 405),
            ("DELETE", "/v1/models", 405),
            ("TRACE", "/health", 405),
            ("GET", "/health", 200),
        ):
            await kept.send(head(method, path))
            assert ((await kept.reply(method)).status, method) == (status, method)


async def test_a_client_that_shut_its_sending_side_gets_what_is_answered_at_once(client):
    for sent in (head("GET", "/health"), request("/generate", GOOD), request("/generate", {})):
        async with asyncio.timeout(DEADLINE_S), connected(client) as half:
            await half.send(sent)
            half.writer.write_eof()
            assert (await half.reply()).status in {200, 400}
            assert await half.closed()


async def test_a_client_that_shut_its_sending_side_does_not_keep_a_generation_running(
    client, backend
):
    backend.script = say([5], asyncio.Event())
    async with asyncio.timeout(DEADLINE_S), connected(client) as half:
        await half.send(request("/generate", GOOD))
        half.writer.write_eof()
        assert await half.closed()
        await backend.until(lambda: backend.cancelled)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_takes_a_byte_at_a_time_is_cut_off(tokenizer, is_stream):
    backend = FakeBackend(tokenizer, context_length=10 * MILLION)
    backend.script = lambda _: itertools.chain(itertools.repeat([5] * 8000, 200), [length(6)])
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with asyncio.timeout(DEADLINE_S), serve(backend, IMPATIENT) as client:
            slow.connect((client._base_url.host, client._base_url.port))
            slow.sendall(request("/generate", {"input_ids": [5], "stream": is_stream}))
            cut_off = select.poll()
            cut_off.register(slow, 0)  # nothing but a reset
            while not cut_off.poll(0):
                assert (await post(client, "/generate", {}))[0] == 400
                if select.select([slow], [], [], 0)[0]:
                    slow.recv(1)


async def test_many_idle_and_half_sent_connections_leave_others_served(client):
    async with asyncio.timeout(DEADLINE_S):
        opened = await asyncio.gather(*(open_half_sent(client, index) for index in range(300)))
        assert await is_served(client)
        for writer in opened:
            writer.transport.abort()


async def open_half_sent(client, index: int) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection(client._base_url.host, client._base_url.port)
    writer.write([b"", b"GET /health HT", head("POST", "/generate", CHUNKED) + b"5"][index % 3])
    return writer
