"""Request data besides the prompt: the caller, its timeout, the session and sampling defaults."""

import asyncio
import dataclasses
import hashlib

import msgspec
import pytest

from tandem.frontend.chat.body import session_of
from tandem.frontend.http.sse import KEEP_ALIVE_S
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.wire.errors import Overloaded
from tandem.wire.generation import SamplingDefaults
from tests.frontend.conftest import serve
from tests.frontend.fakes import length, say
from tests.frontend.helpers import ROUTES, LoopClock, events, post
from tests.patience import PATIENCE_S

GENERATE = ROUTES["/generate"]


@pytest.mark.parametrize("path", ROUTES)
async def test_backend_receives_client_and_deadline(backend, path):
    options = FrontendOptions(http=HttpOptions(api_keys=("secret-key",)))
    headers = {"Authorization": "Bearer secret-key", "X-Request-Timeout-Ms": "500000"}
    async with serve(backend, options) as client:
        status, _ = await post(client, path, ROUTES[path] | {"n": 2}, headers=headers)
    assert status == 200
    for request in backend.requests:
        assert request.client == hashlib.sha256(b"secret-key").hexdigest()[:8]
        assert 0 < request.deadline_s <= 500


PRIORITIES = (-7, 0, 3, 9)


async def priorities_of(backend, options, path) -> list[int]:
    """Return what the backend gets for `PRIORITIES`."""
    async with serve(backend, options) as client:
        for priority in PRIORITIES:
            body, headers = ROUTES[path] | {"priority": priority}, {"Authorization": "Bearer k"}
            assert (await post(client, path, body, headers=headers))[0] == 200
    return [request.priority for request in backend.requests]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("limit", [None, 3])
async def test_priority_is_lowered_to_the_limit_of_the_key(backend, path, limit):
    options = FrontendOptions(http=HttpOptions(api_keys=("k",)))
    if limit is not None:
        limits = {hashlib.sha256(b"k").hexdigest()[:8]: limit}
        options = dataclasses.replace(options, max_priority=limits.__getitem__)
    expected = [min(each, limit or 0) for each in PRIORITIES]
    assert await priorities_of(backend, options, path) == expected


async def test_without_keys_every_priority_is_allowed(backend):
    sent = await priorities_of(backend, FrontendOptions(), "/generate")
    assert sent == list(PRIORITIES)


async def test_no_keys_and_no_header_mean_no_client_and_no_deadline(client, backend):
    await post(client, "/generate", GENERATE, headers={"Authorization": "Bearer x"})
    assert {(request.client, request.deadline_s) for request in backend.requests} == {("", None)}


async def test_request_timeout_sets_the_deadline(backend):
    options = FrontendOptions(http=HttpOptions(request_timeout_s=700.0))
    async with serve(backend, options) as client:
        await post(client, "/generate", GENERATE)
        assert 500 < backend.requests[-1].deadline_s <= 700
        await post(client, "/generate", GENERATE, headers={"X-Request-Timeout-Ms": "500000"})
        assert 0 < backend.requests[-1].deadline_s <= 500


async def test_invalid_timeout_header_is_rejected(client):
    for wrong in ("soon", "-1", "0", "nan", "inf"):
        status, answer = await post(
            client, "/generate", GENERATE, headers={"X-Request-Timeout-Ms": wrong}
        )
        assert status == 400
        assert "X-Request-Timeout-Ms" in answer["error"]["message"]


async def test_overload_response_has_retry_after(client, backend):
    backend.script = say(Overloaded("the line is full", retry_after_s=17))
    async with client.post("/generate", json=GENERATE) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "17")


@pytest.mark.parametrize(
    ("body", "headers", "highest"),
    [
        (b"{", {}, 0),
        (b'{"priority": 7', {}, 2**31 - 1),
        (b"{", {"X-Override-Priority": "7"}, 2**31 - 1),
    ],
)
async def test_refused_request_is_not_parsed(client, backend, body, headers, highest):
    backend.refusal = Overloaded("the line is full", retry_after_s=17)
    for path in ("/generate", "/v1/chat/completions", "/v1/messages", "/v1/responses"):
        async with client.post(path, data=body, headers=headers) as response:
            assert response.status == (529 if path == "/v1/messages" else 429)
            assert response.headers["Retry-After"] == "17"
    assert backend.checked == [("", highest)] * 4


# Below the 300 s timeout of aiohttp's client, which uses the same clock.
LIMIT_S = 100.0
LIMITED = FrontendOptions(http=HttpOptions(request_timeout_s=LIMIT_S))


@pytest.fixture
async def clock():
    return LoopClock()


def patience(num_jumps: int) -> asyncio.Timeout:
    return asyncio.timeout(PATIENCE_S + num_jumps * LIMIT_S)


@pytest.mark.parametrize("path", ROUTES)
async def test_request_over_the_timeout_gets_504_and_is_cancelled(backend, clock, path):
    backend.script = say(asyncio.Event())
    body, count = ROUTES[path] | {"n": 2}, 2
    async with patience(1), serve(backend, LIMITED) as client:
        answering = asyncio.create_task(post(client, path, body))
        await backend.until(lambda: len(backend.aborts) == count)
        clock.jump(LIMIT_S)
        status, answer = await answering
        await backend.until(lambda: len(backend.cancelled) == count)
    assert (status, answer["error"]["code"]) == (504, "timeout")
    assert "100 s" in answer["error"]["message"]


@pytest.mark.parametrize("first", [[], [[81]]])
async def test_stream_over_the_timeout_ends_with_an_error_event(backend, clock, first):
    # Before the first token too: a limit over `KEEP_ALIVE_S` passes after the stream has started.
    backend.script = say(*first, asyncio.Event())

    async def last_event(path: str, body: dict) -> dict:
        asking = asyncio.create_task(client.post(path, json=body | {"stream": True}).__aenter__())
        await backend.until(lambda: len(backend.aborts) == body.get("n", 1))
        clock.jump(KEEP_ALIVE_S)
        async with await asking as response:
            assert response.status == 200
            clock.jump(LIMIT_S)
            return (await events(response))[-1]

    async with patience(3), serve(backend, LIMITED) as client:
        native = (await last_event("/generate", GENERATE | {"n": 2}))["meta_info"]
        await backend.until(lambda: len(backend.cancelled) == 2)
        completion = await last_event("/v1/completions", {"prompt": [5]})
        await backend.until(lambda: len(backend.cancelled) == 3)
    assert native["finish_reason"]["type"] == "abort"
    assert native["finish_reason"]["err_type"] == completion["error"]["code"] == "timeout"


async def test_no_timeout_lets_a_request_run(client, backend):
    go_on = asyncio.Event()
    backend.script = say(go_on, length(5))
    async with asyncio.timeout(PATIENCE_S):
        answering = asyncio.create_task(post(client, "/generate", GENERATE))
        await backend.until(lambda: backend.aborts)
        go_on.set()
        assert (await answering)[0] == 200


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({"X-Session-Id": "h"}, {"session_id": "b", "user": "u"}, "h"),
        ({"X-SMG-Routing-Key": "k"}, {"user": "u"}, "k"),
        ({}, {"session_id": "b", "prompt_cache_key": "c", "user": "u"}, "b"),
        ({}, {"prompt_cache_key": "c", "user": "u"}, "c"),
        ({"X-Session-Id": ""}, {"user": "u"}, "u"),
        ({}, {"session_id": 7, "user": None}, ""),
        ({"X-Session-Id": "a\udcffb"}, {}, "a?b"),
        ({}, {"user": "x" * 1000}, "x" * 256),
    ],
)
def test_first_named_session_is_used(headers, body, session):
    assert session_of(headers, body) == session


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_passes_the_session_to_the_backend(client, backend, path):
    await (await client.post(path, json=ROUTES[path], headers={"x-session-id": "s"})).read()
    await (await client.post(path, json=ROUTES[path] | {"user": "u"})).read()
    assert [request.session for request in backend.requests] == ["s", "u"]


OF_MODEL = SamplingDefaults(
    temperature=0.25, top_p=0.5, top_k=7, min_p=0.125, repetition_penalty=1.5
)
NAMES = OF_MODEL.__struct_fields__


@pytest.fixture
def model(backend):
    """A model that comes with defaults of its own."""
    backend.script = say(length(5))
    backend.served = dataclasses.replace(backend.served, default_sampling=OF_MODEL)


async def sampling_of(client, backend, path: str, body: dict) -> SamplingDefaults:
    """Return what the engine is asked for."""
    backend.requests.clear()
    status, answer = await post(client, path, ROUTES[path] | body)
    assert status == 200, answer
    [request] = backend.requests
    return SamplingDefaults(**{name: getattr(request.sampling, name) for name in NAMES})


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("path", ROUTES)
async def test_missing_parameters_use_the_model_defaults(client, backend, path):
    assert await sampling_of(client, backend, path, {}) == OF_MODEL
    assert await sampling_of(client, backend, path, dict.fromkeys(NAMES)) == OF_MODEL


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("top_p", 1), ("top_k", -1), ("min_p", 0), ("repetition_penalty", 1)],
)
async def test_request_parameters_override_model_defaults(client, backend, path, name, value):
    asked = await sampling_of(client, backend, path, {name: value})
    assert asked == msgspec.structs.replace(OF_MODEL, **{name: value})


@pytest.mark.usefixtures("model")
async def test_sampling_params_override_the_top_level(client, backend):
    for part, expected in (({"top_k": 3}, 3), ({"top_k": None}, 7), ({}, 5)):
        body = {"top_k": 5, "sampling_params": part}
        assert (await sampling_of(client, backend, "/generate", body)).top_k == expected


@pytest.mark.parametrize("path", ROUTES)
async def test_model_without_defaults_uses_api_defaults(client, backend, path):
    backend.script = say(length(5))
    assert await sampling_of(client, backend, path, {}) == SamplingDefaults()
    plain = SamplingDefaults(
        temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0
    )
    assert SamplingDefaults() == plain


@pytest.mark.usefixtures("model")
async def test_model_info_shows_default_sampling(client):
    async with client.get("/model_info") as response:
        info = await response.json()
    assert info["default_sampling_params"] == msgspec.to_builtins(OF_MODEL)
