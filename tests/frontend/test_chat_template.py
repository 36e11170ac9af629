"""Prompts of chats, by template: each template gets calls, empty contents, roles and reasoning as it takes them."""

import json
import subprocess
import sys

import pytest

from tandem.frontend.chat.body import validate
from tandem.frontend.chat.messages import ChatMessage
from tandem.frontend.chat.openai_body import chat_text, checked_chat
from tandem.frontend.text.chat_template import ChatTemplate
from tandem.wire.errors import InvalidRequest
from tests.frontend.chat_templates import TEMPLATES
from tests.frontend.fakes import FakeBackend

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "Weather?"}
OBJECT, TEXT = {"city": "Rome", "días": 2}, '{"city": "Rome", "días": 2}'


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate({"default": TEMPLATES[name]}, SPECIAL_TOKENS)


def render(name: str, *messages: dict, add_generation_prompt: bool = False) -> str:
    checked = [validate(ChatMessage, message).for_template(message) for message in messages]
    return template_of(name).render(checked, add_generation_prompt=add_generation_prompt)


def call(arguments: object, **fields) -> dict:
    function = {"name": "weather", "arguments": arguments}
    made = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [made]} | fields


CALLS = {
    "deepseek_r1": f"<|call|>function<|sep|>weather\n```json\n{TEXT}\n```<|/call|>",
    "deepseek_v3": f"<|call|>function<|sep|>weather\n```json\n{TEXT}\n```<|/call|>",
    "deepseek_v31": f"<|call|>weather<|sep|>{TEXT}<|/call|>",
    "functionary_v31": f"<function=weather>{TEXT}</function>",
    "tilde": f"<weather>{TEXT}</>",
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {TEXT}}}\n</tool_call>',
    "qwen25": f'<tool_call>\n{{"name": "weather", "arguments": {TEXT}}}\n</tool_call>',
    "qwen3": f'<tool_call>\n{{"name": "weather", "arguments": {TEXT}}}\n</tool_call>',
    "llama31": f'{{"name": "weather", "parameters": {TEXT}}}',
    "mistral_nemo": f'[{{"name": "weather", "arguments": {TEXT}, "id": "call00001"}}]',
    "glm45": "<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>días</arg_key>\n<arg_value>2</arg_value>",
    "minimax_m2": '<parameter name="city">Rome</parameter><parameter name="días">2</parameter>',
    "gpt_oss": f"to=functions.weather<|channel|>commentary json<|message|>{TEXT}<|call|>",
}


@pytest.mark.parametrize("arguments", [OBJECT, TEXT], ids=["object", "text"])
@pytest.mark.parametrize("name", CALLS)
def test_arguments_have_the_form_that_the_template_takes(name, arguments):
    result = {"role": "tool", "content": "18 C", "tool_call_id": "call00001"}
    assert CALLS[name] in render(name, USER, call(arguments), result)


@pytest.mark.parametrize("name", ["deepseek_v31", "hermes"])
@pytest.mark.parametrize("arguments", ["", " \n", None, {}, "{}"])
def test_missing_arguments_are_an_empty_object(name, arguments):
    assert "{}" in render(name, USER, call(arguments))


def test_text_arguments_stay_as_the_model_wrote_them():
    written = '{"city":"Rome" }'
    assert written in render("deepseek_v3", USER, call(written))


def test_each_named_template_has_its_own_form():
    sources = {"default": TEMPLATES["deepseek_v31"], "tool_use": TEMPLATES["glm45"]}
    template = ChatTemplate(sources, SPECIAL_TOKENS)
    assert CALLS["deepseek_v31"] in template.render([USER, call(TEXT)])
    assert CALLS["glm45"] in template.render([USER, call(TEXT)], tools=[{"type": "function"}])


def test_template_that_refuses_tools_still_gets_its_form():
    refuses = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    template = ChatTemplate({"default": refuses + TEMPLATES["deepseek_v31"]}, SPECIAL_TOKENS)
    assert CALLS["deepseek_v31"] in template.render([USER, call(TEXT)])


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
@pytest.mark.parametrize("name", CALLS)
def test_calls_without_text_are_rendered_whatever_the_client_sends(name, content):
    sent = call(TEXT)
    del sent["content"]
    assert CALLS[name] in render(name, USER, sent | content)


@pytest.mark.parametrize("name", TEMPLATES)
def test_null_content_of_calls_is_not_written_as_a_word(name):
    text = render(name, USER, call(TEXT)).replace("Answer None", "")
    assert "None" not in text
    assert "null" not in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_answer_with_an_empty_list_of_calls_is_an_answer_without_calls(name):
    answer = {"role": "assistant", "content": "Sunny."}
    assert render(name, USER, answer | {"tool_calls": []}) == render(name, USER, answer)
    assert render(name, USER, answer | {"tool_calls": None}) == render(name, USER, answer)
    assert "Sunny." in render(name, USER, answer)


@pytest.mark.parametrize("name", TEMPLATES)
def test_null_content_without_calls_is_empty(name):
    empty, null = (
        render(name, USER, {"role": "assistant", "content": content}, USER)
        for content in ("", None)
    )
    assert null == empty


def test_tool_result_may_be_null():
    result = {"role": "tool", "content": None, "tool_call_id": "call00001"}
    assert "<|output|><|/output|>" in render("deepseek_v3", USER, call(TEXT), result)


BRIEF = {"role": "developer", "content": "Be brief."}
# Templates that know the role, with what they write for it.
DEVELOPER = {
    "gpt_oss": "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>",
    "qwen25": "<|im_start|>system\nBe brief.<|im_end|>",
    "qwen3": "<|im_start|>system\nBe brief.<|im_end|>",
    "zephyr": "<|system|>\nBe brief.</s>",
    "llama31": "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>",
}
VARIABLE = "{% set developer = 'developer' %}{% set developer_prompt = developer %}"


@pytest.mark.parametrize("prefix", ["", VARIABLE], ids=["plain", "variable"])
@pytest.mark.parametrize("name", DEVELOPER)
def test_developer_becomes_system_unless_the_template_knows_it(name, prefix):
    template = ChatTemplate({"default": prefix + TEMPLATES[name]}, SPECIAL_TOKENS)
    assert DEVELOPER[name] in template.render([BRIEF, USER], add_generation_prompt=False)


def test_developer_is_kept_where_the_template_allows_it_by_name():
    lists_roles = (
        "{% for m in messages %}{% if m.role not in ('developer', 'user') %}{{ raise_exception('role') }}{% endif %}"
        "{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    )
    template = ChatTemplate({"default": lists_roles}, {})
    assert template.render([BRIEF, USER]) == "<developer>Be brief.<user>Weather?"


def test_developer_becomes_system_where_the_template_drops_it():
    drops = (
        "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ '<' + m.role + '>' + m.content }}"
        "{% elif m.role != 'developer' %}{{ raise_exception('role') }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate({"default": drops}, {})
    assert template.render([BRIEF, USER]) == "<system>Be brief.<user>Weather?"


@pytest.mark.parametrize("sent", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[1].reasoning }}", "Hm."),
        ("{{ messages[1].reasoning_content }}", "Hm."),
        ("{{ messages[1].thinking }}", "Hm."),
        (TEMPLATES["qwen3"], "<think>\nHm.\n</think>"),
        (TEMPLATES["glm45"], "<think>Hm.</think>"),
        (TEMPLATES["gpt_oss"], "analysis<|message|>Hm.<|end|>"),
    ],
)
def test_reasoning_reaches_the_template_by_every_name(sent, source, expected):
    answer = {"role": "assistant", "content": "Sunny.", sent: "Hm."}
    template = ChatTemplate({"default": source}, SPECIAL_TOKENS)
    message = answer | {"reasoning_content": None} | {sent: "Hm."}
    checked = validate(ChatMessage, message).for_template(message)
    assert expected in template.render([USER, checked, USER])


PREFILLS = [
    "One,",
    "e",
    " ",
    "",
    "  two blanks",
    "three \n ",
    "\nline",
    "a b </think> c",
    "Weather?",
    "s",
    "<",
]
# transformers is the oracle. It runs in a separate process, because this one must not import torch.
ORACLE = """
import json, sys
from transformers.utils.chat_template_utils import render_jinja_template
job = json.load(sys.stdin)
def render(template, prefill):
    chat = [*job["messages"], {"role": "assistant", "content": prefill}]
    try:
        [text], _ = render_jinja_template(
            [chat], chat_template=template, continue_final_message=True, **job["special_tokens"]
        )
    except ValueError:
        return None
    return text
print(json.dumps([[render(template, prefill) for prefill in job["prefills"]] for template in job["templates"]]))
"""


@pytest.fixture(scope="module")
def continued():
    """The prompts that transformers makes, by template and prefill. None: it refuses."""
    job = {
        "messages": [USER],
        "prefills": PREFILLS,
        "special_tokens": SPECIAL_TOKENS,
        "templates": list(TEMPLATES.values()),
    }
    done = subprocess.run(
        [sys.executable, "-c", ORACLE],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    rows = json.loads(done.stdout)
    return {
        name: dict(zip(PREFILLS, row, strict=True))
        for name, row in zip(TEMPLATES, rows, strict=True)
    }


@pytest.mark.parametrize("name", TEMPLATES)
def test_continued_prompt_is_that_of_transformers(tokenizer, monkeypatch, continued, name):
    monkeypatch.setattr(tokenizer, "_template", template_of(name))
    model = FakeBackend(tokenizer).served

    def prompt(prefill: str) -> str | None:
        messages = [USER, {"role": "assistant", "content": prefill}]
        sent = {"messages": messages, "continue_final_message": True}
        body = checked_chat(model, sent)
        try:
            return chat_text(model, body)
        except InvalidRequest:
            return None

    assert {prefill: prompt(prefill) for prefill in PREFILLS} == continued[name]
