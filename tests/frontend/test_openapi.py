import json
import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.frontend.apis.anthropic_body import MessagesBody
from tandem.frontend.apis.inference import InferenceBody
from tandem.frontend.apis.native import GenerateBody
from tandem.frontend.apis.responses_body import ResponsesBody
from tandem.frontend.apis.tokenizing import DetokenizeBody, TokenizeBody
from tandem.frontend.app import create_app
from tandem.frontend.chat.grammars import OpenAIGrammar
from tandem.frontend.chat.openai_body import ChatBody, CompletionBody
from tandem.frontend.chat.sampling import CompletionSampling, NativeSampling
from tandem.frontend.options import FrontendOptions, HttpOptions
from tests.frontend.conftest import serve

WITH_KEYS = FrontendOptions(http=HttpOptions(api_keys=("k",)), tokenizer_files=dict)
REFERENCE = "#/components/schemas/"


async def document(client) -> dict:
    async with client.get("/openapi.json") as response:
        assert (response.status, response.content_type) == (200, "application/json")
        return await response.json()


def references(value) -> set[str]:
    return {
        match.removeprefix(REFERENCE)
        for match in re.findall(r'"\$ref": "([^"]+)"', json.dumps(value))
    }


async def test_document_contains_every_route(backend):
    options = WITH_KEYS
    app = create_app(backend, options)
    served = {
        (route.method.lower(), re.sub(r":[^}]*", "", route.resource.canonical))
        for route in app.router.routes()
        if route.method != "HEAD"
    }
    async with serve(backend, options) as client:
        found = await document(client)
    assert {(method, path) for path, item in found["paths"].items() for method in item} == served
    assert ("get", "/v1/models/{name}") in served


async def test_document_references_resolve(client):
    found = await document(client)
    assert found["openapi"] == "3.1.0"
    assert references(found) <= set(found["components"]["schemas"])


async def test_document_bodies_have_all_model_fields(client):
    found = await document(client)
    schemas = found["components"]["schemas"]
    body = found["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    fields = {name for part in references(body) for name in schemas[part].get("properties", ())}
    assert {
        "prompt",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "echo",
        "response_format",
    } <= fields
    assert {"type": "string"} in schemas["GenerateBody"]["properties"]["text"]["anyOf"]
    assert schemas["OpenAISampling"]["properties"]["n"]["maximum"] == 128


async def test_document_describes_answers_events_and_errors(client):
    answers = (await document(client))["paths"]["/generate"]["post"]["responses"]
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    assert references(answers["200"]["content"]["text/event-stream"]) == {"Generated"}
    assert references(answers["default"]) == {"Error"}


async def test_document_describes_anthropic_events_and_errors(client):
    answers = (await document(client))["paths"]["/v1/messages"]["post"]["responses"]
    events = answers["200"]["content"]["text/event-stream"]
    assert references(events) == {"AnthropicEvent"}
    assert set(events["schema"]["properties"]) == {"event", "data"}
    assert references(answers["default"]) == {"AnthropicError"}


async def test_document_has_security_only_with_api_keys(client, backend):
    open_to_all = await document(client)
    assert "security" not in open_to_all
    async with serve(backend, WITH_KEYS) as guarded:
        found = await document(guarded)
    assert found["security"] == [{"key": []}]
    assert found["paths"]["/health"]["get"]["security"] == []


async def test_docs_page_lists_every_route_and_loads_nothing(client):
    paths = (await document(client))["paths"]
    async with client.get("/docs") as response:
        page = await response.text()
        policy = response.headers["Content-Security-Policy"]
    assert response.content_type == "text/html"
    assert all(path in page for path in paths)
    assert "<script" not in page
    assert "//" not in page
    assert "default-src 'none'" in policy


NUMBERS = st.integers() | st.floats() | st.just(10**400)
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
BODIES = (
    *(GenerateBody, NativeSampling, CompletionBody, CompletionSampling, ChatBody, OpenAIGrammar),
    *(InferenceBody, MessagesBody, ResponsesBody, TokenizeBody, DetokenizeBody),
)
FIELDS = sorted(frozenset().union(*(body.names() for body in BODIES), {"best_of", "suffix"}))
GOOD = {
    "/generate": {"input_ids": [5], "max_new_tokens": 2},
    "/v1/completions": {"prompt": [5], "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/abort_request": {"rid": "a"},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 2}},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.sampled_from(sorted(GOOD)), st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=3))
async def test_no_generated_body_causes_a_500(client, path, junk):
    data = json.dumps(GOOD[path] | junk)
    async with client.post(path, data=data) as response:
        answer = await response.read()
    assert response.status in {200, 400, 404}, (data, answer)
    if response.content_type == "application/json" and response.status != 200:
        assert json.loads(answer)["error"]["message"]
