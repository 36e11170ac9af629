import asyncio

import pytest
from aiohttp import web

from frontend.app import create_app
from frontend.limits import RequestTimedOut, within_time
from frontend.options import FrontendOptions, HttpOptions
from tests.frontend.conftest import serve, serve_app
from tests.frontend.fakes import length, say
from tests.frontend.helpers import post, stream
from tests.patience import PATIENCE_S

SHORT = FrontendOptions(http=HttpOptions(request_timeout_s=1.5))
GENERATE = {"input_ids": [5]}


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
    backend, path, body, is_stream
):
    backend.script = say(asyncio.Event())
    async with asyncio.timeout(PATIENCE_S), serve(backend, SHORT) as client:
        status, answer = await post(client, path, body | {"stream": is_stream})
        await backend.until(lambda: len(backend.cancelled) == body.get("n", 1))
    assert (status, answer["error"]["code"]) == (504, "timeout")
    assert "1.5 s" in answer["error"]["message"]


async def test_a_stream_that_takes_too_long_ends_with_an_error_event(backend):
    backend.script = say([81], asyncio.Event())
    async with asyncio.timeout(PATIENCE_S), serve(backend, SHORT) as client:
        native = (await stream(client, "/generate", GENERATE | {"n": 2}))[-1]["meta_info"]
        completion = (await stream(client, "/v1/completions", {"prompt": [5]}))[-1]
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


async def test_a_stream_may_say_itself_that_its_time_is_over(backend):
    app = create_app(backend, SHORT)

    async def two_events(asked: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(asked)
        try:
            async with within_time(asked):
                await response.write(b"begun ")
                await asyncio.Event().wait()
        except RequestTimedOut as error:
            await response.write(error.message.encode())
        return response

    app.router.add_get("/events", two_events)
    async with (
        asyncio.timeout(PATIENCE_S),
        serve_app(app) as client,
        client.get("/events") as answer,
    ):
        assert await answer.text() == "begun the request was ended: it took longer than 1.5 s"


async def test_a_request_that_goes_on_past_its_time_is_ended(backend):
    app = create_app(backend, SHORT)

    async def deaf(asked: web.Request) -> web.StreamResponse:
        async with within_time(asked):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.Event().wait()
        return web.Response()

    app.router.add_get("/deaf", deaf)
    async with (
        asyncio.timeout(PATIENCE_S),
        serve_app(app) as client,
        client.get("/deaf") as answer,
    ):
        assert answer.status == 504
