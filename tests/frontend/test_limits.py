import asyncio

import pytest

from tandem.frontend.options import FrontendOptions, HttpOptions
from tests.frontend.conftest import serve
from tests.frontend.fakes import length, say
from tests.frontend.helpers import LoopClock, events, post
from tests.patience import PATIENCE_S

# Below what aiohttp's client waits for, 300 s of the same clock.
LIMIT_S = 100.0
LIMITED = FrontendOptions(http=HttpOptions(request_timeout_s=LIMIT_S))
GENERATE = {"input_ids": [5]}


@pytest.fixture
async def clock():
    return LoopClock()


def patience(num_jumps: int) -> asyncio.Timeout:
    return asyncio.timeout(PATIENCE_S + num_jumps * LIMIT_S)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", GENERATE | {"n": 2}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_a_request_that_takes_too_long_is_answered_with_504_and_cancelled(
    backend, clock, path, body, is_stream
):
    backend.script = say(asyncio.Event())
    count = body.get("n", 1)
    async with patience(1), serve(backend, LIMITED) as client:
        answering = asyncio.create_task(post(client, path, body | {"stream": is_stream}))
        await backend.until(lambda: len(backend.aborts) == count)
        clock.jump(LIMIT_S)
        status, answer = await answering
        await backend.until(lambda: len(backend.cancelled) == count)
    assert (status, answer["error"]["code"]) == (504, "timeout")
    assert "100 s" in answer["error"]["message"]


async def test_a_stream_that_takes_too_long_ends_with_an_error_event(backend, clock):
    backend.script = say([81], asyncio.Event())

    async def last_event(path: str, body: dict) -> dict:
        async with client.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200
            await backend.until(lambda: len(backend.aborts) == body.get("n", 1))
            clock.jump(LIMIT_S)
            return (await events(response))[-1]

    async with patience(2), serve(backend, LIMITED) as client:
        native = (await last_event("/generate", GENERATE | {"n": 2}))["meta_info"]
        await backend.until(lambda: len(backend.cancelled) == 2)
        completion = await last_event("/v1/completions", {"prompt": [5]})
        await backend.until(lambda: len(backend.cancelled) == 3)
    assert native["finish_reason"]["type"] == "abort"
    assert native["finish_reason"]["err_type"] == completion["error"]["code"] == "timeout"


async def test_without_a_limit_a_request_may_take_its_time(client, backend):
    go_on = asyncio.Event()
    backend.script = say(go_on, length(5))
    async with asyncio.timeout(PATIENCE_S):
        answering = asyncio.create_task(post(client, "/generate", GENERATE))
        await backend.until(lambda: backend.aborts)
        go_on.set()
        assert (await answering)[0] == 200
