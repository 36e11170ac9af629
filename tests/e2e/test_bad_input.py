"""Bad input is answered with a clear error, and the cluster lives."""

import json
import urllib.error
import urllib.request

import pytest

from tests.e2e.cluster import get_json
from tests.e2e.conftest import CONTEXT


@pytest.fixture
def url(cluster):
    return cluster.url


def send(url: str, path: str, body: bytes, method: str = "POST") -> tuple[int, dict]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, data=body, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def generate(**fields) -> tuple[str, bytes]:
    return "/generate", json.dumps(fields).encode()


def params(**sampling) -> tuple[str, bytes]:
    return generate(text="hello", sampling_params=sampling)


BAD = {
    "empty body": (("/generate", b""), 400),
    "not JSON": (("/generate", b"{not json"), 400),
    "not an object": (("/generate", b"[1]"), 400),
    "not UTF-8": (("/generate", b'{"text": "\xff\xfe"}'), 400),
    "text is a number": (generate(text=5), 400),
    "ids are words": (generate(input_ids=["a"]), 400),
    "no prompt": (generate(), 400),
    "empty prompt": (generate(input_ids=[]), 400),
    "no prompts": (generate(text=[]), 400),
    "both text and ids": (generate(text="a", input_ids=[1]), 400),
    "id beyond the vocabulary": (generate(input_ids=[49152]), 400),
    "negative id": (generate(input_ids=[-1]), 400),
    "huge id": (generate(input_ids=[2**70]), 400),
    "prompt over the context": (generate(input_ids=[5] * CONTEXT), 400),
    "10 MB of text": (generate(text="word " * 2_000_000), 400),
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
    got, answer = send(url, path, body)
    assert got == status, answer
    assert answer["error"]["message"]
    assert send(url, *generate(input_ids=[5], max_new_tokens=1))[0] == 200


@pytest.mark.slow
def test_the_wrong_method_is_answered_with_the_right_one(url):
    got, answer = send(url, "/generate", b"", method="DELETE")
    assert got == 405
    assert "POST" in answer["error"]["message"]


@pytest.mark.slow
def test_a_huge_number_of_new_tokens_is_cut_at_the_context(url):
    prompt = [5] * (CONTEXT - 4)
    body = generate(
        input_ids=prompt, sampling_params={"max_new_tokens": 10**12, "ignore_eos": True}
    )
    status, answer = send(url, *body)
    assert (status, len(answer["output_ids"])) == (200, 4)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.slow
def test_what_a_cluster_says_of_itself(url):
    assert get_json(f"{url}/health")[0] == 200
    assert get_json(f"{url}/server_info")[0] == 200
    assert "tandem" in get_json(f"{url}/metrics")[1]
