"""Messages, calls and tools of every API: null fields, refusals, and objects that are no tools."""

import codecs
import json
from collections.abc import Iterator

import pytest

from tandem.frontend.apis.anthropic_body import read_messages
from tandem.frontend.apis.inference import read_inference
from tandem.frontend.apis.native import read_native
from tandem.frontend.apis.responses_body import read_responses
from tandem.frontend.chat.openai_body import read_chat, read_completion
from tandem.frontend.options import FrontendOptions
from tandem.frontend.text.chat_template import ChatTemplate
from tandem.wire.errors import InvalidRequest
from tests.frontend.fakes import length, say

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"x": {"type": ["integer", "null"], "default": None}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": null}'}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        USER,
    ],
    "tools": [TOOL],
    "stream_options": {},
    "chat_template_kwargs": {},
}
MESSAGES = {
    "max_tokens": 5,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm."},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": None}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "1"}],
                }
            ],
        },
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {},
    "output_config": {},
    "context_management": {},
}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": null}'},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "reasoning": {},
}
APIS = {
    "chat": (read_chat, CHAT),
    "chat with a format": (read_chat, CHAT | {"response_format": FORMAT}),
    "messages": (read_messages, MESSAGES),
    "responses": (read_responses, RESPONSES),
    "completions": (read_completion, {"prompt": "Hi", "stream_options": {}}),
    "generate": (read_native, {"text": "Hi", "sampling_params": {}}),
    "inference": (read_inference, {"token_ids": [5], "sampling_params": {}}),
}
# Values of the client or of a schema: null means something there.
OPAQUE = {"parameters", "input_schema", "schema", "arguments", "input"}
# Every optional field of some object in a body.
OPTIONAL = """
    content name description strict refusal tool_calls tool_call_id reasoning reasoning_content thinking
    audio  annotations function_call image_url cache_control citations signature id parameters is_error
    status  encrypted_content logprobs defer_loading input_examples allowed_callers
    disable_parallel_tool_use include_usage  continuous_usage_stats enable_thinking effort format
    summary generate_summary verbosity edits temperature top_p  top_k stop stop_sequences seed n user
    metadata system instructions tool_choice parallel_tool_calls  response_format stream stream_options
    priority cache_salt chat_template_kwargs logit_bias max_completion_tokens
"""


def objects(value: object) -> Iterator[dict]:
    """Yield every object in a body whose fields the server reads."""
    if isinstance(value, dict):
        yield value
        for name, field in value.items():
            if name not in OPAQUE or isinstance(field, list):
                yield from objects(field)
    elif isinstance(value, list):
        for entry in value:
            yield from objects(entry)


@pytest.fixture
def reads(backend, tokenizer, monkeypatch):
    """Return a function that reads a body and returns the request of its generation."""
    source = "{{ messages | tojson }}{{ tools | tojson }}{{ enable_thinking | default('unset') }}"
    monkeypatch.setattr(tokenizer, "_template", ChatTemplate({"default": source}, {}))

    def read(reader, body):
        [generation] = reader(backend.served, FrontendOptions(), body).generations
        prompt = tokenizer.decode(generation.request.prompt_ids, skip_special_tokens=False)
        return prompt, generation.request.sampling.grammar, generation.rules

    return read


@pytest.mark.parametrize("name", APIS)
def test_null_field_is_absent_at_every_level(reads, name):
    reader, body = APIS[name]
    expected = reads(reader, body)
    nulled = json.loads(json.dumps(body))
    num_nulls = 0
    for each in list(objects(nulled)):
        for field in OPTIONAL.split():
            if field not in each:
                each[field] = None
                num_nulls += 1
    assert reads(reader, nulled) == expected
    assert num_nulls > 50
    # What the client means by null stays null.
    assert ('"default": null' in expected[0]) == ("tools" in body)


def test_null_type_of_an_input_item_is_a_message(reads):
    item = {"type": None, "role": "user", "content": "Hi"}
    assert '"content": "Hi"' in reads(read_responses, {"input": [item]})[0]


def test_refusal_is_the_text_of_an_answer(reads):
    for answer in (
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"content": None, "refusal": "I cannot."},
    ):
        prompt, _, _ = reads(read_chat, {"messages": [USER, {"role": "assistant"} | answer, USER]})
        assert json.loads(prompt.partition("]null")[0] + "]")[1] == {
            "role": "assistant",
            "content": "I cannot.",
        }


def test_fields_of_tools_and_calls_keep_their_order(reads):
    tool = {"function": {"parameters": SCHEMA, "description": "é", "name": "f"}, "type": "function"}
    call = {"function": {"arguments": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}
    body = {
        "messages": [USER, {"role": "assistant", "content": "a", "tool_calls": [call]}],
        "tools": [tool],
    }
    prompt, _, _ = reads(read_chat, body)
    assert json.dumps([tool], ensure_ascii=False) in prompt
    assert json.dumps([call]) in prompt


FUNCTION = {"name": "f"}
NO_TOOLS = {
    "name alone": ({"tools": [{"name": "x"}]}, "tools.0.function: is missing"),
    "no name": ({"tools": [TOOL, {"type": "function", "function": {}}]}, "tools.1.function.name: "),
    "null name": ({"tools": [{"function": {"name": None}}]}, "tools.0.function.name: is missing"),
    "empty name": ({"tools": [{"function": {"name": ""}}]}, "tools.0.function.name: must have"),
    "text": ({"tools": ["x"]}, "tools.0: must be an object"),
    "null": ({"tools": [None]}, "tools.0: must be an object"),
    "null function": ({"tools": [{"function": None}]}, "tools.0.function: is missing"),
    "type": ({"tools": [TOOL | {"type": "web_search"}]}, "tools.0.type: must be 'function'"),
    "schema": (
        {"tools": [{"function": FUNCTION | {"parameters": [1]}}]},
        "tools.0.function.parameters: must be an object",
    ),
    "call": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages.1.tool_calls.0.function: is missing",
    ),
    "call without a name": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages.1.tool_calls.0.function.name: is missing",
    ),
    **{
        f"arguments {value}": (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": FUNCTION | {"arguments": value}}],
                    },
                ]
            },
            "messages.1.tool_calls.0.function.arguments: must be a string or an object",
        )
        for value in ([1], [])
    },
    "part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        "messages.0.content.0.text: is missing",
    ),
    "reasoning": (
        {"messages": [USER, {"role": "assistant", "reasoning": {"a": 1}}]},
        "messages.1.reasoning: must be a string",
    ),
}


@pytest.mark.parametrize("name", NO_TOOLS)
def test_object_of_another_shape_is_refused_by_field(reads, name):
    body, sentence = NO_TOOLS[name]
    with pytest.raises(InvalidRequest) as caught:
        reads(read_chat, {"messages": [USER]} | body)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5}),
        ("/generate", {"text": "a"}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
async def test_body_may_begin_with_a_byte_order_mark(client, backend, path, body):
    backend.script = say(length(5))
    data = codecs.BOM_UTF8 + json.dumps(body).encode()
    async with client.post(path, data=data) as response:
        assert response.status == 200, await response.text()
    async with client.post(path, data=codecs.BOM_UTF8) as response:
        assert "the body is empty" in await response.text()
