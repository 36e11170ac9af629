"""Selecting a LoRA adapter: by `model` in OpenAI's and Anthropic's APIs, or by SGLang's `lora_path`."""

import dataclasses

import pytest

from tests.frontend.fakes import length, say
from tests.frontend.helpers import ROUTES, post

BY_MODEL = {path: body for path, body in ROUTES.items() if path != "/generate"} | {
    "/inference/v1/generate": {"token_ids": [5]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
    "/v1/responses": {"input": "Hi"},
}
ALL = BY_MODEL | ROUTES
SQL, LAW = "sql@1f", "law@2e"


@pytest.fixture
def served(backend):
    backend.served = dataclasses.replace(backend.served, adapters={"sql": SQL, "law": LAW})
    backend.script = say(length(5))
    return backend


def adapters(backend):
    return [request.adapter for request in backend.requests]


@pytest.mark.parametrize("path", BY_MODEL)
async def test_model_field_selects_an_adapter(client, served, path):
    for name in ("sql", "smol", "default"):
        status, answer = await post(client, path, BY_MODEL[path] | {"model": name})
        assert (status, answer["model"]) == (200, "smol" if name == "default" else name)
    assert adapters(served) == [SQL, "", ""]
    assert (await post(client, path, BY_MODEL[path] | {"model": "poems"}))[0] == 404


@pytest.mark.parametrize("path", ALL)
async def test_lora_path_selects_an_adapter(client, served, path):
    for name in ("law", "", None):
        assert (await post(client, path, ALL[path] | {"lora_path": name}))[0] == 200
    assert adapters(served) == [LAW, "", ""]
    status, answer = await post(client, path, ALL[path] | {"lora_path": "poems"})
    assert status == 400
    assert (
        answer["error"]["message"]
        == "lora_path: 'poems' is not loaded; loaded adapters: 'sql', 'law'"
    )


async def test_each_prompt_of_a_batch_may_select_an_adapter(client, served):
    body = {"input_ids": [[5], [6], [7]], "lora_path": ["law", None, "sql"]}
    assert (await post(client, "/generate", body))[0] == 200
    found = {request.prompt_ids[0]: request.adapter for request in served.requests}
    assert found == {5: LAW, 6: "", 7: SQL}
    body |= {"lora_path": ["law"]}
    assert (await post(client, "/generate", body))[0] == 400


async def test_conflicting_model_and_lora_path_are_rejected(client, served):
    body = {"prompt": [5], "model": "sql", "lora_path": "law"}
    assert (await post(client, "/v1/completions", body))[0] == 400
    assert (await post(client, "/v1/completions", body | {"lora_path": "sql"}))[0] == 200


async def test_adapter_of_a_model_without_adapters_is_rejected(client, backend):
    status, answer = await post(client, "/generate", {"input_ids": [5], "lora_path": "law"})
    assert status == 400
    assert "loaded adapters: none" in answer["error"]["message"]
    assert backend.requests == []


@pytest.mark.parametrize(
    ("change", "body", "verb"),
    [
        ("load", {"lora_path": "/new", "load_inplace": True, "a_field_of_the_future": 1}, "added"),
        ("unload", {}, "removed"),
    ],
)
async def test_adapters_are_loaded_and_unloaded_with_vllms_bodies(
    client, served, change, body, verb
):
    body = {"lora_name": "sql"} | body
    async with client.post(f"/v1/{change}_lora_adapter", json=body) as response:
        sentence = f"Success: LoRA adapter 'sql' {verb} successfully."
        assert (response.status, await response.text()) == (200, sentence)
    assert served.adapter_changes == [("sql", "/new", True) if change == "load" else ("sql",)]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"lora_path": "/a"}, "lora_name: is missing"),
        ({"lora_name": "a"}, "lora_path: is missing"),
        ({"lora_name": "", "lora_path": "/a"}, "lora_name: must have at least 1 character"),
        ({"lora_name": "a\0b", "lora_path": "/a"}, "lora_name: must match"),
        ({"lora_name": "smol", "lora_path": "/a"}, "conflicts with a served base model"),
        ({"lora_name": "default", "lora_path": "/a"}, "conflicts with a served base model"),
        ({"lora_name": "a", "lora_path": "/a", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
    ],
)
async def test_invalid_adapter_is_refused_before_any_node_gets_it(client, served, body, sentence):
    status, answer = await post(client, "/v1/load_lora_adapter", body)
    assert status == 400
    assert sentence in answer["error"]["message"]
    assert served.adapter_changes == []


async def test_unloading_an_unknown_adapter_is_a_404(client, served):
    status, answer = await post(client, "/v1/unload_lora_adapter", {"lora_name": "poems"})
    assert (status, answer["error"]["code"]) == (404, "adapter_not_found")
