"""`return_token_ids` and `return_tokens_as_token_ids`, compatible with vLLM."""

import pytest

from tandem.frontend.options import FrontendOptions
from tandem.frontend.replies.parser import reply_formats
from tests.frontend.conftest import serve
from tests.frontend.fakes import say, stop
from tests.frontend.helpers import each, post, stream

EOS = 2
CHAT = "/v1/chat/completions"
BODIES = {
    "/v1/completions": {"prompt": "Hi you", "max_tokens": 8},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
each_path = pytest.mark.parametrize("path", BODIES)


@pytest.fixture
def ids(backend, tokenizer):
    """What the model answers, its stop token included."""
    backend.script = say(*each(tokenizer, "Hello you"), stop(EOS))
    return [*tokenizer.encode("Hello you"), EOS]


@each_path
async def test_return_token_ids_returns_output_and_prompt_ids(client, backend, ids, path):
    body = BODIES[path] | {"return_token_ids": True, "n": 2}
    _, answer = await post(client, path, body)
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids, ids]
    holders = [answer] if path == CHAT else answer["choices"]
    prompt = backend.requests[0].prompt_ids
    assert [holder["prompt_token_ids"] for holder in holders] == [prompt] * len(holders)


@each_path
@pytest.mark.parametrize("extra", [{}, {"stop": ["zzz"]}, {"stream_interval": 2}])
async def test_streamed_ids_equal_those_of_the_complete_answer(client, backend, ids, path, extra):
    body = BODIES[path] | {"return_token_ids": True} | extra
    chunks = await stream(client, path, body)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [id_ for choice in choices for id_ in choice["token_ids"]] == ids
    holders = chunks if path == CHAT else choices
    told = [holder["prompt_token_ids"] for holder in holders if "prompt_token_ids" in holder]
    assert told == [backend.requests[0].prompt_ids]
    assert "prompt_token_ids" in holders[0]


@each_path
async def test_no_token_ids_by_default(client, ids, path):
    _, answer = await post(client, path, BODIES[path])
    chunks = await stream(client, path, BODIES[path])
    assert "token_ids" not in str([answer, chunks])


async def test_tool_call_answer_has_token_ids(backend, tokenizer):
    backend.script = say(*each(tokenizer, CALL), stop(EOS))
    options = FrontendOptions(reply_formats=reply_formats("hermes", ""))
    async with serve(backend, options) as client:
        body = BODIES[CHAT] | {"return_token_ids": True, "tools": TOOLS}
        chunks = await stream(client, CHAT, body)
        _, answer = await post(client, CHAT, body)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    expected = [*tokenizer.encode(CALL), EOS]
    assert [id_ for choice in choices for id_ in choice["token_ids"]] == expected
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert answer["choices"][0]["token_ids"] == expected


@pytest.mark.parametrize("is_stream", [False, True])
async def test_logprobs_name_tokens_by_id(client, ids, is_stream):
    names = [f"token_id:{id_}" for id_ in ids]
    for path, logprobs in (("/v1/completions", 1), (CHAT, True)):
        body = BODIES[path] | {"logprobs": logprobs, "return_tokens_as_token_ids": True}
        if is_stream:
            chunks = await stream(client, path, body)
        else:
            chunks = [(await post(client, path, body))[1]]
        told = [
            part for chunk in chunks for choice in chunk["choices"] if (part := choice["logprobs"])
        ]
        if path == CHAT:
            found = [entry["token"] for part in told for entry in part["content"]]
        else:
            found = [token for part in told for token in part["tokens"]]
        assert found == names
