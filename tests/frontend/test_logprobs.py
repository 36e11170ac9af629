"""Log-probabilities in every shape that clients know."""

import asyncio

import pytest

from tandem.frontend.answers import MetaInfo
from tandem.frontend.chat.generation import Generation
from tandem.frontend.chat.logprobs import ChatLogprobs, CompletionLogprobs, NativeLogprobs
from tandem.frontend.text.stops import TextRules
from tandem.wire.generation import LogprobOptions, TokenLogprobs
from tests.frontend.fakes import length, say, stop
from tests.frontend.helpers import each, post, stream
from tests.router.fake_node import request

EOS = 2
NATIVE = {"input_ids": [5, 6, 7], "return_logprob": True}
CHAT = [{"role": "user", "content": "Hi"}]


def triples(*token_ids):
    """What the fake says of these tokens, as SGLang writes it."""
    return [[-token_id / 100, token_id, None] for token_id in token_ids]


async def meta_of(client, body):
    status, answer = await post(client, "/generate", body)
    assert status == 200, answer
    return answer["meta_info"]


async def test_default_logprobs_cover_only_the_output(client, backend):
    backend.script = say([8], length(9))
    meta = await meta_of(client, NATIVE)
    assert meta["output_token_logprobs"] == triples(8, 9)
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta
    assert backend.requests[0].logprobs == LogprobOptions(num_top=0, prompt_start=-1)


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (0, [[None, 5, None], *triples(6, 7)]),
        (
            1,
            [[None, 6, None], *triples(7)],
        ),  # as in SGLang, the first reported position has no value
        (2, [[None, 7, None]]),
        (3, []),
    ],
)
async def test_prompt_logprobs_start_at_logprob_start_len(client, backend, start, expected):
    backend.script = say(length(8))
    meta = await meta_of(client, NATIVE | {"logprob_start_len": start})
    assert meta["input_token_logprobs"] == expected


async def test_top_logprobs_accompany_each_token(client, backend):
    backend.script = say([8], length(9))
    body = NATIVE | {"logprob_start_len": 0, "top_logprobs_num": 2}
    meta = await meta_of(client, body)
    top = [[[-0.08, 8, None], [-1.08, 9, None]], [[-0.09, 9, None], [-1.09, 10, None]]]
    assert meta["output_top_logprobs"] == top
    first, *others = meta["input_top_logprobs"]
    assert (first, [len(entry) for entry in others]) == (None, [2, 2])


async def test_logprobs_include_token_text_on_request(client, backend, tokenizer):
    ids = tokenizer.encode("Hi é日")
    backend.script = say(ids, stop(EOS))
    meta = await meta_of(client, NATIVE | {"return_text_in_logprobs": True})
    texts = [text for _, _, text in meta["output_token_logprobs"]]
    assert texts[0] == "Hi"
    assert texts[-1] == "<|im_end|>"


async def test_batch_has_logprob_options_per_prompt(client, backend):
    backend.script = say(length(9))
    body = {
        "input_ids": [[5, 6], [7], [8]],
        "return_logprob": [True, None, True],
        "logprob_start_len": [0, None, None],
    }
    _, (first, second, third) = await post(client, "/generate", body)
    assert len(first["meta_info"]["input_token_logprobs"]) == 2
    assert "output_token_logprobs" not in second["meta_info"]
    assert third["meta_info"]["input_token_logprobs"] == []


async def test_prompt_is_scored_with_zero_new_tokens(client, backend):
    body = NATIVE | {"logprob_start_len": 0, "max_new_tokens": 0}
    status, answer = await post(client, "/generate", body)
    assert (status, answer["text"], answer["output_ids"]) == (200, "", [])
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["input_token_logprobs"] == [[None, 5, None], *triples(6, 7)]
    assert meta["output_token_logprobs"] == []
    assert backend.requests[0].sampling.max_new_tokens == 1


async def test_aborted_scoring_has_finish_reason_abort(client, backend):
    backend.script = say(asyncio.Event())
    body = NATIVE | {"max_new_tokens": 0, "rid": "mine"}
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(post(client, "/generate", body))
        await backend.until(lambda: backend.aborts)
        await post(client, "/abort_request", {"rid": "mine"})
    _, answer = await asked
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def test_native_stream_has_prompt_logprobs_in_the_first_event(client, backend):
    backend.script = say([8], [9], length(10))
    got = await stream(client, "/generate", NATIVE | {"logprob_start_len": 0})
    metas = [event["meta_info"] for event in got]
    assert [len(meta["input_token_logprobs"]) for meta in metas] == [3, 3, 3]
    assert [meta["output_token_logprobs"] for meta in metas] == [
        triples(8),
        triples(8, 9),
        triples(8, 9, 10),
    ]


async def test_chat_logprobs_have_bytes_and_top_tokens(sdk, backend, tokenizer):
    ids = tokenizer.encode("Hi you")
    backend.script = say(*each(tokenizer, "Hi you"), stop(EOS))
    answer = await sdk.chat.completions.create(
        model="smol", messages=CHAT, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["Hi", " you", "<|im_end|>"]
    assert [entry.logprob for entry in content] == [-id_ / 100 for id_ in (*ids, EOS)]
    assert bytes(content[1].bytes) == b" you"
    assert content[0].top_logprobs[0].token == "Hi"
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]


async def test_completion_logprobs_have_tokens_values_and_offsets(sdk, backend, tokenizer):
    backend.script = say(*each(tokenizer, "Hi you"), stop(EOS))
    answer = await sdk.completions.create(model="smol", prompt="a", logprobs=2)
    told = answer.choices[0].logprobs
    assert told.tokens == ["Hi", " you", "<|im_end|>"]
    assert told.text_offset == [0, 2, 6]
    pairs = zip(told.tokens, told.top_logprobs, strict=True)
    assert told.token_logprobs == [top[token] for token, top in pairs]


def score(choice, context_length):
    """Read a choice as lm_eval does: the continuation's sum, and whether it is what greedy says."""
    values = choice.logprobs.token_logprobs[context_length:-1]
    tops = choice.logprobs.top_logprobs[context_length:-1]
    return sum(values), all(
        value == max(top.values()) for value, top in zip(values, tops, strict=True)
    )


async def test_lm_eval_reads_prompt_logprobs(sdk, backend):
    answer = await sdk.completions.create(
        model="smol", prompt=[[5, 6, 7], [8, 9]], echo=True, logprobs=1, max_tokens=1
    )
    first, second = answer.choices
    assert first.logprobs.token_logprobs == [None, -0.06, -0.07, -0.05]
    assert first.logprobs.top_logprobs[0] is None
    assert score(first, 1) == (pytest.approx(-0.13), True)
    assert score(second, 1) == (pytest.approx(-0.09), True)
    assert [request.logprobs.prompt_start for request in backend.requests] == [0, 0]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_echo_with_zero_new_tokens(sdk, backend, tokenizer, is_stream):
    ids = tokenizer.encode("Hi you")
    call = {"model": "smol", "prompt": "Hi you", "echo": True, "logprobs": 0, "max_tokens": 0}
    if is_stream:
        chunks = [chunk async for chunk in await sdk.completions.create(**call, stream=True)]
        choices = [chunk.choices[0] for chunk in chunks]
    else:
        answer = await sdk.completions.create(**call)
        choices = answer.choices
        assert answer.usage.completion_tokens == 0
    assert "".join(choice.text for choice in choices) == "Hi you"
    told = choices[0].logprobs
    assert told.tokens == ["Hi", " you"]
    assert told.token_logprobs == [None, -ids[1] / 100]
    assert told.text_offset == [0, 2]
    assert choices[-1].finish_reason == "length"


async def test_echo_and_answer_share_one_logprobs_object(sdk, backend, tokenizer):
    backend.script = say(*each(tokenizer, " there"), stop(EOS))
    call = {"model": "smol", "prompt": "Hi you", "echo": True, "logprobs": 1}
    answer = await sdk.completions.create(**call)
    whole = answer.choices[0].logprobs
    assert whole.tokens == ["Hi", " you", " there", "<|im_end|>"]
    chunks = [chunk async for chunk in await sdk.completions.create(**call, stream=True)]
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset
    assert [token for part in parts for token in part.tokens] == whole.tokens


def known(*values):
    return [TokenLogprobs(logprob=value) for value in values]


def test_partial_character_token_is_written_as_bytes(tokenizer):
    ids = tokenizer.encode("🇫")
    assert len(ids) > 1
    entries = known(*[-1.0] * len(ids))
    [chat] = [ChatLogprobs(tokenizer, 0).write((ids, entries))["content"]]
    assert bytes(byte for entry in chat for byte in entry["bytes"]) == "🇫".encode()
    assert chat[0]["token"].startswith("bytes:\\xf0")
    told = CompletionLogprobs(tokenizer, 0).write((ids, entries))
    assert told["text_offset"] == [0] * len(ids)


def test_tokens_without_tokenizer_are_named_by_id():
    told = CompletionLogprobs(None, 1).write(([5], [TokenLogprobs(logprob=-1.0, top=[(6, -0.5)])]))
    assert told["top_logprobs"] == [{"token_id:6": -0.5, "token_id:5": -1.0}]
    [entry] = ChatLogprobs(None, 0).write(([5], known(-1.0)))["content"]
    assert entry == {"token": "token_id:5", "logprob": -1.0, "bytes": [], "top_logprobs": []}


def test_infinite_logprob_becomes_a_finite_number(tokenizer):
    impossible = known(float("-inf"))
    told = CompletionLogprobs(tokenizer, 0).write(([5], impossible))
    assert told["token_logprobs"] == [-9999.0]
    wanting = request(logprobs=LogprobOptions())
    generation = Generation("r", wanting, TextRules(), tokenizer)
    writer = NativeLogprobs(generation, LogprobOptions(), has_text=False)
    writer.add(([5], impossible), [])
    meta = MetaInfo("r", None, 1, 0)
    writer.fill(meta)
    assert meta.output_token_logprobs == [[-9999.0, 5, None]]
