"""OpenAI's API: what its own client sees, what else may stand in bodies, and what is rejected."""

import json

import openai
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from tandem.frontend.backend import Bootstrap
from tandem.frontend.chat.openai_body import read_chat
from tandem.frontend.options import FrontendOptions
from tandem.frontend.replies.parser import reply_formats
from tandem.frontend.text.chat_template import ChatTemplate
from tandem.frontend.text.tokenizer import Tokenizer
from tandem.wire.errors import EngineFailed
from tandem.wire.generation import Grammar
from tests.frontend.conftest import serve
from tests.frontend.fakes import FakeBackend, length, say, stop
from tests.frontend.helpers import each, post, stream

EOS = 2
CHAT = [{"role": "user", "content": "Hi"}]
CHAT_BODY = {"messages": CHAT}


def prompt_of(tokenizer, messages) -> list[int]:
    return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)


def speak(backend: FakeBackend, text: str) -> list[int]:
    """Script an answer; return its ids, the stop token included."""
    backend.script = say(*each(backend.served.tokenizer, text), stop(EOS))
    return [*backend.served.tokenizer.encode(text), EOS]


async def test_completion_returns_text_and_usage(sdk, backend, tokenizer):
    ids = speak(backend, " Paris.")
    answer = await sdk.completions.create(model="smol", prompt="The capital is", seed=1)
    assert answer.object == "text_completion"
    [choice] = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, " Paris.", "stop")
    num_prompt = len(tokenizer.encode("The capital is"))
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == len(ids)
    assert answer.usage.total_tokens == num_prompt + len(ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == num_prompt // 2
    assert backend.requests[0].sampling.max_new_tokens == 16
    assert backend.requests[0].sampling.seed == 1


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [[81]]),
        (["a", "b"], [[81], [82]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
async def test_completion_prompt_has_four_forms(sdk, backend, prompt, expected):
    backend.script = say(length(5))
    answer = await sdk.completions.create(model="smol", prompt=prompt, n=2)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    asked = [request.prompt_ids for request in backend.requests]
    assert asked == [ids for ids in expected for _ in range(2)]
    assert answer.usage.prompt_tokens == sum(map(len, expected))


async def test_echo_prepends_the_prompt(sdk, backend):
    speak(backend, " b")
    for prompt in ("a", [81]):
        answer = await sdk.completions.create(model="smol", prompt=prompt, echo=True)
        assert answer.choices[0].text == "a b"
        chunks = await sdk.completions.create(model="smol", prompt=prompt, echo=True, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in chunks]) == "a b"


async def test_completion_stream_joins_to_the_text(sdk, backend):
    speak(backend, " Paris is large.")
    chunks = [
        chunk
        async for chunk in await sdk.completions.create(
            model="smol", prompt="a", stream=True, stream_options={"include_usage": True}
        )
    ]
    *texts, usage = chunks
    assert "".join([chunk.choices[0].text for chunk in texts]) == " Paris is large."
    reasons = [chunk.choices[0].finish_reason for chunk in texts]
    assert reasons == [None] * (len(texts) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in texts)
    assert (usage.choices, usage.usage.completion_tokens) == ([], 5)


async def test_chat_returns_a_message_and_usage(sdk, backend, tokenizer):
    speak(backend, "Hello!")
    answer = await sdk.chat.completions.create(model="smol", messages=CHAT)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello!")
    assert choice.finish_reason == "stop"
    [asked] = backend.requests
    assert asked.prompt_ids == prompt_of(tokenizer, CHAT)
    assert asked.sampling.max_new_tokens == 8192 - len(asked.prompt_ids)


async def test_chat_stream_joins_to_the_message(sdk, backend):
    speak(backend, "Hello you")
    chunks = [
        chunk
        async for chunk in await sdk.chat.completions.create(
            model="smol",
            messages=CHAT,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    first, *texts, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert [chunk.choices[0].delta.content for chunk in texts] == ["Hello", " you"]
    assert last.choices[0].delta.content is None
    assert [chunk.choices[0].finish_reason for chunk in (*texts, last)] == [None, None, "stop"]
    assert (usage.choices, usage.usage.completion_tokens) == ([], 3)
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


async def test_continuous_usage_is_in_every_chunk(client, backend):
    speak(backend, "Hello you")
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = await stream(client, "/v1/completions", {"prompt": "a", "stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in got] == [1, 2, 3, 3]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def test_chat_response_format_sets_the_grammar(sdk, backend):
    backend.script = say(length(5))
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for asked in (wrapped, {"type": "json_object"}, {"type": "text"}):
        await sdk.chat.completions.create(model="smol", messages=CHAT, response_format=asked)
    schema, any_object, text = [request.sampling.grammar for request in backend.requests]
    assert (schema.kind, json.loads(schema.text)) == ("json_schema", SCHEMA)
    assert any_object == Grammar(kind="json_object")
    assert text is None


async def test_extra_parameters_reach_the_engine(sdk, backend):
    backend.script = say(length(5))
    extra = {
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "skip_special_tokens": False,
        "priority": -3,
        "cache_salt": "tenant",
        "extra_key": "team",
    }
    await sdk.chat.completions.create(
        model="smol", messages=CHAT, max_tokens=7, logit_bias={"5": 1}, extra_body=extra
    )
    sampling = backend.requests[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (3, 0.1, 1.5)
    assert (sampling.ignore_eos, sampling.min_new_tokens, sampling.stop_token_ids) == (True, 2, [9])
    assert (sampling.max_new_tokens, sampling.logit_bias) == (7, {5: 1.0})
    assert (backend.requests[0].priority, backend.requests[0].cache_salt) == (-3, "tenant\nteam")


async def test_message_content_may_be_a_list_of_parts(client, backend, tokenizer):
    backend.script = say(length(5))
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert (await post(client, "/v1/chat/completions", body))[0] == 200
    joined = prompt_of(tokenizer, [{"role": "user", "content": "Hi\nyou"}])
    assert backend.requests[0].prompt_ids == joined


async def test_tool_calls_without_content_are_accepted(client, backend):
    backend.script = say(length(5))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    body = {"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert (await post(client, "/v1/chat/completions", body))[0] == 200


async def test_unknown_model_gets_404(sdk):
    with pytest.raises(openai.NotFoundError, match="'smol'") as caught:
        await sdk.chat.completions.create(model="gpt-9", messages=CHAT)
    assert caught.value.code == "model_not_found"


async def test_openai_client_raises_on_a_stream_error(sdk, backend):
    backend.script = say([81], EngineFailed("the device is gone"))
    chunks = aiter(await sdk.completions.create(model="smol", prompt="a", stream=True))
    assert (await anext(chunks)).choices[0].text == "a"
    with pytest.raises(openai.APIError, match="the device is gone"):
        await anext(chunks)


async def test_stream_error_ends_its_choice_with_abort(client, backend):
    backend.script = say([81], EngineFailed("the device is gone"))
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT_BODY)):
        *_, last = await stream(client, path, body)
        assert last["choices"][0]["finish_reason"] == "abort"
        assert last["error"]["code"] == "engine_failed"


BAD_COMPLETIONS = {
    "no prompt": ({}, "prompt: is missing"),
    "empty list": ({"prompt": []}, "prompt: must have at least 1 entry"),
    "mixed": (
        {"prompt": ["a", 5]},
        "the entries of the prompt must all be strings, all be integers",
    ),
    "true logprobs": ({"prompt": "a", "logprobs": True}, "logprobs: must be an integer"),
    "best_of list": ({"prompt": "a", "best_of": [1]}, "best_of: must equal n"),
    "best_of": ({"prompt": "a", "best_of": 3}, "best_of: must equal n"),
    "model": ({"prompt": "a", "model": 5}, "model: must be a string"),
}
BAD_CHATS = {
    "no messages": ({}, "messages: is missing"),
    "empty": ({"messages": []}, "messages: must have at least 1 entry"),
    "no role": ({"messages": [{"content": "a"}]}, "messages.0.role: is missing"),
    "content": (
        {"messages": [{"role": "user", "content": 5}]},
        "messages.0.content: must be a str",
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "'image_url' is not supported",
    ),
    "arguments": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                },
            ]
        },
        "tool_calls: arguments are not valid JSON",
    ),
    "deep arguments": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}],
                },
            ]
        },
        "tool_calls: arguments are not valid JSON",
    ),
    "top alone": (CHAT_BODY | {"top_logprobs": 1}, "top_logprobs: requires logprobs"),
}


@pytest.mark.parametrize("name", BAD_COMPLETIONS)
async def test_invalid_completion_body_gets_a_message(client, name):
    body, sentence = BAD_COMPLETIONS[name]
    status, answer = await post(client, "/v1/completions", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert sentence in answer["error"]["message"]


@pytest.mark.parametrize("name", BAD_CHATS)
async def test_invalid_chat_body_gets_a_message(client, name):
    body, sentence = BAD_CHATS[name]
    status, answer = await post(client, "/v1/chat/completions", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert sentence in answer["error"]["message"]


async def test_disabled_unsupported_fields_are_accepted(client, backend):
    backend.script = say(length(5))
    off = {"logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "tools": []}
    assert (await post(client, "/v1/chat/completions", CHAT_BODY | off))[0] == 200
    for none in (None, False):
        body = {"prompt": "a", "logprobs": none, "best_of": 1, "suffix": None}
        assert (await post(client, "/v1/completions", body))[0] == 200
    assert [request.logprobs for request in backend.requests] == [None] * 3


async def test_stream_without_stream_options_has_no_usage(client, backend):
    speak(backend, "Hello you")
    got = await stream(client, "/v1/completions", {"prompt": "a"})
    assert all("usage" not in chunk for chunk in got)


async def test_max_completion_tokens_sets_max_new_tokens(sdk, backend):
    backend.script = say(length(5))
    await sdk.chat.completions.create(model="smol", messages=CHAT, max_completion_tokens=3)
    assert backend.requests[0].sampling.max_new_tokens == 3


ROUTES = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": CHAT_BODY}
BOOTSTRAP = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
# Fields of OpenAI's client and of other servers.
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
async def test_fields_without_effect_are_ignored(client, path):
    assert (await post(client, path, ROUTES[path] | PASSED_OVER))[0] == 200


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize("path", ROUTES)
async def test_model_name_default_is_accepted(client, path):
    status, answer = await post(client, path, ROUTES[path] | {"model": "default"})
    assert (status, answer["model"]) == (200, "smol")
    assert (await post(client, path, ROUTES[path] | {"model": "other"}))[0] == 404


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize("path", ROUTES)
async def test_bootstrap_fields_reach_the_backend(client, backend, path):
    assert (await post(client, path, ROUTES[path] | BOOTSTRAP))[0] == 200
    assert backend.bootstraps == [Bootstrap("10.0.0.1", 8998, 7)]
    # The node that samples first chooses the seed.
    assert backend.requests[0].sampling.seed is None


@pytest.mark.usefixtures("said")
async def test_prompts_of_a_list_use_the_rooms_after_the_given_one(client, backend):
    body = {"prompt": ["a", "b"], "n": 2, **BOOTSTRAP}
    assert (await post(client, "/v1/completions", body))[0] == 200
    assert [each.room for each in backend.bootstraps] == [7, 8, 9, 10]


@pytest.mark.usefixtures("said")
async def test_include_stop_str_in_output_keeps_the_stop(client, tokenizer, backend):
    ids = tokenizer.encode("One two")
    backend.script = say(ids, length(5))
    body = {"prompt": "a", "stop": [" two"], "include_stop_str_in_output": True}
    _, answer = await post(client, "/v1/completions", body)
    assert answer["choices"][0]["text"] == "One two"


@pytest.mark.usefixtures("said")
async def test_developer_role_becomes_system_for_older_templates(client, backend, tokenizer):
    for role in ("developer", "system"):
        messages = [{"role": role, "content": "Be brief."}, *CHAT_BODY["messages"]]
        assert (await post(client, "/v1/chat/completions", {"messages": messages}))[0] == 200
    developer, system = [request.prompt_ids for request in backend.requests]
    assert developer == system


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize(
    "function", [{"arguments": text} for text in ("", " \n", None, "{}")] + [{}]
)
async def test_call_in_history_may_lack_arguments(
    client, backend, tokenizer, monkeypatch, function
):
    template = ChatTemplate({"default": "{{ messages[1].tool_calls[0].function | tojson }}"}, {})
    monkeypatch.setattr(tokenizer, "_template", template)
    call = {"id": "1", "type": "function", "function": {"name": "f"} | function}
    messages = [
        *CHAT_BODY["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    status, answer = await post(client, "/v1/chat/completions", {"messages": messages})
    assert status == 200, answer
    assert backend.requests[0].prompt_ids == tokenizer.encode('{"name": "f", "arguments": {}}')


@pytest.mark.usefixtures("said")
async def test_reasoning_effort_reaches_the_template(client, backend, tokenizer, monkeypatch):
    template = ChatTemplate({"default": "{{ reasoning_effort }}"}, {})
    monkeypatch.setattr(tokenizer, "_template", template)
    body = CHAT_BODY | {"reasoning_effort": "high"}
    assert (await post(client, "/v1/chat/completions", body))[0] == 200
    assert backend.requests[0].prompt_ids == tokenizer.encode("high")


def test_answer_with_a_grammar_is_not_parsed_for_calls(tokenizer):
    model = FakeBackend(tokenizer).served
    options = FrontendOptions(reply_formats=reply_formats("llama3", ""))
    body = CHAT_BODY | {"tools": [{"type": "function", "function": {"name": "f"}}]}
    plain = read_chat(model, options, body)
    bound = read_chat(model, options, body | {"response_format": {"type": "json_object"}})
    assert (plain.make_reply is None, bound.make_reply is None) == (False, True)
    # The marks of a format may be special tokens.
    assert [call.generations[0].rules.skip_special_tokens for call in (plain, bound)] == [
        False,
        True,
    ]


@pytest.mark.parametrize("path", ROUTES)
async def test_add_special_tokens_applies_to_prompts(tokenizer, path):
    model = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    model.post_processor = TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    tokenizer = Tokenizer(model, {"chat_template": "a"})
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
async def test_top_p_zero_selects_the_most_likely_token(client, backend, path):
    assert (await post(client, path, ROUTES[path] | {"top_p": 0}))[0] == 200
    assert 0 < backend.requests[0].sampling.top_p < 1e-3


async def test_continue_final_message_cuts_the_prompt(client, tokenizer, backend):
    speak(backend, " two")
    begun = [*CHAT, {"role": "assistant", "content": "One,"}]
    asked = {"messages": begun, "continue_final_message": True}
    for more in ({}, {"add_generation_prompt": False}):
        assert (await post(client, "/v1/chat/completions", asked | more))[0] == 200
        prompt = tokenizer.decode(backend.requests[-1].prompt_ids, skip_special_tokens=False)
        assert prompt.endswith("<|im_start|>assistant\nOne,")
    for wrong, said in (
        ({"add_generation_prompt": True}, "cannot be combined with add_generation_prompt"),
        ({"messages": CHAT}, "the last message must be the assistant's"),
    ):
        status, answer = await post(client, "/v1/chat/completions", asked | wrong)
        assert status == 400
        assert said in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "matched", "reason"),
    [
        ({}, EOS, None),
        ({"stop": ["is"]}, "is", "is"),
        ({"max_tokens": 1}, None, None),
    ],
)
async def test_choice_has_matched_stop_and_stop_reason(
    client, backend, path, fields, matched, reason
):
    speak(backend, "Paris is big")
    if "max_tokens" in fields:
        backend.script = say(length(5))
    body = {"prompt": "a", "messages": CHAT} | fields
    body.pop("messages" if path == "/v1/completions" else "prompt")
    whole = (await post(client, path, body))[1]["choices"][0]
    ends = [chunk["choices"][0] for chunk in await stream(client, path, body) if chunk["choices"]]
    for choice in (whole, ends[-1]):
        assert (choice["matched_stop"], choice["stop_reason"]) == (matched, reason)
    assert all("matched_stop" not in choice for choice in ends[:-1])
