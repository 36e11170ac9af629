import hashlib
import math

import pytest

from tandem.frontend.caller import wait_of
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.wire.errors import Overloaded
from tests.frontend.conftest import serve
from tests.frontend.fakes import say
from tests.frontend.helpers import post

BODIES = {
    "/generate": {"text": "a", "sampling_params": {"n": 2, "max_new_tokens": 2}},
    "/v1/completions": {"prompt": "a", "n": 2, "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}


@pytest.mark.parametrize("path", BODIES)
async def test_the_backend_hears_who_asks_and_how_long_they_wait(backend, path):
    options = FrontendOptions(http=HttpOptions(api_keys=("secret-key",)))
    headers = {"Authorization": "Bearer secret-key", "X-Request-Timeout-Ms": "500000"}
    async with serve(backend, options) as client:
        status, _ = await post(client, path, BODIES[path], headers=headers)
    assert status == 200
    for request in backend.requests:
        assert request.client == hashlib.sha256(b"secret-key").hexdigest()[:8]
        assert 0 < request.deadline_s <= 500


async def test_without_keys_nobody_has_a_name_and_without_a_word_nobody_a_deadline(client, backend):
    await post(client, "/generate", BODIES["/generate"], headers={"Authorization": "Bearer x"})
    assert {(request.client, request.deadline_s) for request in backend.requests} == {("", None)}


async def test_a_servers_own_limit_is_a_deadline(backend):
    options = FrontendOptions(http=HttpOptions(request_timeout_s=700.0))
    async with serve(backend, options) as client:
        await post(client, "/generate", BODIES["/generate"])
        assert 500 < backend.requests[-1].deadline_s <= 700
        await post(
            client, "/generate", BODIES["/generate"], headers={"X-Request-Timeout-Ms": "500000"}
        )
        assert 0 < backend.requests[-1].deadline_s <= 500


async def test_a_wait_that_is_no_number_is_refused(client):
    for wrong in ("soon", "-1", "0", "nan", "inf"):
        status, answer = await post(
            client, "/generate", BODIES["/generate"], headers={"X-Request-Timeout-Ms": wrong}
        )
        assert status == 400
        assert "X-Request-Timeout-Ms" in answer["error"]["message"]


async def test_a_refusal_says_when_to_come_back(client, backend):
    backend.script = say(Overloaded("the line is full", retry_after_s=17))
    async with client.post("/generate", json=BODIES["/generate"]) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "17")


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({"X-Stainless-Read-Timeout": "600", "X-Stainless-Timeout": "NOT_GIVEN"}, 600.0),
        ({"X-Envoy-Expected-Rq-Timeout-Ms": "15000"}, 15.0),
        ({"X-Stainless-Timeout": "20", "X-Request-Timeout-Ms": "1500"}, 1.5),
    ],
)
def test_what_clients_say_of_themselves_is_read_and_the_least_counts(headers, wait_s):
    found = wait_of(headers)
    assert found == wait_s or math.isclose(found, wait_s)
