import asyncio
import dataclasses
import json

import pytest
from yarl import URL

from tandem.frontend.absent_routes import instead_of
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.frontend.tokenizer import tokenizer_files, tokenizer_hash
from tandem.telemetry import log as logs
from tandem.wire.errors import MessageInvalid, NoNodeAvailable, Overloaded
from tests.frontend.conftest import serve
from tests.frontend.fakes import length, say
from tests.frontend.helpers import post, post_large

MIB = 1024 * 1024


async def get(client, path, **kwargs):
    async with client.get(path, **kwargs) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "body is empty"),
        (b"  \n", "body is empty"),
        (b"prompt=hello", "not valid JSON"),
        (b'{"text": ', "not valid JSON"),
        (b'{"text": "\xff"}', "not valid JSON"),
        (b'{"text": "\\ud800"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'["text"]', "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
)
async def test_a_body_that_is_no_json_object_is_answered(client, path, data, sentence):
    async with client.post(path, data=data) as response:
        assert response.status == 400
        assert sentence in (await response.json())["error"]["message"]


async def test_health_is_200_only_while_a_request_can_be_served(client, backend):
    assert await get(client, "/health") == (200, {"status": "ok", "detail": "serving"})
    backend.is_serving = False
    assert await get(client, "/health") == (503, {"status": "unavailable", "detail": "no node"})


async def test_a_server_that_cannot_serve_is_live_all_the_same(client, backend):
    backend.is_serving = False
    assert await get(client, "/live") == (200, {"status": "ok"})


async def test_health_generate_makes_one_token(client, backend):
    assert (await get(client, "/health_generate"))[0] == 200
    assert backend.requests[0].sampling.max_new_tokens == 1
    backend.script = say(NoNodeAvailable("no pair"))
    assert (await get(client, "/health_generate"))[0] == 503
    backend.script = say(length())
    assert (await get(client, "/health_generate"))[0] == 503


@pytest.mark.parametrize("step", [Overloaded("the queue is full"), asyncio.Event()])
async def test_a_saturated_server_is_healthy_as_long_as_tokens_come(client, backend, step):
    backend.script = say(step)
    asking = asyncio.ensure_future(get(client, "/health_generate"))
    await backend.until(lambda: backend.requests)
    backend.told = {"life of an engine": 1001}  # by requests of others
    assert (await asking)[0] == 200


@pytest.mark.parametrize("step", [Overloaded("the queue is full"), asyncio.Event()])
async def test_a_saturated_server_without_progress_is_not_healthy(backend, step):
    backend.script = say(step)
    async with serve(backend, FrontendOptions(health_timeout_s=0.05)) as client:
        status, answer = await get(client, "/health_generate")
    assert (status, answer["error"]["code"]) == (503, "no_node_available")
    assert "no token came within" in answer["error"]["message"]


@pytest.mark.parametrize(
    "told", [{}, {"life of an engine": 1000, "another": 7}, {"its next life": 3000}]
)
async def test_an_engine_that_comes_or_goes_is_no_progress(backend, told):
    backend.script = say(asyncio.Event())
    async with serve(backend, FrontendOptions(health_timeout_s=0.5)) as client:
        asking = asyncio.ensure_future(get(client, "/health_generate"))
        await backend.until(lambda: backend.requests)
        backend.told = told
        status, answer = await asking
    assert (status, answer["error"]["code"]) == (503, "no_node_available")


async def test_the_model_is_described(client):
    _, listed = await get(client, "/v1/models")
    assert [(card["id"], card["max_model_len"]) for card in listed["data"]] == [("smol", 8192)]
    assert (await get(client, "/v1/models/smol"))[0] == 200
    assert (await get(client, "/v1/models/other"))[0] == 404
    assert (await get(client, "/v1/models/a/b"))[0] == 404
    for path in ("/model_info", "/get_model_info"):
        _, info = await get(client, path)
        assert (info["model_path"], info["is_generation"]) == ("smol", True)
    for path in ("/server_info", "/get_server_info"):
        assert await get(client, path) == (200, {"internal_states": [{}], "role": "fake"})


async def test_adapters_are_listed_behind_the_model_they_belong_to(client, backend):
    backend.served = dataclasses.replace(backend.served, adapters=("sql", "law"))
    _, listed = await get(client, "/v1/models")
    assert [(card["id"], card.get("parent")) for card in listed["data"]] == [
        ("smol", None),
        ("sql", "smol"),
        ("law", "smol"),
    ]
    _, card = await get(client, "/v1/models/sql")
    assert (card["id"], card["parent"]) == ("sql", "smol")


@pytest.mark.parametrize("path", ["/v1/models/meta/llama:8b", "/v1/models/meta%2Fllama%3A8b"])
async def test_a_model_whose_name_has_slashes_is_described(client, backend, path):
    backend.served = dataclasses.replace(backend.served, name="meta/llama:8b")
    status, card = await get(client, URL(path, encoded=True))
    assert (status, card["id"]) == (200, "meta/llama:8b")


async def test_a_model_not_known_yet_is_answered_with_503(client, backend):
    backend.no_model = NoNodeAvailable("no node was reached yet")
    assert (await get(client, "/v1/models"))[0] == 503
    status, answer = await post(client, "/generate", {"text": "a"})
    assert (status, answer["error"]["message"]) == (503, "no node was reached yet")


async def test_metrics_join_the_backends_and_the_edges(client):
    await post(client, "/generate", {"text": "a", "max_new_tokens": 3})
    await get(client, "/nowhere")
    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    assert "fake_total 1.0" in lines
    assert 'tandem_http_requests_total{route="/generate",status="200"} 1.0' in lines
    assert 'tandem_http_requests_total{route="unknown",status="404"} 1.0' in lines
    assert "tandem_edge_output_tokens_total 3.0" in lines
    assert "tandem_edge_time_to_first_token_seconds_count 1.0" in lines
    assert "tandem_edge_generations_running 0.0" in lines
    assert "" not in lines


async def test_the_cache_is_flushed(client, backend):
    assert (await post(client, "/flush_cache", None))[0] == 200
    assert (await get(client, "/flush_cache"))[0] == 200
    assert backend.num_flushes == 2


async def test_an_unknown_route_is_answered_with_the_page_of_the_routes(client):
    status, answer = await get(client, "/nowhere")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert answer["error"]["message"] == "there is no /nowhere: /docs lists the routes"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/v1/embeddings", "generates text"),
        ("/score", "/v1/completions with echo"),
        ("/v1/audio/transcriptions", "text only"),
        ("/v1/images/generations", "text only"),
        ("/v1/batches", "tandem batch"),
        ("/v1/load_lora_adapter", "merge one into its model"),
        ("/load_lora_adapter", "merge one into its model"),
        ("/load", "/get_load"),
        ("/sleep", "POST /drain"),
        ("/update_weights_from_disk", "to each node"),
        ("/reset_prefix_cache", "/flush_cache"),
        ("/inference/v1/abort_requests", "/abort_request"),
    ],
)
async def test_a_route_of_others_is_answered_with_what_to_use_instead(client, path, sentence):
    status, answer = await post(client, path, {})
    assert (status, sentence in answer["error"]["message"]) == (404, True)


async def test_no_route_that_is_here_is_told_to_be_absent(client):
    async with client.get("/openapi.json") as response:
        paths = (await response.json())["paths"]
    assert {path: told for path in paths if (told := instead_of(path))} == {}


async def test_a_wrong_method_is_answered_with_the_right_ones(client):
    async with client.get("/generate") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST, PUT")
        assert "POST" in (await response.json())["error"]["message"]


async def test_aborting_nothing_is_refused(client):
    assert (await post(client, "/abort_request", {}))[0] == 400


class BrokenTokenizer:
    """Tells a text's least number of tokens, and fails over every text that it is to encode."""

    def __init__(self, tokenizer) -> None:
        self.least_tokens = tokenizer.least_tokens


async def test_a_text_of_10_mb_is_refused_without_being_tokenized(
    client, backend, tokenizer, capsys
):
    # Drawing a traceback with its locals takes longer than a loop may be held up.
    logs.configure("critical", "json")
    backend.served = dataclasses.replace(backend.served, tokenizer=BrokenTokenizer(tokenizer))
    assert (await post(client, "/generate", {"text": "word"}))[0] == 500
    status, answer = await post_large(client, "/generate", {"text": "word " * (2 * MIB)})
    assert status == 400
    assert "at least" in answer["error"]["message"]
    assert "8191" in answer["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "é"}],
)
async def test_without_the_key_only_health_and_metrics_answer(backend, headers):
    async with serve(
        backend, FrontendOptions(http=HttpOptions(api_keys=("other", "secret")))
    ) as client:
        for path in ("/generate", "/v1/completions"):
            status, answer = await post(client, path, {"text": "a"}, headers=headers)
            assert (status, answer["error"]["code"]) == (401, "unauthorized")
        async with client.get("/server_info", headers=headers) as response:
            assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
        for path in ("/health", "/live", "/metrics"):
            async with client.get(path, headers=headers) as response:
                assert response.status == 200


async def test_the_tokenizer_is_served_only_where_there_is_one(backend, client, tokenizer_dir):
    assert (await get(client, "/tokenizer"))[0] == 404
    files = {}
    async with serve(backend, FrontendOptions(tokenizer_files=lambda: files)) as other:
        assert (await get(other, "/tokenizer"))[0] == 503
        files |= tokenizer_files(tokenizer_dir)
        status, answer = await get(other, "/tokenizer")
    assert (status, answer["files"]) == (200, files)
    assert answer["hash"] == tokenizer_hash(files)


async def test_an_internal_error_tells_nothing_of_the_inside(client, backend, capsys):
    backend.script = say(MessageInvalid("secret detail"))
    status, answer = await post(client, "/generate", {"text": "a"})
    assert status == 500
    assert "secret" not in json.dumps(answer)


async def test_a_bug_is_answered_with_500_and_the_server_lives(client, backend, logs):
    backend.script = say("no step at all")
    status, answer = await post(client, "/generate", {"text": "a"})
    assert [entry["event"] for entry in logs] == ["request.crashed"]
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert (await get(client, "/health"))[0] == 200
