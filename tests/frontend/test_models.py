"""Several models on one server: `model` chooses one by any of its names or by an adapter."""

import dataclasses

import pytest

from tandem.frontend.backend import ServedModels
from tandem.frontend.options import FrontendOptions
from tandem.frontend.replies.parser import formats_by_model
from tandem.wire.errors import NoNodeAvailable
from tests.frontend.conftest import serve
from tests.frontend.fakes import length, say, stop
from tests.frontend.helpers import ROUTES, each, post, post_large
from tests.frontend.test_adapters import ALL, BY_MODEL, SQL
from tests.frontend.test_tool_calls import SAID, WEATHER

NAMES = "'smol', 'tiny', 'big', 'sql'"
PROMPTS = {
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.fixture
def served(backend):
    """A backend of the models smol, which is also tiny, and big with the adapter sql."""
    small = backend.served
    backend.served = dataclasses.replace(small, aliases=("tiny",))
    backend.others = [
        dataclasses.replace(small, name="big", context_length=4000, adapters={"sql": SQL})
    ]
    backend.script = say(length(5))
    return backend


@pytest.mark.parametrize("path", ALL)
async def test_model_field_chooses_a_model_by_any_of_its_names(client, served, path):
    for name, model in [("smol", "smol"), ("tiny", "smol"), ("big", "big"), ("sql", "big")]:
        status, answer = await post(client, path, ALL[path] | {"model": name})
        assert status == 200
        assert served.models_asked.pop() == model
        assert served.requests[-1].adapter == (SQL if name == "sql" else "")
        if path in BY_MODEL:
            assert answer["model"] == ("sql" if name == "sql" else model)


@pytest.mark.parametrize("path", [*ALL, *PROMPTS])
@pytest.mark.parametrize(
    ("model", "status", "sentence"),
    [
        ({}, 400, f"model: is missing; this router serves {NAMES}"),
        ({"model": "default"}, 400, f"model: is missing; this router serves {NAMES}"),
        ({"model": 5}, 400, "model: must be a string"),
        ({"model": "huge"}, 404, f"model 'huge' is not served here; this cluster serves {NAMES}"),
    ],
)
async def test_missing_or_unknown_model_is_refused_with_the_names_there(
    client, served, path, model, status, sentence
):
    answered, answer = await post(client, path, ({**ALL, **PROMPTS})[path] | model)
    assert (answered, answer["error"]["message"]) == (status, sentence)
    assert served.requests == []


async def test_body_that_is_read_in_a_thread_chooses_its_model_too(client, served):
    await post_large(client, "/v1/completions", {"prompt": [5], "model": "big"})
    assert served.models_asked == ["big"]


async def test_model_that_no_pair_serves_is_unavailable_and_does_not_count(client, backend):
    backend.unavailable = {"big": "no decode node is known"}
    backend.script = say(length(5))
    status, answer = await post(client, "/v1/completions", {"prompt": [5], "model": "big"})
    assert (status, answer["error"]["message"]) == (503, "no decode node is known")
    assert (await post(client, "/v1/completions", {"prompt": [5]}))[0] == 200
    status, answer = await post(client, "/v1/completions", {"prompt": [5], "model": "huge"})
    assert status == 404


def test_adapter_of_a_served_model_comes_before_an_unavailable_model(backend):
    small = dataclasses.replace(backend.served, adapters={"big": SQL})
    served = ServedModels((small,), {"big": "no decode node is known", "huge": "loading"})
    assert served.choose("big") is small
    with pytest.raises(NoNodeAvailable, match="loading"):
        served.choose("huge")


async def test_all_names_and_adapters_are_listed(client, served):
    async with client.get("/v1/models") as response:
        cards = (await response.json())["data"]
    found = [(card["id"], card["root"], card["max_model_len"]) for card in cards]
    context = served.served.context_length
    assert found == [
        ("smol", "smol", context),
        ("tiny", "smol", context),
        ("big", "big", 4000),
        ("sql", "big", 4000),
    ]
    assert [card.get("parent") for card in cards] == [None, None, None, "big"]
    for card in cards:
        async with client.get(f"/v1/models/{card['id']}") as response:
            assert await response.json() == card
    async with client.get("/v1/models/huge") as response:
        assert response.status == 404


async def test_model_info_describes_the_model_that_the_query_names(client, served):
    for query, status in [("", 400), ("?model=huge", 404), ("?model=big", 200)]:
        async with client.get(f"/model_info{query}") as response:
            assert response.status == status
            answer = await response.json()
    assert answer["context_length"] == 4000


async def test_adapter_is_loaded_on_the_model_that_the_body_names(client, served):
    path, body = "/v1/load_lora_adapter", {"lora_name": "law", "lora_path": "/law"}
    for more, status in [
        ({}, 400),
        ({"model": "tiny"}, 200),
        ({"model": "big", "lora_name": "tiny"}, 400),
        ({"model": "smol", "lora_name": "sql"}, 400),
    ]:
        async with client.post(path, json=body | more) as response:
            assert response.status == status, await response.text()
    assert (served.models_asked, served.adapter_changes) == (["smol"], [("law", "/law", False)])


async def test_adapter_is_unloaded_from_its_model(client, served):
    async with client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}):
        assert served.models_asked == ["big"]


async def test_each_model_has_its_own_parsers(served, tokenizer):
    served.script = say(*each(tokenizer, SAID), stop(2))
    options = FrontendOptions(model_formats=formats_by_model(["tiny=hermes"], []))
    body = ROUTES["/v1/chat/completions"] | {"tools": WEATHER}
    async with serve(served, options) as client:
        for name, reason in [("smol", "tool_calls"), ("big", "stop")]:
            _, answer = await post(client, "/v1/chat/completions", body | {"model": name})
            assert answer["choices"][0]["finish_reason"] == reason


async def test_generate_on_a_server_of_one_model_ignores_unknown_names(client, backend):
    backend.script = say(length(5))
    status, _ = await post(client, "/generate", {"input_ids": [5], "model": "huge"})
    assert status == 200
