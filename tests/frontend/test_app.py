import asyncio
import dataclasses
import json

import pytest
from yarl import URL

from tandem.frontend.http.absent_routes import replacement_for
from tandem.frontend.options import FrontendOptions, HttpOptions
from tandem.frontend.text.tokenizer import tokenizer_hash
from tandem.frontend.text.tokenizer_files import tokenizer_files
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
async def test_body_that_is_not_a_json_object_is_rejected(client, path, data, sentence):
    async with client.post(path, data=data) as response:
        assert response.status == 400
        assert sentence in (await response.json())["error"]["message"]


async def test_health_is_200_only_while_requests_can_be_served(client, backend):
    assert await get(client, "/health") == (200, {"status": "ok", "detail": "serving"})
    backend.is_serving = False
    assert await get(client, "/health") == (503, {"status": "unavailable", "detail": "no node"})


async def test_live_is_200_while_health_is_503(client, backend):
    backend.is_serving = False
    assert await get(client, "/live") == (200, {"status": "ok"})


async def test_health_generate_generates_one_token(client, backend):
    assert (await get(client, "/health_generate"))[0] == 200
    assert backend.requests[0].sampling.max_new_tokens == 1
    backend.script = say(NoNodeAvailable("no pair"))
    assert (await get(client, "/health_generate"))[0] == 503
    backend.script = say(length())
    assert (await get(client, "/health_generate"))[0] == 503


async def test_health_probe_counts_for_no_key(backend):
    options = FrontendOptions(http=HttpOptions(api_keys=("secret",)))
    async with serve(backend, options) as client:
        headers = {"Authorization": "Bearer secret"}
        async with client.get("/health_generate", headers=headers) as response:
            assert response.status == 200
    assert [request.client for request in backend.requests] == [""]


@pytest.mark.parametrize("step", [Overloaded("the queue is full"), asyncio.Event()])
async def test_saturated_server_with_progress_is_healthy(client, backend, step):
    backend.script = say(step)
    asking = asyncio.ensure_future(get(client, "/health_generate"))
    await backend.until(lambda: backend.requests)
    backend.told = {"life of an engine": 1001}  # progress on other requests
    assert (await asking)[0] == 200


@pytest.mark.parametrize("step", [Overloaded("the queue is full"), asyncio.Event()])
async def test_saturated_server_without_progress_is_unhealthy(backend, step):
    backend.script = say(step)
    async with serve(backend, FrontendOptions(health_timeout_s=0.05)) as client:
        status, answer = await get(client, "/health_generate")
    assert (status, answer["error"]["code"]) == (503, "no_node_available")
    assert "no token was generated within" in answer["error"]["message"]


@pytest.mark.parametrize(
    "told", [{}, {"life of an engine": 1000, "another": 7}, {"its next life": 3000}]
)
async def test_new_or_removed_engine_is_not_progress(backend, told):
    backend.script = say(asyncio.Event())
    async with serve(backend, FrontendOptions(health_timeout_s=0.5)) as client:
        asking = asyncio.ensure_future(get(client, "/health_generate"))
        await backend.until(lambda: backend.requests)
        backend.told = told
        status, answer = await asking
    assert (status, answer["error"]["code"]) == (503, "no_node_available")


async def test_model_info_describes_the_model(client):
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


async def test_models_lists_adapters_after_their_base_model(client, backend):
    backend.served = dataclasses.replace(backend.served, adapters={"sql": "sql@1", "law": "law@2"})
    _, listed = await get(client, "/v1/models")
    assert [(card["id"], card.get("parent")) for card in listed["data"]] == [
        ("smol", None),
        ("sql", "smol"),
        ("law", "smol"),
    ]
    _, card = await get(client, "/v1/models/sql")
    assert (card["id"], card["parent"]) == ("sql", "smol")


@pytest.mark.parametrize("path", ["/v1/models/meta/llama:8b", "/v1/models/meta%2Fllama%3A8b"])
async def test_model_name_may_contain_slashes(client, backend, path):
    backend.served = dataclasses.replace(backend.served, name="meta/llama:8b")
    status, card = await get(client, URL(path, encoded=True))
    assert (status, card["id"]) == (200, "meta/llama:8b")


async def test_unknown_model_at_startup_returns_503(client, backend):
    backend.no_model = NoNodeAvailable("no node was reached yet")
    assert (await get(client, "/v1/models"))[0] == 503
    status, answer = await post(client, "/generate", {"text": "a"})
    assert (status, answer["error"]["message"]) == (503, "no node was reached yet")


async def test_metrics_include_backend_and_edge(client):
    await post(client, "/generate", {"text": "a", "max_new_tokens": 3})
    await get(client, "/nowhere")
    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    assert "fake_total 1.0" in lines
    assert 'tandem_http_requests_total{route="/generate",status="200"} 1.0' in lines
    assert 'tandem_http_requests_total{route="unknown",status="404"} 1.0' in lines
    assert 'tandem_edge_output_tokens_total{model_name="smol"} 3.0' in lines
    assert 'tandem_edge_time_to_first_token_seconds_count{model_name="smol"} 1.0' in lines
    assert 'tandem_edge_generation_seconds_count{model_name="smol"} 1.0' in lines
    assert 'tandem_edge_generations_running{model_name="smol"} 0.0' in lines
    assert "" not in lines


async def test_flush_cache_reaches_the_backend(client, backend):
    assert (await post(client, "/flush_cache", None))[0] == 200
    assert backend.num_flushes == 1


async def test_unknown_route_404_names_the_docs_page(client):
    status, answer = await get(client, "/nowhere")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert answer["error"]["message"] == "there is no route /nowhere: /docs lists the routes"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/v1/embeddings", "does not support embeddings"),
        ("/score", "/v1/completions with echo"),
        ("/v1/audio/transcriptions", "text only"),
        ("/v1/images/generations", "text only"),
        ("/v1/batches", "tandem batch"),
        ("/load", "/get_load"),
        ("/sleep", "POST /drain"),
        ("/v1/responses/resp_1", "responses are not stored"),
        ("/update_weights_from_disk", "to each node"),
        ("/load_lora_adapter", "use /v1/load_lora_adapter"),
        ("/reset_prefix_cache", "/flush_cache"),
        ("/inference/v1/abort_requests", "/abort_request"),
    ],
)
async def test_route_of_other_servers_404_names_a_replacement(client, path, sentence):
    status, answer = await post(client, path, {})
    assert (status, sentence in answer["error"]["message"]) == (404, True)


async def test_no_existing_route_is_listed_as_absent(client):
    async with client.get("/openapi.json") as response:
        paths = (await response.json())["paths"]
    assert {path: told for path in paths if (told := replacement_for(path))} == {}


async def test_wrong_method_405_lists_allowed_methods(client):
    async with client.get("/generate") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST, PUT")
        assert "POST" in (await response.json())["error"]["message"]


async def test_abort_without_id_is_rejected(client):
    assert (await post(client, "/abort_request", {}))[0] == 400


class BrokenTokenizer:
    """Tells a text's least number of tokens, and fails over every text that it is to encode."""

    def __init__(self, tokenizer) -> None:
        self.min_tokens = tokenizer.min_tokens


async def test_10_mb_text_is_rejected_before_tokenization(client, backend, tokenizer, capsys):
    # Formatting a traceback with locals would block the loop for too long.
    logs.configure("critical", "json")
    backend.served = dataclasses.replace(backend.served, tokenizer=BrokenTokenizer(tokenizer))
    assert (await post(client, "/generate", {"text": "word"}))[0] == 500
    status, answer = await post_large(client, "/generate", {"text": "word " * (2 * MIB)})
    assert status == 400
    assert "the model's context length (8192 tokens)" in answer["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "é"}],
)
async def test_only_open_routes_answer_without_a_key(backend, headers):
    async with serve(
        backend, FrontendOptions(http=HttpOptions(api_keys=("other", "secret")))
    ) as client:
        for path in ("/generate", "/v1/completions"):
            status, answer = await post(client, path, {"text": "a"}, headers=headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        async with client.get("/server_info", headers=headers) as response:
            assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
        for path in ("/health", "/live", "/metrics"):
            async with client.get(path, headers=headers) as response:
                assert response.status == 200


async def test_tokenizer_route_exists_only_on_nodes(backend, client, tokenizer_dir):
    assert (await get(client, "/tokenizer"))[0] == 404
    files = {}
    async with serve(backend, FrontendOptions(tokenizer_files=lambda: files)) as other:
        assert (await get(other, "/tokenizer"))[0] == 503
        files |= tokenizer_files(tokenizer_dir)
        status, answer = await get(other, "/tokenizer")
    assert (status, answer["files"]) == (200, files)
    assert answer["hash"] == tokenizer_hash(files)


async def test_internal_error_hides_details_from_clients(client, backend, capsys):
    backend.script = say(MessageInvalid("secret detail"))
    status, answer = await post(client, "/generate", {"text": "a"})
    assert status == 500
    assert "secret" not in json.dumps(answer)


async def test_unexpected_exception_returns_500_and_the_server_continues(client, backend, logs):
    backend.script = say("no step at all")
    status, answer = await post(client, "/generate", {"text": "a"})
    assert [entry["event"] for entry in logs] == ["request.crashed"]
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert (await get(client, "/health"))[0] == 200
