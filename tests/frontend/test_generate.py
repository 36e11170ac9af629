import asyncio
import dataclasses
import threading

import pytest

from tandem.frontend.backend import Bootstrap
from tandem.frontend.options import FrontendOptions
from tandem.wire.errors import EngineFailed, NoNodeAvailable, Overloaded
from tandem.wire.generation import Grammar, SamplingDefaults
from tests.frontend.conftest import serve
from tests.frontend.fakes import length, say, stop
from tests.frontend.helpers import each, events, post, post_large, stream
from tests.patience import PATIENCE_S
from tests.vllm_router import first_half, second_half

EOS = 2


async def test_stream_that_fails_midway_has_outcome_failed(backend, client):
    backend.script = say([5], NoNodeAvailable("no pair"))
    body = {"text": "Hello", "stream": True}
    async with client.post("/generate", json=body, headers={"X-Tandem-Timings": "1"}) as response:
        last = (await events(response))[-1]
    assert last["timings"]["outcome"] == "failed"


async def test_generate_returns_text_ids_and_meta_info(client, backend, tokenizer):
    ids = tokenizer.encode("Hello there")
    backend.script = say(*each(tokenizer, " Paris."), stop(EOS))
    status, answer = await post(client, "/generate", {"text": "Hello there", "rid": "mine"})
    assert status == 200
    assert answer["text"] == " Paris."
    assert answer["output_ids"] == [*tokenizer.encode(" Paris."), EOS]
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": len(ids),
        "completion_tokens": len(answer["output_ids"]),
        "cached_tokens": len(ids) // 2,
    }
    assert backend.requests[0].prompt_ids == ids
    assert backend.client_ids == ["mine"]


async def test_sampling_parameters_are_accepted_nested_and_at_the_top_level(client, backend):
    params = {
        "max_new_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -2,
        "repetition_penalty": 1.1,
        "min_new_tokens": 1,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "logit_bias": {"5": -1},
        "sampling_seed": 9,
        "spaces_between_special_tokens": False,
        "unheard_of": None,
    }
    for body in (params, {"sampling_params": params}):
        status, _ = await post(client, "/generate", body | {"text": "hi", "novel": [1]})
        assert status == 200
    first, second = backend.requests
    assert first.sampling == second.sampling
    assert (first.sampling.seed, first.sampling.top_k) == (9, -1)
    assert first.sampling.logit_bias == {5: -1.0}
    assert first.sampling.stop_token_ids == [7]


async def test_null_or_absent_parameters_have_sglang_defaults(client, backend):
    body = {"input_ids": [5, 6], "sampling_params": {"temperature": None, "stop": None}}
    status, answer = await post(client, "/generate", body)
    assert status == 200
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 128}
    assert backend.requests[0].sampling.temperature == 1.0


async def test_max_new_tokens_is_limited_to_the_context(client, backend):
    backend.script = say(length(5))
    body = {"input_ids": [5] * 100, "max_new_tokens": 10**30}
    assert (await post(client, "/generate", body))[0] == 200
    assert backend.requests[0].sampling.max_new_tokens == 8192 - 100


async def test_batch_returns_a_list_with_parameters_per_prompt(client, backend):
    backend.script = say(length(5))
    body = {"text": ["a", "b"], "sampling_params": [{"top_k": 1}, {"top_k": 2}], "rid": ["x", "y"]}
    status, answers = await post(client, "/generate", body)
    assert status == 200
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]
    assert [request.sampling.top_k for request in backend.requests] == [1, 2]


async def test_batch_may_have_a_grammar_per_prompt(client, backend):
    backend.script = say(length(5))
    params = [{"regex": "a+"}, {"json_schema": {"type": "object"}}]
    body = {"text": ["a", "b"], "sampling_params": params}
    assert (await post(client, "/generate", body))[0] == 200
    assert [request.sampling.grammar for request in backend.requests] == [
        Grammar(kind="regex", text="a+"),
        Grammar(kind="json_schema", text='{"type":"object"}'),
    ]


async def test_schemas_of_a_batch_have_one_budget(client):
    schema = {"properties": {f"p{number}": {"type": "string"} for number in range(1000)}}
    body = {"text": ["a"] * 20, "sampling_params": [{"json_schema": schema}] * 20}
    status, answer = await post(client, "/generate", body)
    assert status == 400
    assert "takes too much work" in str(answer)


async def test_generations_of_one_prompt_form_a_group(client, backend):
    body = {"text": ["a", "b"], "n": 2, "max_new_tokens": 1}
    await post(client, "/generate", body)
    first, second, third, fourth = [request.group for request in backend.requests]
    assert first == second != third == fourth
    assert "" not in {first, third}


async def test_n_generations_have_consecutive_seeds(client, backend):
    body = {"text": ["a", "b"], "n": 2, "seed": 2**63 - 1, "max_new_tokens": 1, "rid": "r"}
    status, answers = await post(client, "/generate", body)
    assert (status, len(answers)) == (200, 4)
    assert [request.sampling.seed for request in backend.requests] == [2**63 - 1, 0] * 2
    assert backend.client_ids == ["r_0", "r_1", "r_2", "r_3"]


async def test_generations_without_seed_get_different_seeds(client, backend):
    await post(client, "/generate", {"text": "a", "n": 3, "max_new_tokens": 1})
    assert len({request.sampling.seed for request in backend.requests} - {None}) == 3


async def test_external_room_is_passed_on_and_the_seed_is_unset(client, backend):
    body = {"text": "a", "bootstrap_host": "[::1]", "bootstrap_port": None, "bootstrap_room": 7}
    assert (await post(client, "/generate", body))[0] == 200
    assert backend.bootstraps == [Bootstrap("[::1]", None, 7)]
    assert backend.requests[0].sampling.seed is None


async def test_batch_has_one_room_per_prompt(client, backend):
    body = {
        "text": ["a", "b"],
        "bootstrap_host": ["h", "i"],
        "bootstrap_port": [1, 2],
        "bootstrap_room": [3, 4],
    }
    assert (await post(client, "/generate", body))[0] == 200
    assert backend.bootstraps == [Bootstrap("h", 1, 3), Bootstrap("i", 2, 4)]


LARGEST_ROOM = 2**64 - 1


async def test_halves_of_a_transfer_use_equal_rooms(client, backend):
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1}
    other = second_half("x", "http://10.0.0.1:7000", "tandem:8998")
    for params in (first_half("x"), other):
        await post(client, "/v1/completions", body | {"kv_transfer_params": params})
    first, second = backend.bootstraps[:4], backend.bootstraps[4:]
    assert all(each.is_sequential and not each.host for each in first)
    assert {(each.host, each.port, each.is_sequential) for each in second} == {
        ("10.0.0.1", 8998, False)
    }
    assert [each.room for each in first] == [each.room for each in second]
    assert len({each.room for each in first}) == 4
    assert backend.requests[0].sampling.seed is None


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_decode": True},
        second_half("x", "http://10.0.0.1:7000", "0f3c"),
        {"do_remote_prefill": True, "remote_engine_id": "nixl", "remote_block_ids": [[1]]},
    ],
)
async def test_transfers_of_other_connectors_name_no_other_half(client, backend, params):
    body = {"prompt": "a", "max_tokens": 1, "kv_transfer_params": params}
    assert (await post(client, "/v1/completions", body))[0] == 200
    assert backend.bootstraps == [None]


@pytest.mark.parametrize(
    ("fields", "rooms"),
    [
        ({"text": ["a", "b"], "bootstrap_room": 7}, [7, 8]),
        ({"text": "a", "n": 3, "bootstrap_room": 7}, [7, 8, 9]),
        ({"text": ["a", "b"], "n": 2, "bootstrap_room": 7}, [7, 8, 9, 10]),
        ({"text": ["a", "b"], "n": 2, "bootstrap_room": [7, 70]}, [7, 8, 70, 71]),
        ({"text": "a", "bootstrap_room": LARGEST_ROOM}, [2**63 - 1]),
        ({"text": ["a", "b"], "bootstrap_room": LARGEST_ROOM}, [2**63 - 1, 0]),
    ],
)
async def test_each_generation_has_a_room_of_its_own(client, backend, fields, rooms):
    assert (await post(client, "/generate", {"bootstrap_host": "h", **fields}))[0] == 200
    assert [each.room for each in backend.bootstraps] == rooms


OVERRIDES = {
    "X-Override-Rid": "mine",
    "X-Override-Bootstrap-Host": "10.0.0.1",
    "X-Override-Bootstrap-Port": "8998",
    "X-Override-Bootstrap-Room": str(LARGEST_ROOM),
    "X-Override-Priority": "-3",
    "X-Override-Routed-Dp-Rank": "0",
    "X-Data-Parallel-Rank": "0",
}


async def test_headers_of_sglangs_routers_override_the_body(client, backend):
    body = {"text": "a", "rid": "theirs", "bootstrap_host": "h", "bootstrap_room": 1}
    assert (await post(client, "/generate", body, headers=OVERRIDES))[0] == 200
    assert backend.bootstraps == [Bootstrap("10.0.0.1", 8998, 2**63 - 1)]
    [request] = backend.requests
    assert (backend.client_ids, request.priority) == (["mine"], -3)


@pytest.mark.parametrize(
    ("header", "value", "message"),
    [
        ("X-Override-Bootstrap-Room", "seven", "X-Override-Bootstrap-Room: must be an integer"),
        (
            "X-Override-Bootstrap-Room",
            "9" * 10_000,
            "X-Override-Bootstrap-Room: must be an integer",
        ),
        ("X-Override-Bootstrap-Room", str(2**64), "bootstrap_room: must be"),
        ("X-Override-Bootstrap-Port", "0", "bootstrap_port: must be"),
        ("X-Override-Priority", "", "X-Override-Priority: must be an integer"),
        ("X-Data-Parallel-Rank", "1", "X-Data-Parallel-Rank: each node is a single rank"),
    ],
)
async def test_bad_override_is_rejected(client, header, value, message):
    status, answer = await post(client, "/generate", {"text": "a"}, headers={header: value})
    assert (status, message in answer["error"]["message"]) == (400, True)


async def test_native_stream_is_cumulative_and_ends_with_done(client, backend, tokenizer):
    backend.script = say(*each(tokenizer, "One two"), stop(EOS))
    got = await stream(client, "/generate", {"text": "Count"})
    assert [event["text"] for event in got] == ["One", "One two", "One two"]
    one, two = tokenizer.encode("One two")
    assert [event["output_ids"] for event in got] == [[one], [one, two], [one, two, EOS]]
    endings = [event["meta_info"]["finish_reason"] for event in got]
    assert endings == [None, None, {"type": "stop", "matched": EOS}]
    assert [event["meta_info"]["completion_tokens"] for event in got] == [1, 2, 3]
    assert "index" not in got[0]


async def test_native_stream_may_be_incremental(backend, tokenizer):
    backend.script = say(*each(tokenizer, "One two"), stop(EOS))
    async with serve(backend, FrontendOptions(incremental_streaming_output=True)) as client:
        got = await stream(client, "/generate", {"text": "Count"})
    assert [event["text"] for event in got] == ["One", " two", ""]
    assert [event["output_ids"] for event in got] == [
        *([token_id] for token_id in tokenizer.encode("One two")),
        [EOS],
    ]


async def test_streamed_batch_events_have_an_index(client, backend):
    body = {"input_ids": [[5], [6]], "n": 2, "max_new_tokens": 3}
    got = await stream(client, "/generate", body)
    last = {event["index"]: event["output_ids"] for event in got}
    assert last == {0: [5] * 3, 1: [5] * 3, 2: [6] * 3, 3: [6] * 3}


async def test_stop_string_ends_cancels_and_is_trimmed(client, backend, tokenizer):
    steps = each(tokenizer, "One two three four")
    backend.script = say(*steps, asyncio.Event())
    body = {"text": "Count", "stop": ["wo th", "four"]}
    status, answer = await post(client, "/generate", body)
    assert status == 200
    assert answer["text"] == "One t"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "wo th"}
    assert answer["output_ids"] == tokenizer.encode("One two three")
    assert len(backend.cancelled) == 1


async def test_no_stop_trim_keeps_stop_string_and_token(client, backend, tokenizer):
    body = {"text": "Count", "no_stop_trim": True, "skip_special_tokens": False}
    backend.script = say(*each(tokenizer, "One two"), stop(EOS))
    assert (await post(client, "/generate", body | {"stop": "tw"}))[1]["text"] == "One tw"
    assert (await post(client, "/generate", body))[1]["text"] == "One two<|im_end|>"


async def test_stop_pattern_ends_cancels_and_is_trimmed(client, backend, tokenizer):
    backend.script = say(*each(tokenizer, "One two three four"), asyncio.Event())
    body = {"text": "Count", "stop_regex": r"t[hr]+", "stop": "four"}
    _, answer = await post(client, "/generate", body)
    assert answer["text"] == "One two "
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": r"t[hr]+"}
    assert answer["output_ids"] == tokenizer.encode("One two three")
    assert len(backend.cancelled) == 1


async def test_error_before_the_first_token_sets_the_status(client, backend):
    backend.script = say(Overloaded("the queue is full"))
    for is_stream in (False, True):
        body = {"text": "a", "stream": is_stream}
        async with client.post("/generate", json=body) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            error = (await response.json())["error"]
        assert error["code"] == "overloaded"
        assert error["message"] == "the queue is full"


async def test_invalid_prompt_rejects_the_batch_before_it_starts(client, backend):
    wait = asyncio.Event()
    steps = {5: [wait], 6: [NoNodeAvailable("no pair")]}
    backend.script = lambda request: steps[request.prompt_ids[0]]
    status, _ = await post(client, "/generate", {"input_ids": [[5], [6]], "stream": True})
    assert status == 503
    assert len(backend.cancelled) == 1


async def test_error_after_the_first_event_is_an_abort_event(client, backend):
    backend.script = say([5], EngineFailed("the device is gone"))
    got = await stream(client, "/generate", {"text": "a"})
    assert got[-1]["output_ids"] == [5]
    assert got[-1]["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "the device is gone",
        "status_code": 500,
        "err_type": "engine_failed",
    }


async def test_aborted_request_has_finish_reason_abort(client, backend):
    backend.script = say([5], asyncio.Event())
    async with client.post(
        "/generate", json={"text": "a", "rid": "mine", "stream": True}
    ) as response:
        await response.content.readline()
        assert (await post(client, "/abort_request", {"rid": "mine"}))[1] == {"aborted": True}
        rest = await response.text()
    assert '"type":"abort"' in rest
    assert (await post(client, "/abort_request", {"rid": "mine"}))[1] == {"aborted": False}


async def test_abort_ends_all_generations_of_a_request(client, backend):
    backend.script = say([5], asyncio.Event())
    body = {"text": "a", "n": 3, "rid": "mine", "stream": True}
    async with client.post("/generate", json=body) as response:
        seen = b""
        while seen.count(b"data:") < 3:
            seen += await response.content.readline()
        assert (await post(client, "/abort_request", {"rid": "mine"}))[1] == {"aborted": True}
        assert (await response.text()).count('"type":"abort"') == 3


async def test_model_without_tokenizer_accepts_and_returns_ids(backend):
    backend.served = type(backend.served)(
        "smol", 100, 99, 100, frozenset({2}), None, SamplingDefaults()
    )
    async with serve(backend) as client:
        status, answer = await post(client, "/generate", {"input_ids": [5], "max_new_tokens": 2})
        assert (status, answer["text"], answer["output_ids"]) == (200, "", [5, 5])
        status, answer = await post(client, "/generate", {"text": "a"})
        assert status == 400
        assert "no tokenizer" in answer["error"]["message"]


@pytest.mark.parametrize(("num_more", "status"), [(0, 200), (1, 400)])
async def test_longest_prompt_is_that_of_the_model(client, backend, num_more, status):
    ids = [1] * (backend.served.max_prompt_tokens + num_more)
    got, _ = await post(client, "/generate", {"input_ids": ids})
    assert got == status


BAD_BODIES = {
    "no prompt": ({}, "prompt is missing"),
    "both": ({"text": "a", "input_ids": [1]}, "not both"),
    "empty text": ({"text": ""}, "prompt is empty"),
    "empty list": ({"text": []}, "text: must have at least 1 entry"),
    "text of a wrong type": ({"text": 5}, "text: must be a string or a list"),
    "mixed texts": ({"text": ["a", 5]}, "text.1: must be a string"),
    "true as an id": ({"input_ids": [1, True]}, "input_ids.1: must be an integer or a list"),
    "id out of vocabulary": ({"input_ids": [49152]}, "49152 is outside the vocabulary of 49152"),
    "over the context": (
        {"input_ids": [1] * 9000},
        "The input (9000 tokens) is longer than the model's context length (8192 tokens)",
    ),
    "zero tokens": ({"max_new_tokens": 0}, "max_new_tokens: must be at least 1"),
    "tokens of a wrong type": ({"max_new_tokens": "many"}, "max_new_tokens: must be an integer"),
    "minimum over maximum": ({"max_new_tokens": 1, "min_new_tokens": 2}, "exceeds the maximum"),
    "NaN": ({"temperature": float("nan")}, "the body is not valid JSON"),
    "top_p of 0": ({"top_p": 0}, "top_p: must be more than 0"),
    "top_k below -1": ({"top_k": -2}, "top_k: must be at least -1"),
    "n of 0": ({"n": 0}, "n: must be at least 1"),
    "too many": ({"text": ["a"] * 9, "n": 128}, "at most 1024"),
    "stop of a wrong type": ({"stop": 5}, "stop: must be a string or a list"),
    "too many stops": ({"stop": ["a"] * 65}, "stop: must have at most 64 entries"),
    "long stop": ({"stop": "a" * 513}, "stop: must have at most 512 characters"),
    "stop ids": ({"stop_token_ids": ["a"]}, "stop_token_ids.0: must be an integer"),
    "bias key": ({"logit_bias": {"a": 1}}, "logit_bias: each key must be an integer"),
    "bias id": ({"logit_bias": {"49152": 1}}, "logit_bias: token id 49152 is outside"),
    "params of a wrong type": ({"sampling_params": 5}, "sampling_params: must be an object"),
    "params of a wrong count": (
        {"sampling_params": [{}, {}]},
        "sampling_params: must be an object",
    ),
    "named params": ({"sampling_params": {"top_p": 2}}, "sampling_params.top_p: must be at most 1"),
    "misspelt": (
        {"sampling_params": {"temprature": 0}},
        "sampling_params.temprature: unknown sampling parameter",
    ),
    "a field of the body": (
        {"sampling_params": {"return_logprob": True}},
        "unknown sampling parameter",
    ),
    "a long name": ({"sampling_params": {"temperature" * 1000: 1}}, "unknown sampling parameter"),
    "stream": ({"stream": "yes"}, "stream: must be true or false"),
    "salt": ({"cache_salt": 5}, "cache_salt: must be a string"),
    "rid": ({"rid": 5}, "rid: must be a string"),
    "same rids": ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid: must be unique"),
    "room alone": ({"bootstrap_room": 1}, "bootstrap_host: is missing"),
    "room list": (
        {"bootstrap_host": "h", "bootstrap_room": [1]},
        "bootstrap_room: a list must have one",
    ),
    "one room for two": (
        {"text": ["a", "b"], "bootstrap_host": "h", "bootstrap_room": [1, 1]},
        "bootstrap_room: the rooms of two generations are equal",
    ),
    "logprobs": ({"return_logprob": 1}, "return_logprob: must be true or false"),
    "start behind": (
        {"return_logprob": True, "logprob_start_len": 2},
        "past the end of the prompt",
    ),
    "schema": ({"sampling_params": {"json_schema": "{"}}, "json_schema: is not valid JSON"),
    "two grammars": ({"regex": "a+", "ebnf": "b"}, "regex and ebnf: send only one of these"),
    "stop regex": ({"stop_regex": "("}, "stop_regex: '(' is not a valid regular expression"),
    "stop regexes of two": (
        {"text": ["a", "b"], "sampling_params": [{"stop_regex": ["a"] * 9}] * 2},
        "stop_regex: all prompts together may have at most 16",
    ),
    "empty match": ({"stop_regex": "a*"}, "stop_regex: 'a*' matches the empty string"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_invalid_generate_body_gets_400_with_a_message(client, backend, name):
    fields, sentence = BAD_BODIES[name]
    has_prompt = name == "no prompt" or {"text", "input_ids"} & set(fields)
    body = fields if has_prompt else {"text": "a"} | fields
    status, answer = await post(client, "/generate", body)
    assert status == 400
    assert sentence in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 300
    assert answer["error"]["type"] == "invalid_request_error"
    assert backend.requests == []


class GatedTokenizer:
    """Tokenizes long texts, in whatever thread, once a test lets it."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self.begun, self.gate = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode_batch(self, *args):
        self.begun.set()
        assert self.gate.wait(PATIENCE_S)
        return self._tokenizer.encode_batch(*args)


async def test_tokenizing_a_long_prompt_does_not_block_the_loop(client, backend, tokenizer):
    gated = GatedTokenizer(tokenizer)
    backend.served = dataclasses.replace(
        backend.served, tokenizer=gated, context_length=10**6, max_prompt_tokens=10**6
    )
    long = {"text": "so it goes on " * 8000, "sampling_params": {"max_new_tokens": 1}}
    posting = asyncio.create_task(post_large(client, "/generate", long))
    assert await asyncio.to_thread(gated.begun.wait, PATIENCE_S)
    short = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 5}}
    assert len((await stream(client, "/generate", short))[-1]["output_ids"]) == 5
    assert not posting.done()
    gated.gate.set()
    status, answer = await posting
    assert status == 200
    assert answer["meta_info"]["prompt_tokens"] > 20_000


@pytest.mark.parametrize("top_k", [2**31, 2**63, 2**64])
async def test_huge_top_k_means_all(client, backend, top_k):
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "top_k": top_k}}
    assert (await post(client, "/generate", body))[0] == 200
    assert backend.requests[-1].sampling.top_k == -1


async def test_batch_of_one_returns_a_list(client):
    status, answers = await post(client, "/generate", {"input_ids": [[5]], "max_new_tokens": 1})
    assert (status, len(answers)) == (200, 1)


async def test_one_stop_pattern_applies_to_many_prompts(client, backend):
    backend.script = say([81], length(81))
    body = {"text": ["b"] * 20, "stop_regex": "aa"}
    _, answers = await post(client, "/generate", body)
    assert [answer["text"] for answer in answers] == [""] * 20
