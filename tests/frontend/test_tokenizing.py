import dataclasses

import pytest

from tests.frontend.helpers import post

MESSAGES = [{"role": "user", "content": "Hi there"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
BOS = "<|im_start|>"
each_place = pytest.mark.parametrize("base", ["", "/v1"])


@each_place
@pytest.mark.parametrize("name", ["prompt", "text"])
async def test_tokenize_returns_the_ids_of_a_prompt(client, tokenizer, base, name):
    status, answer = await post(client, f"{base}/tokenize", {name: "Hello world", "model": "smol"})
    ids = tokenizer.encode("Hello world")
    told = {"tokens": ids, "count": 2, "max_model_len": 8192, "token_strs": None}
    assert (status, answer) == (200, told)


async def test_tokenize_several_prompts_with_token_strings(client, tokenizer):
    body = {"prompt": ["Hello world", "Hi"], "return_token_strs": True}
    _, answer = await post(client, "/tokenize", body)
    assert answer["tokens"] == [tokenizer.encode("Hello world"), tokenizer.encode("Hi")]
    assert (answer["count"], answer["token_strs"]) == ([2, 1], [["Hello", "Ġworld"], ["Hi"]])


@pytest.mark.parametrize("extra", [{}, {"tools": TOOLS}, {"add_generation_prompt": False}])
async def test_tokenize_messages_equals_the_chat_prompt(client, backend, extra):
    body = {"messages": MESSAGES, **extra}
    _, answer = await post(client, "/tokenize", body)
    await post(client, "/v1/chat/completions", body | {"max_tokens": 1})
    assert answer["tokens"] == backend.requests[0].prompt_ids


@each_place
async def test_detokenize_with_and_without_special_tokens(client, tokenizer, base):
    ids = tokenizer.encode(f"{BOS}Hi")
    path = f"{base}/detokenize"
    assert await post(client, path, {"tokens": ids}) == (200, {"prompt": f"{BOS}Hi", "text": "Hi"})
    for skips, text in ((True, "Hi"), (False, f"{BOS}Hi")):
        _, answer = await post(client, path, {"tokens": ids, "skip_special_tokens": skips})
        assert answer == {"prompt": text, "text": text}
    _, answer = await post(client, path, {"tokens": [ids, ids[1:]]})
    assert answer == {"prompt": [f"{BOS}Hi", "Hi"], "text": ["Hi", "Hi"]}


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": [5]}, 400, "prompt.0: must be a string"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "other"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, 400, "chat_template: not"),
        ("/tokenize", {"prompt": "a", "truncate_prompt_tokens": 5}, 400, "truncate_prompt_tokens"),
        ("/detokenize", {}, 400, "tokens: is missing"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens.0: must be an integer or a list"),
        ("/detokenize", {"tokens": [49152]}, 400, "outside the vocabulary"),
        ("/detokenize", {"tokens": [-1]}, 400, "outside the vocabulary"),
        ("/detokenize", {"tokens": [5] * 8193}, 400, "model's context of 8192"),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "other"),
    ],
)
async def test_invalid_tokenize_body_is_rejected(client, path, body, status, sentence):
    got, answer = await post(client, path, body)
    assert (got, sentence in answer["error"]["message"]) == (status, True), answer


async def test_tokenize_rejects_text_far_beyond_the_context(client, backend):
    backend.served = dataclasses.replace(backend.served, max_prompt_tokens=7, context_length=8)
    _, answer = await post(client, "/tokenize", {"prompt": "word " * 20})
    assert answer["count"] > 8
    status, answer = await post(client, "/tokenize", {"prompt": "word " * 2000})
    assert (status, "at least" in answer["error"]["message"]) == (400, True)


async def test_tokenize_without_tokenizer_is_rejected(client, backend):
    backend.served = dataclasses.replace(backend.served, tokenizer=None)
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        status, answer = await post(client, path, body)
        assert (status, "no tokenizer" in answer["error"]["message"]) == (400, True)
