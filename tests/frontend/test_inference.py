"""vLLM's `/inference/v1/generate`: token ids in, token ids out."""

import asyncio
import dataclasses

import pytest

from tandem.wire.errors import EngineFailed
from tests.frontend.fakes import length, say, stop
from tests.frontend.helpers import each, events, post, stream

PATH = "/inference/v1/generate"
EOS = 2


def body(**params):
    return {"token_ids": [5, 6, 7, 8], "sampling_params": params}


@pytest.fixture
def ids(backend, tokenizer):
    """What the model answers, its stop token included."""
    backend.script = say(*each(tokenizer, "Hello you"), stop(EOS))
    return [*tokenizer.encode("Hello you"), EOS]


async def test_inference_returns_ids_for_ids(client, backend, ids):
    status, answer = await post(client, PATH, body(temperature=0.5) | {"request_id": "mine"})
    assert status == 200
    assert answer.pop("created") > 0
    choice = {"index": 0, "token_ids": ids, "logprobs": None, "finish_reason": "stop"}
    assert answer == {
        "request_id": "mine",
        "model": "smol",
        "output_mode": "tokens",
        "choices": [choice | {"stop_reason": None}],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    [asked] = backend.requests
    assert (backend.client_ids, asked.prompt_ids) == (["mine"], [5, 6, 7, 8])
    assert (asked.sampling.temperature, asked.sampling.max_new_tokens) == (0.5, 8188)


async def test_text_and_prompt_ids_are_returned_on_request(client, ids):
    more = {"output_mode": "text", "return_token_ids": True, "model": "smol"}
    _, answer = await post(client, PATH, body(n=2) | more)
    assert [choice["text"] for choice in answer["choices"]] == ["Hello you"] * 2
    assert answer["prompt_token_ids"] == [5, 6, 7, 8]
    assert answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_stream_equals_the_complete_answer(client, ids, mode):
    more = {
        "output_mode": mode,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    asked = body(n=2, logprobs=1) | more
    _, whole = await post(client, PATH, asked)
    *chunks, last = await stream(client, PATH, asked)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    told = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert told == [chunks[0]["prompt_token_ids"]] == [[5, 6, 7, 8]]
    assert {chunk["request_id"] for chunk in chunks} == {last["request_id"]}
    for index, choice in enumerate(whole["choices"]):
        parts = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        assert [id_ for part in parts for id_ in part["token_ids"]] == choice["token_ids"]
        told = [entry for part in parts for entry in part["logprobs"]["content"]]
        assert told == choice["logprobs"]["content"]
        assert "".join(part.get("text", "") for part in parts) == choice.get("text", "")
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + ["stop"]


async def test_continuous_usage_adds_usage_to_each_chunk(client, ids):
    asked = body() | {"stream_options": {"continuous_usage_stats": True}}
    chunks = await stream(client, PATH, asked)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]


async def test_logprobs_list_the_chosen_token_first(client, backend):
    backend.script = say(length(9))
    _, answer = await post(client, PATH, body(logprobs=2))
    chosen = {"token_id": 9, "logprob": -0.09, "rank": 1}
    other = {"token_id": 10, "logprob": -1.09, "rank": 2}
    assert answer["choices"][0]["logprobs"] == {
        "content": [chosen | {"top_logprobs": [chosen, other]}]
    }
    _, answer = await post(client, PATH, body(logprobs=0))
    chosen["rank"] = None
    assert answer["choices"][0]["logprobs"] == {"content": [chosen | {"top_logprobs": [chosen]}]}


@pytest.mark.parametrize(
    ("params", "reason"), [({"stop_token_ids": [9]}, 9), ({"stop": "you"}, "you")]
)
async def test_stop_reason_reports_the_client_stop(client, backend, tokenizer, params, reason):
    backend.script = say(*each(tokenizer, "Hello you"), stop(9))
    _, answer = await post(client, PATH, body(**params))
    [choice] = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


async def test_inference_passes_the_grammar_to_the_engine(client, backend):
    await post(client, PATH, body(structured_outputs={"regex": "a+"}) | {"reasoning_ended": True})
    assert backend.requests[0].sampling.grammar.text == "a+"


async def test_vllm_parameters_without_effect_are_ignored(client, ids):
    own = {"flat_logprobs": False, "detokenize": False, "skip_clone": True, "output_kind": 2}
    asked = body(**own, bad_words=[], extra_args=None, top_k=0)
    more = {"token_offsets": [[0, 1]], "kv_transfer_params": {"a": 1}, "features": None}
    assert (await post(client, PATH, asked | more))[0] == 200


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({}, "token_ids: is missing"),
        ({"token_ids": []}, "token_ids: must have at least 1"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"token_ids": [-1]}, "outside the vocabulary"),
        (body() | {"model": 5}, "model: must be a string"),
        (body() | {"output_mode": "x"}, "output_mode: must be 'text' or 'tokens'"),
        (body() | {"features": {"a": 1}}, "features: not supported"),
        (body() | {"content_parts": [{"a": 1}]}, "content_parts: not supported"),
        (body(prompt_logprobs=1), "sampling_params.prompt_logprobs: not supported"),
        (body(trace_decode_token_ids=[5]), "sampling_params.trace_decode_token_ids: unknown"),
        (body(extra_args={"a": 1}), "sampling_params.extra_args: unknown"),
        (body(temprature=1), "sampling_params.temprature: unknown"),
        (body(logprobs=-1), "sampling_params.logprobs: must be at least 0"),
        (
            body(regex="a") | {"reasoning_ended": False},
            "reasoning_ended: must not be false with a grammar",
        ),
    ],
)
async def test_unsupported_inference_field_is_rejected_by_name(client, backend, asked, sentence):
    status, answer = await post(client, PATH, asked)
    assert (status, sentence in answer["error"]["message"]) == (400, True), answer
    assert backend.requests == []


async def test_text_mode_requires_a_tokenizer(client, backend):
    backend.served = dataclasses.replace(backend.served, tokenizer=None)
    asked = body(max_tokens=2)
    assert (await post(client, PATH, asked))[1]["choices"][0]["token_ids"] == [5, 6]
    status, answer = await post(client, PATH, asked | {"output_mode": "text"})
    assert (status, "no tokenizer" in answer["error"]["message"]) == (400, True)


async def test_inference_stream_error_is_the_last_event(client, backend):
    backend.script = say([5], EngineFailed("the device is gone"))
    *_, last = await stream(client, PATH, body())
    assert last["choices"][0]["finish_reason"] == "abort"
    assert last["error"]["code"] == "engine_failed"


async def test_inference_returns_timings(client, ids):
    headers = {"X-Tandem-Timings": "1"}
    _, answer = await post(client, PATH, body() | {"rid": "mine"}, headers=headers)
    assert answer["timings"]["request_id"] == "mine"
    async with client.post(PATH, json=body() | {"stream": True}, headers=headers) as response:
        *_, last = await events(response)
    assert last["timings"]["num_output_tokens"] == len(ids)


async def test_inference_is_aborted_by_id(client, backend):
    backend.script = say([5], asyncio.Event())
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(post(client, PATH, body(n=2) | {"request_id": "mine"}))
        await backend.until(lambda: len(backend.aborts) == 2)
        assert (await post(client, "/abort_request", {"rid": "mine"}))[1] == {"aborted": True}
    _, answer = await asking
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort"] * 2
