import asyncio

import pytest

from tests.frontend.helpers import ROUTES, post

HEADER = "X-Request-Id"
each_route = pytest.mark.parametrize("path", ROUTES)


async def asked(client, path, body, **headers):
    """Return the header of an answer, and the answer."""
    async with client.post(path, json=body, headers=headers) as response:
        return response.headers[HEADER], await response.json()


def id_in(answer) -> str:
    return answer["meta_info"]["id"] if "meta_info" in answer else answer["id"]


@each_route
@pytest.mark.parametrize("name", ["rid", "request_id"])
async def test_the_id_in_a_body_is_the_id_of_the_request(client, backend, path, name):
    header, answer = await asked(client, path, ROUTES[path] | {name: "mine", "max_tokens": 2})
    assert (header, id_in(answer)) == ("mine", "mine")
    assert [request.request_id for request in backend.requests] == ["mine"]


@each_route
async def test_the_id_in_the_header_comes_back_and_begins_the_id_of_the_request(
    client, backend, path
):
    body = ROUTES[path] | {"max_tokens": 2, "max_new_tokens": 2}
    for _ in range(2):
        header, answer = await asked(client, path, body, **{HEADER: "abc"})
        assert header == "abc"
        assert id_in(answer).startswith("abc_")
    assert len({request.request_id for request in backend.requests}) == 2
    header, answer = await asked(client, path, body | {"rid": "mine"}, **{HEADER: "abc"})
    assert (header, id_in(answer)) == ("abc", "mine")


@each_route
async def test_without_an_id_the_header_tells_the_one_of_the_request(client, backend, path):
    header, answer = await asked(client, path, ROUTES[path])
    assert header == id_in(answer) == backend.requests[0].request_id


@pytest.mark.parametrize("given", ["é", "a" * 241, ""])
async def test_a_header_that_is_no_id_is_passed_over(client, given):
    header, _ = await asked(client, "/generate", ROUTES["/generate"], **{HEADER: given})
    assert header.isalnum()
    assert len(header) == 24


async def test_an_id_that_is_no_header_is_not_sent_as_one(client):
    header, answer = await asked(client, "/generate", ROUTES["/generate"] | {"rid": "a\r\nb: c"})
    assert "\n" not in header
    assert id_in(answer) == "a\r\nb: c"


async def test_every_answer_has_an_id_errors_too(client):
    for path in ("/health", "/nowhere", "/metrics"):
        async with client.get(path, headers={HEADER: "abc"}) as response:
            assert response.headers[HEADER] == "abc"
        async with client.get(path) as response:
            assert response.headers[HEADER]


@each_route
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("where", ["body", "header"])
async def test_a_request_is_aborted_by_the_id_its_client_gave(client, backend, path, n, where):
    backend.script = lambda _: [[5], asyncio.Event()]
    given = {"rid": "mine"} if where == "body" else {}
    headers = {HEADER: "mine"} if where == "header" else {}
    body = ROUTES[path] | given | {"n": n}
    async with asyncio.TaskGroup() as group:
        posting = group.create_task(post(client, path, body, headers=headers))
        await backend.until(lambda: len(backend.aborts) == n)
        assert (await post(client, "/abort_request", {"rid": "mine"}))[1] == {"aborted": True}
    assert (await posting)[0] == 200
    assert not backend.aborts


@each_route
async def test_an_id_that_is_running_is_refused(client, backend, path):
    backend.script = lambda _: [asyncio.Event()]
    async with asyncio.TaskGroup() as group:
        first = group.create_task(post(client, path, ROUTES[path] | {"rid": "mine"}))
        await backend.until(lambda: backend.aborts)
        status, answer = await post(client, path, ROUTES[path] | {"rid": "mine"})
        await post(client, "/abort_request", {"rid": "mine"})
    assert (status, "is running" in answer["error"]["message"]) == (400, True)
    assert (await first)[0] == 200
