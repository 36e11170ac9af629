"""Bad input is answered with a clear error, and the cluster lives."""

import json

import pytest

from tests.e2e.clients import generate
from tests.e2e.cluster import ask
from tests.e2e.conftest import CONTEXT


@pytest.fixture
def url(cluster):
    return cluster.url


def native(**fields) -> tuple[str, bytes]:
    return "/generate", json.dumps(fields).encode()


def params(**sampling) -> tuple[str, bytes]:
    return native(text="hello", sampling_params=sampling)


BAD = {
    "empty body": (("/generate", b""), 400),
    "not JSON": (("/generate", b"{not json"), 400),
    "not an object": (("/generate", b"[1]"), 400),
    "not UTF-8": (("/generate", b'{"text": "\xff\xfe"}'), 400),
    "text is a number": (native(text=5), 400),
    "ids are words": (native(input_ids=["a"]), 400),
    "no prompt": (native(), 400),
    "empty prompt": (native(input_ids=[]), 400),
    "no prompts": (native(text=[]), 400),
    "both text and ids": (native(text="a", input_ids=[1]), 400),
    "id beyond the vocabulary": (native(input_ids=[49152]), 400),
    "negative id": (native(input_ids=[-1]), 400),
    "huge id": (native(input_ids=[2**70]), 400),
    "prompt over the context": (native(input_ids=[5] * CONTEXT), 400),
    "10 MB of text": (native(text="word " * 2_000_000), 400),
    "no new tokens": (params(max_new_tokens=0), 400),
    "negative new tokens": (params(max_new_tokens=-5), 400),
    "new tokens in words": (params(max_new_tokens="many"), 400),
    "NaN temperature": (("/generate", b'{"text":"a","temperature":NaN}'), 400),
    "infinite temperature": (("/generate", b'{"text":"a","temperature":1e999}'), 400),
    "negative temperature": (params(temperature=-1), 400),
    "top_p over 1": (params(top_p=1.5), 400),
    "bias beyond the vocabulary": (params(logit_bias={"99999": 1}), 400),
    "unknown route": (("/generatee", b"{}"), 404),
    "unknown model": (
        ("/v1/completions", b'{"model":"gpt-17","prompt":"a"}'),
        404,
    ),
    "chat without messages": (("/v1/chat/completions", b'{"messages":[]}'), 400),
    "chat with a wrong role": (("/v1/chat/completions", b'{"messages":"hi"}'), 400),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered_and_the_next_request_is_served(url, name):
    (path, body), status = BAD[name]
    got, answer = ask(url + path, body)
    assert got == status, answer
    assert answer["error"]["message"]
    assert generate(url, input_ids=[5], max_new_tokens=1)["output_ids"]


@pytest.mark.slow
def test_the_wrong_method_is_answered_with_the_right_one(url):
    got, answer = ask(f"{url}/generate", method="DELETE")
    assert got == 405
    assert "POST" in answer["error"]["message"]


@pytest.mark.slow
def test_a_huge_number_of_new_tokens_is_cut_at_the_context(url):
    prompt = [5] * (CONTEXT - 4)
    params = {"max_new_tokens": 10**12, "ignore_eos": True}
    answer = generate(url, input_ids=prompt, sampling_params=params)
    assert len(answer["output_ids"]) == 4
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.slow
def test_what_a_cluster_says_of_itself(url):
    assert ask(f"{url}/health")[0] == 200
    assert ask(f"{url}/server_info")[0] == 200
    assert "tandem" in ask(f"{url}/metrics")[1]
