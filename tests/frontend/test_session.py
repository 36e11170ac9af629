import pytest

from tandem.frontend.body import session_of


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
def test_the_session_is_the_first_that_is_named(headers, body, session):
    assert session_of(headers, body) == session


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "hi"}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_every_route_tells_the_backend_the_session(client, backend, path, body):
    await (await client.post(path, json=body, headers={"x-session-id": "s"})).read()
    await (await client.post(path, json=body | {"user": "u"})).read()
    assert [request.session for request in backend.requests] == ["s", "u"]
