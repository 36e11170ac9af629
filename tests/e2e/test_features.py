"""Each feature of a generation gives the same through the cluster as in one engine."""

import json
import re

import pytest

from tandem.wire.generation import SamplingParams
from tests.e2e.clients import ask_all, assert_same, generate
from tests.e2e.cluster import MAX_ROUNDS, ask, running_cluster
from tests.e2e.conftest import CHUNK, CONTEXT, FLAGS, PAGE
from tests.one_engine import tokens_of_one_engine

STORY = "Once upon a time there was a small house in the woods. " * 20
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
        "age": {"type": "integer"},
    },
    "required": ["city", "rivers", "age"],
}
EBNF = 'root ::= "yes, " ("red" | "blue") "!" | "no."'
# Without one the small model likes blanks better than words.
EXAMPLE = 'Cities as JSON:\n{"city": "Rome", "rivers": ["Tiber"], "age": 2777}\n'
GREEDY = {"temperature": 0, "max_new_tokens": 12}
SEEDED = {"temperature": 0.9, "sampling_seed": 7, "max_new_tokens": 12}


def native(text=STORY[:100], **body):
    params = GREEDY | body.pop("sampling", {})
    return "/generate", {"text": text, "sampling_params": params, **body}


def completion(**body):
    return "/v1/completions", {"prompt": STORY[:100], "temperature": 0, "max_tokens": 8, **body}


def chat(**body):
    messages = [{"role": "user", "content": EXAMPLE + "Give me one more."}]
    return "/v1/chat/completions", {
        "messages": messages,
        "temperature": 0,
        "max_tokens": 60,
        **body,
    }


CALLS = {
    "plain": native(),
    "a stop string": native(sampling={"stop": [" small"]}),
    "a stop string that stays": native(sampling={"stop": ["house"], "no_stop_trim": True}),
    "stop ids": native(sampling={"stop_token_ids": list(range(200, 1200))}),
    "a stop pattern": native(sampling={"stop_regex": "w[a-z]+s", "max_new_tokens": 30}),
    "no end of sequence": native("<|im_end|>", sampling={"ignore_eos": True}),
    "a minimum": native("<|im_end|>", sampling={"min_new_tokens": 9}),
    "several of one prompt": native(sampling={**SEEDED, "n": 3}),
    "several of several": native([STORY[:40], STORY[:90]], sampling={**SEEDED, "n": 2}),
    "penalties": native(
        sampling={
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.3,
            "max_new_tokens": 30,
        }
    ),
    "a bias": native(sampling={"logit_bias": {"1234": 30.0, "253": -100.0}}),
    "a seed": native(sampling=SEEDED),
    "log-probabilities": native(return_logprob=True, top_logprobs_num=3),
    "those of a prompt of many chunks": native(
        STORY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2
    ),
    "those of a prompt's end": native(STORY, return_logprob=True, logprob_start_len=150),
    "echo with log-probabilities": completion(echo=True, logprobs=2),
    "an echo alone": completion(echo=True, logprobs=1, max_tokens=0),
    "what lm_eval asks": completion(
        prompt=[[504, 3575, 282, 4649, 314]], echo=True, logprobs=1, max_tokens=1
    ),
    "log-probabilities of a chat": chat(logprobs=True, top_logprobs=2, max_tokens=6),
    "several answers of a chat": chat(n=3, seed=5, temperature=0.8, max_tokens=8),
    "a schema": native(
        EXAMPLE, sampling={"json_schema": json.dumps(SCHEMA), "max_new_tokens": 120}
    ),
    "a seeded schema": native(
        EXAMPLE, sampling={**SEEDED, "json_schema": SCHEMA, "max_new_tokens": 120}
    ),
    "a regular expression": native(sampling={"regex": "[a-f]{3}-[0-9]{2}", **SEEDED}),
    "a grammar": native(sampling={"ebnf": EBNF}),
    "a schema in a chat": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        max_tokens=120,
    ),
    "any object": chat(response_format={"type": "json_object"}),
    "a schema with a penalty": native(
        EXAMPLE, sampling={"json_schema": SCHEMA, "frequency_penalty": 0.2, "max_new_tokens": 120}
    ),
}


@pytest.fixture(scope="module")
def oracle(serve):
    return ask_all(serve, CALLS)


@pytest.fixture(scope="module")
def answers(cluster):
    return ask_all(cluster.url, CALLS)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_cluster_answers_as_one_engine_does(name, oracle, answers):
    status, answer = answers[name]
    assert status == 200, answer
    assert_same(answer, oracle[name][1])


def text_of(answers, name: str) -> str:
    return answers[name][1]["text"]


def test_answers_are_what_their_grammars_say(answers):
    for name in ("a schema", "a seeded schema", "a schema with a penalty"):
        made = json.loads(text_of(answers, name))
        assert set(made) == {"city", "rivers", "age"}
        assert isinstance(made["age"], int)
        assert len(made["rivers"]) <= 2
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", text_of(answers, "a regular expression"))
    assert text_of(answers, "a grammar") in {"yes, red!", "yes, blue!", "no."}
    chat_answer = answers["a schema in a chat"][1]["choices"][0]["message"]["content"]
    assert set(json.loads(chat_answer)) == {"city", "rivers", "age"}


def test_stops_leave_out_what_they_matched(answers):
    assert "small" not in text_of(answers, "a stop string")
    assert answers["a stop string"][1]["meta_info"]["finish_reason"]["matched"] == " small"
    assert text_of(answers, "a stop string that stays").endswith("house")
    assert not re.search("w[a-z]+s", text_of(answers, "a stop pattern"))


def test_a_bad_schema_is_a_400_and_the_others_are_answered(cluster, oracle):
    bad = {
        "schema": native(sampling={"json_schema": '{"type": "no such type"}'}),
        "expression": native(sampling={"regex": "(unclosed"}),
        "grammar": native(sampling={"ebnf": "root ::= nothing"}),
        "two": native(sampling={"regex": "a", "ebnf": EBNF}),
    }
    found = ask_all(cluster.url, bad | {"plain": CALLS["plain"]})
    assert {name: status for name, (status, _) in found.items()} == {
        "schema": 400,
        "expression": 400,
        "grammar": 400,
        "two": 400,
        "plain": 200,
    }
    assert_same(found["plain"][1], oracle["plain"][1])


def body(**fields) -> tuple[str, bytes]:
    return "/generate", json.dumps(fields).encode()


# What only a node's own limits tell; what any server refuses is in `tests/frontend`.
BAD = {
    "not JSON": ("/generate", b"{not json"),
    "id beyond the vocabulary": body(input_ids=[49152]),
    "prompt over the context": body(input_ids=[5] * CONTEXT),
    "10 MB of text": body(text="word " * 2_000_000),
    "bias beyond the vocabulary": body(text="a", sampling_params={"logit_bias": {"99999": 1}}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered_and_the_next_request_is_served(cluster, name):
    path, data = BAD[name]
    status, answer = ask(cluster.url + path, data)
    assert status == 400, answer
    assert answer["error"]["message"]
    assert generate(cluster.url, input_ids=[5], max_new_tokens=1)["output_ids"]


def test_a_huge_number_of_new_tokens_is_cut_at_the_context(cluster):
    prompt = [5] * (CONTEXT - 4)
    params = {"max_new_tokens": 10**12, "ignore_eos": True}
    answer = generate(cluster.url, input_ids=prompt, sampling_params=params)
    assert len(answer["output_ids"]) == 4
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


def test_several_answers_to_one_prompt_compute_it_once(cluster):
    path, body = native(sampling={**SEEDED, "n": 4})
    del body["text"]
    call = path, {**body, "input_ids": list(range(1000, 1200))}
    status, made = ask_all(cluster.url, {"n": call})["n"]
    assert status == 200
    assert len({tuple(one["output_ids"]) for one in made}) > 1
    assert sorted(one["meta_info"]["cached_tokens"] for one in made) == [0, 192, 192, 192]


def test_a_salt_keeps_prefixes_apart_and_a_flush_forgets_them(cluster):
    def cached(**body) -> int:
        path, call = native(STORY, **body)
        return ask_all(cluster.url, {"x": (path, call)})["x"][1]["meta_info"]["cached_tokens"]

    cached(cache_salt="tenant a")
    assert cached(cache_salt="tenant a") > 0
    assert cached(cache_salt="tenant b") == 0
    assert ask(f"{cluster.url}/flush_cache", b"")[0] == 200
    assert cached(cache_salt="tenant a") == 0


def test_own_engine_refuses_adapters_in_one_sentence(cluster):
    body = {"lora_name": "sql", "lora_path": "/sql"}
    status, answer = ask(f"{cluster.url}/v1/load_lora_adapter", body)
    assert status == 400
    assert answer["error"]["message"].endswith(
        ": this engine does not support adapters: use a node with --engine vllm"
    )


def test_a_decode_node_out_of_pages_retracts_and_no_token_differs(tiny_model):
    prompts = [[3 + (i * 7 + j) % 300 for j in range(10 + 2 * i)] for i in range(8)]
    num_new = 90
    greedy = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=num_new)
    settings = {"page_size": PAGE, "chunked_prefill_size": CHUNK, "attention_backend": "torch"}
    expected = tokens_of_one_engine(tiny_model("llama"), prompts, [greedy] * 8, **settings)
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": num_new}
    calls = {
        str(i): ("/generate", {"input_ids": prompt, "sampling_params": params})
        for i, prompt in enumerate(prompts)
    }
    small = ("--max-total-tokens", "384", "--attention-backend", "torch")  # the last of two counts
    with running_cluster("--model", str(tiny_model("llama")), *FLAGS, *small) as running:
        # Again where they came so far apart that all had room.
        for _ in range(MAX_ROUNDS):
            found = ask_all(running.url, calls)
            assert {status for status, _ in found.values()} == {200}, found
            assert [answer["output_ids"] for _, answer in found.values()] == expected
            if is_retracted := running.loads()[1]["num_retracted"] > 0:
                break
    assert is_retracted
