"""Bodies that are too large, too many, too slow, or endless in what they hold."""

import asyncio
import gzip
import io

import pytest

from tandem.frontend.options import FrontendOptions, HttpOptions
from tests.frontend.conftest import serve
from tests.frontend.helpers import post, post_large
from tests.frontend.raw import chunk, connected, head
from tests.patience import PATIENCE_S

MESSAGE = [{"role": "user", "content": "a"}]
GOOD = {"input_ids": [5, 6], "max_new_tokens": 2}
CHUNKED = "Transfer-Encoding: chunked"
SMALL = FrontendOptions(http=HttpOptions(max_body_bytes=1000))
HURRIED = FrontendOptions(body_timeout_s=0.3)
MILLION = 1_000_000


async def is_served(client) -> bool:
    return (await post(client, "/generate", GOOD))[0] == 200


@pytest.mark.parametrize("line", ["Content-Length: 100", CHUNKED])
async def test_a_body_that_never_ends_is_answered_with_408_and_generates_nothing(backend, line):
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, HURRIED) as client,
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
        asyncio.timeout(PATIENCE_S),
        serve(backend, SMALL) as client,
        connected(client) as big,
    ):
        await big.send(head("POST", "/generate", "Content-Length: 1001"))
        assert (await big.reply()).status == 413


async def test_a_body_of_chunks_is_refused_once_it_passes_the_limit(backend):
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(backend, SMALL) as client,
        connected(client) as big,
    ):
        await big.send(head("POST", "/generate", CHUNKED) + chunk(b"[" * 600))
        await big.send(chunk(b"[" * 600))  # and no last chunk
        assert (await big.reply()).status == 413


async def test_a_compressed_body_is_refused_and_never_inflated(client):
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


@pytest.mark.parametrize("part", [b"[],", b'{"a":1},', b'"a",:'])
async def test_a_body_of_too_many_parts_is_not_even_parsed(client, part):
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
        ("/v1/chat/completions", _conversation(40_000)),
        ("/v1/chat/completions", {"messages": MESSAGE * 8000}),
        ("/v1/completions", {"prompt": [7] * 10 * MILLION}),
        ("/generate", {"input_ids": [7] * 10 * MILLION}),
        ("/generate", {"text": "so it goes on " * (2 * MILLION)}),
        ("/abort_request", {"rid": "a", "beside": [7] * 10 * MILLION}),
    ],
    ids=["calls", "messages", "prompt", "ids", "text", "abort"],
)
async def test_a_body_of_megabytes_is_read_beside_the_loop(client, path, body):
    # That nothing else waits for it, `tests/loop_watch.py` sees.
    assert (await post_large(client, path, body))[0] in {200, 400}
