"""What may stand in OpenAI's bodies beside what OpenAI documents, and what is passed over."""

import json

import pytest

from tandem.frontend.backend import Bootstrap
from tandem.frontend.chat_template import ChatTemplate
from tandem.frontend.openai_body import read_chat
from tandem.frontend.reply_parser import reply_formats
from tandem.frontend.tokenizer import Tokenizer, tokenizer_files
from tests.frontend.conftest import serve
from tests.frontend.fakes import FakeBackend, length, say
from tests.frontend.helpers import post

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": CHAT}
BOOTSTRAP = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
# Of OpenAI's client, and of others' servers.
PASSED_OVER = {
    "user": "me",
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "k",
    "verbosity": "low",
    "modalities": ["text"],
    "stop": None,
    "suffix": None,
    "best_of": None,
    "response_format": {"type": "text"},
    "stream_interval": 3,
    "rid": "r",
}


@pytest.fixture
def said(backend):
    backend.script = say(length(5))


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize("path", ROUTES)
async def test_what_means_nothing_here_is_passed_over(client, path):
    assert (await post(client, path, ROUTES[path] | PASSED_OVER))[0] == 200


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize("path", ROUTES)
async def test_any_server_has_a_default_model(client, path):
    status, answer = await post(client, path, ROUTES[path] | {"model": "default"})
    assert (status, answer["model"]) == (200, "smol")
    assert (await post(client, path, ROUTES[path] | {"model": "other"}))[0] == 404


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize("path", ROUTES)
async def test_a_router_of_sglangs_kind_says_where_the_other_half_is(client, backend, path):
    assert (await post(client, path, ROUTES[path] | BOOTSTRAP))[0] == 200
    assert backend.bootstraps == [Bootstrap("10.0.0.1", 8998, 7)]
    # The node that samples first chooses.
    assert backend.requests[0].sampling.seed is None


BAD = {
    "one room for two": ({"prompt": ["a", "b"], **BOOTSTRAP}, "room of its own"),
    "n": ({"prompt": "a", "n": 2, **BOOTSTRAP}, "n is 1"),
    "lists for one": ({"prompt": "a", **BOOTSTRAP, "bootstrap_room": [1]}, "one entry for each"),
    "no room": ({"prompt": "a", "bootstrap_host": "a"}, "bootstrap_room: is missing"),
}


@pytest.mark.parametrize("name", BAD)
async def test_halves_that_cannot_meet_are_refused(client, name):
    body, sentence = BAD[name]
    status, answer = await post(client, "/v1/completions", body)
    assert status == 400
    assert sentence in answer["error"]["message"]


@pytest.mark.usefixtures("said")
async def test_a_stop_string_may_stay_by_vllms_name(client, tokenizer, backend):
    ids = tokenizer.encode("One two")
    backend.script = say(ids, length(5))
    body = {"prompt": "a", "stop": [" two"], "include_stop_str_in_output": True}
    _, answer = await post(client, "/v1/completions", body)
    assert answer["choices"][0]["text"] == "One two"


@pytest.mark.usefixtures("said")
async def test_a_developer_is_a_system_to_templates_that_know_none(client, backend, tokenizer):
    for role in ("developer", "system"):
        messages = [{"role": role, "content": "Be brief."}, *CHAT["messages"]]
        assert (await post(client, "/v1/chat/completions", {"messages": messages}))[0] == 200
    developer, system = [request.prompt_ids for request in backend.requests]
    assert developer == system


def test_a_developer_is_one_to_templates_that_know_it():
    template = ChatTemplate({"default": "{{ messages[0].role }}{# developer #}"}, {})
    assert template.render([{"role": "developer", "content": ""}]) == "developer"


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize(
    "function", [{"arguments": text} for text in ("", " \n", None, "{}")] + [{}]
)
async def test_a_call_in_the_history_may_be_without_arguments(
    client, backend, tokenizer, monkeypatch, function
):
    template = ChatTemplate({"default": "{{ messages[1].tool_calls[0].function | tojson }}"}, {})
    monkeypatch.setattr(tokenizer, "_template", template)
    call = {"id": "1", "type": "function", "function": {"name": "f"} | function}
    messages = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    status, answer = await post(client, "/v1/chat/completions", {"messages": messages})
    assert status == 200, answer
    assert backend.requests[0].prompt_ids == tokenizer.encode('{"name": "f", "arguments": {}}')


@pytest.mark.usefixtures("said")
async def test_reasoning_effort_reaches_the_template(client, backend, tokenizer, monkeypatch):
    template = ChatTemplate({"default": "{{ reasoning_effort }}"}, {})
    monkeypatch.setattr(tokenizer, "_template", template)
    body = CHAT | {"reasoning_effort": "high"}
    assert (await post(client, "/v1/chat/completions", body))[0] == 200
    assert backend.requests[0].prompt_ids == tokenizer.encode("high")


def test_an_answer_that_follows_a_grammar_is_not_read_for_calls(tokenizer):
    model = FakeBackend(tokenizer).served
    formats = reply_formats("llama3", "think")
    tools = [{"type": "function", "function": {"name": "f"}}]
    plain = read_chat(model, CHAT | {"tools": tools}, formats)
    bound = read_chat(
        model, CHAT | {"tools": tools, "response_format": {"type": "json_object"}}, formats
    )
    assert (plain.make_reply is None, bound.make_reply is None) == (False, True)
    # Marks of a format may be special tokens.
    assert [call.generations[0].rules.skip_special_tokens for call in (plain, bound)] == [
        False,
        True,
    ]


@pytest.mark.parametrize("path", ROUTES)
async def test_special_tokens_are_added_where_the_client_wants_them(tokenizer_dir, path):
    files = tokenizer_files(tokenizer_dir)
    config = json.loads(files["tokenizer_config.json"])
    config |= {"add_bos_token": True, "bos_token": "<|im_start|>", "chat_template": "a"}
    files.pop("chat_template.jinja", None)
    tokenizer = Tokenizer.from_files(files | {"tokenizer_config.json": json.dumps(config)})
    backend = FakeBackend(tokenizer)
    backend.script = say(length(5))
    async with serve(backend) as client:
        for asked in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            assert (await post(client, path, ROUTES[path] | asked))[0] == 200
    without = tokenizer.encode("a", add_special_tokens=False)
    expected = [without if "chat" in path else [1, *without], [1, *without], without]
    assert [request.prompt_ids for request in backend.requests] == expected


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize("path", ROUTES)
async def test_a_nucleus_of_nothing_is_the_likeliest_token(client, backend, path):
    assert (await post(client, path, ROUTES[path] | {"top_p": 0}))[0] == 200
    assert 0 < backend.requests[0].sampling.top_p < 1e-3
