"""Request parameters reach vLLM, and invalid ones are rejected."""

import subprocess
import sys

import pytest

from tests.with_vllm.models import embedded
from tests.with_vllm.nodes import Cluster, alone, post

PROMPT = list(range(1000, 1150))
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
# Our parameters, and vLLM's.
CASES = {
    "one token": ({"max_new_tokens": 1}, {"max_tokens": 1}),
    "two tokens": ({"max_new_tokens": 2}, {"max_tokens": 2}),
    "bias": ({"logit_bias": {"500": 50.0}}, {"logit_bias": {500: 50.0}}),
    "repetition": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "presence": ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    "frequency": ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
    "end of sequence": ({"ignore_eos": False}, {"ignore_eos": False}),
    "least": (
        {"ignore_eos": False, "logit_bias": {"2": 100.0}, "min_new_tokens": 5},
        {"ignore_eos": False, "logit_bias": {2: 100.0}, "min_tokens": 5},
    ),
    "stop": (
        {"logit_bias": {"500": 100.0}, "stop_token_ids": [500]},
        {"logit_bias": {500: 100.0}, "stop_token_ids": [500]},
    ),
    "schema": (
        {"json_schema": SCHEMA, "ignore_eos": False},
        {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
    ),
    "regex": (
        {"regex": "(ab|cd){3}", "ignore_eos": False},
        {"structured_outputs": {"regex": "(ab|cd){3}"}, "ignore_eos": False},
    ),
}
FLAGS = ("--max-model-len", "512")


@pytest.fixture(scope="module")
def model(cache):
    return embedded(cache)


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("cluster")
    own = ("--dtype", "float32")
    # The KV links of vLLM nodes do not read the flag, and the conformance suite expects one interval.
    with Cluster(directory, model, flags=own, vllm_flags=FLAGS, interval_ms=500) as running:
        yield running


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    questions = [(PROMPT, theirs) for _, theirs in CASES.values()]
    directory = tmp_path_factory.mktemp("alone")
    answers = alone(model, questions, directory, "--dtype", "float32", *FLAGS)
    return dict(zip(CASES, answers, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_parameter_has_the_same_effect_as_in_vllm(cluster, expected, case):
    ours, _ = CASES[case]
    tokens = cluster.generate(PROMPT, **ours)
    wanted = expected[case]
    # Our output does not include the stop token.
    assert tokens in (wanted, wanted[:-1] if wanted[-1] in (2, 500) else wanted)
    assert tokens or case == "stop"


def test_longest_prompt_is_answered(cluster):
    body = {"input_ids": [7] * 511, "sampling_params": {"temperature": 0, "ignore_eos": True}}
    status, answer = post(f"{cluster.url}/generate", body)
    assert (status, len(answer["output_ids"])) == (200, 1), answer


def test_logprobs_match_vllm(cluster):
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    apart = post(f"{cluster.url}/generate", body)[1]["meta_info"]
    prompt, answer = apart["input_token_logprobs"], apart["output_token_logprobs"]
    assert [len(prompt), len(answer)] == [len(PROMPT), 4]
    assert [entry[1] for entry in prompt] == PROMPT
    assert prompt[0][0] is None
    assert all(entry[0] < 0 for entry in prompt[1:] + answer)
    tops = apart["output_top_logprobs"]
    # With greedy sampling the sampled token is the most likely one.
    assert [top[0][:2] for top in tops] == [entry[:2] for entry in answer]


def test_several_choices_share_one_prompt(cluster):
    body = {"prompt": PROMPT, "n": 3, "max_tokens": 8, "temperature": 0}
    status, answer = post(f"{cluster.url}/v1/completions", body)
    assert status == 200
    assert len({choice["text"] for choice in answer["choices"]}) == 1
    assert len(answer["choices"]) == 3


def test_stop_string_ends_the_answer(cluster):
    body = {"text": "1 2 3 4 5 6 7 8", "sampling_params": {"temperature": 0, "stop": ["12"]}}
    status, answer = post(f"{cluster.url}/generate", body)
    assert status == 200
    assert "12" not in answer["text"]
    assert answer["meta_info"]["finish_reason"]["matched"] == "12"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": [1] * 600}, "context length (512 tokens)"),
        ({"input_ids": [1] * 512}, "context length (512 tokens)"),
        ({"input_ids": [1], "sampling_params": {"json_schema": '{"type": "nothing"}'}}, ""),
        ({"input_ids": [1], "sampling_params": {"regex": "(("}}, ""),
        ({"input_ids": [1 << 20]}, "vocabulary"),
    ],
)
def test_unsupported_request_is_rejected_with_400(cluster, body, words):
    status, answer = post(f"{cluster.url}/generate", body)
    assert status == 400, answer
    assert words in answer["error"]["message"]
    cluster.wait_free()


def test_client_cannot_name_the_other_half(cluster):
    plain = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    _, expected = post(f"{cluster.url}/v1/completions", plain)
    for name in ("kv_transfer_params", "vllm_xargs"):
        body = plain | {name: {"bootstrap_room": 1, "kv_transfer_params": {"bootstrap_room": 1}}}
        status, answer = post(f"{cluster.url}/v1/completions", body)
        assert status == 400 or answer["choices"] == expected["choices"]
    cluster.wait_free()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nodes_pass_the_conformance_suite(cluster, role, pytestconfig):
    node = (cluster.prefills if role == "prefill" else cluster.decodes)[0]
    words = ["-m", "pytest", "-q", "--confcutdir", "tests/conformance"]
    done = subprocess.run(
        [sys.executable, *words, f"tests/conformance/test_{role}.py", f"--{role}-url", node.url],
        check=False,
        capture_output=True,
        text=True,
        cwd=pytestconfig.rootpath,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    cluster.wait_free()
