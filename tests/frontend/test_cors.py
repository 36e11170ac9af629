from tandem.frontend.options import FrontendOptions, HttpOptions
from tests.frontend.conftest import serve

ORIGIN = "https://chat.example"
BODY = {"input_ids": [5], "max_new_tokens": 2}
QUESTION = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def options(*origins: str) -> FrontendOptions:
    return FrontendOptions(http=HttpOptions(cors_origins=origins, api_keys=("k",)))


async def ask(client, headers) -> tuple[int, dict[str, str]]:
    async with client.options("/generate", headers=headers) as response:
        return response.status, response.headers


async def test_pages_are_told_nothing_by_default(client):
    status, headers = await ask(client, QUESTION)
    assert status == 405
    async with client.get("/health", headers={"Origin": ORIGIN}) as response:
        assert response.status == 200
        assert not [name for name in (*headers, *response.headers) if name.startswith("Access-")]


async def test_a_page_that_is_allowed_may_ask_without_a_key_and_is_told_what_it_may_send(backend):
    async with serve(backend, options(ORIGIN)) as client:
        status, headers = await ask(client, QUESTION)
    assert (status, headers["Access-Control-Allow-Origin"]) == (204, ORIGIN)
    assert "POST" in headers["Access-Control-Allow-Methods"]
    assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert headers["Vary"] == "Origin"


async def test_another_page_is_refused(backend):
    async with serve(backend, options(ORIGIN)) as client:
        status, headers = await ask(client, QUESTION | {"Origin": "https://evil.example"})
        assert (status, headers.get("Access-Control-Allow-Origin")) == (401, None)
        async with client.get("/health", headers={"Origin": "https://evil.example"}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_answers_streams_and_errors_may_be_read_by_the_page(backend):
    sent = {"Origin": ORIGIN, "Authorization": "Bearer k"}
    async with serve(backend, options(ORIGIN)) as client:
        for body, headers, status in (
            (BODY, sent, 200),
            (BODY | {"stream": True}, sent, 200),
            ({}, sent, 400),
            (BODY, {"Origin": ORIGIN}, 401),
        ):
            async with client.post("/generate", json=body, headers=headers) as response:
                assert response.status == status
                assert response.headers["Access-Control-Allow-Origin"] == ORIGIN


async def test_a_star_is_every_page_and_caches_need_not_tell_them_apart(backend):
    async with serve(backend, options("*")) as client:
        _, headers = await ask(client, QUESTION)
        assert headers["Access-Control-Allow-Origin"] == "*"
        assert "Vary" not in headers
