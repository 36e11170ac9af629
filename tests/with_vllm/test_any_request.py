"""Whatever a client sends, and whichever flags of vLLM a node has: an answer or a refusal, never a dead engine."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.with_vllm.models import tiny_with_tokenizer
from tests.with_vllm.nodes import Cluster, post

NUM_REQUESTS = 80
FLAGS = {
    "--max-num-batched-tokens": ("64", "2048"),
    "--max-num-seqs": ("4", "64"),
    "--block-size": ("32", "128"),
    "--max-model-len": ("256", "1024"),
    "--scheduling-policy": ("fcfs", "priority"),
    "--max-logprobs": ("0", "20"),
}
SWITCHES = ("--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--skip-tokenizer-init")
PARAMETERS = {
    "temperature": (0.0, 0.5, 1.0, 2.0, 1e9, -1.0),
    "top_p": (1.0, 0.1, 1e-9, 0.0),
    "top_k": (-1, 1, 5, 10**6, 0),
    "min_p": (0.0, 0.5, 1.0),
    "seed": (0, 1, 2**62, 2**63, -1),
    "frequency_penalty": (0.0, 2.0, -2.0, 3.0),
    "presence_penalty": (0.0, -2.0, 1.0),
    "repetition_penalty": (1.0, 1e-6, 50.0),
    "max_new_tokens": (0, 1, 2, 30, 10**6),
    "min_new_tokens": (0, 1, 40),
    "stop_token_ids": ([], [2], [5, 6, 10**6]),
    "ignore_eos": (True, False),
    "logit_bias": ({}, {"5": 100.0}, {"5": -1e30, "49151": 3.0}, {str(10**7): 1.0}),
    "n": (1, 3),
    "json_schema": ('{"type": "object"}', '{"type": "array", "maxItems": 3}', "{", "[]"),
    "regex": ("(ab)+", "(", "a{1,9}"),
    "ebnf": ('root ::= "a" root | "b"', "root ::= missing", ""),
}


def some_flags(rng: random.Random) -> list[str]:
    words = [word for name, values in FLAGS.items() for word in (name, rng.choice(values))]
    words += [switch for switch in SWITCHES if rng.random() < 0.3]
    if (
        "--no-enable-chunked-prefill" in words
    ):  # vLLM then refuses fewer tokens than the longest prompt's
        words += ["--max-num-batched-tokens", "2048"]
    return words


def some_body(rng: random.Random) -> dict:
    names = rng.sample(sorted(PARAMETERS), rng.randrange(5))
    prompt = [rng.randrange(3, 49_000) for _ in range(rng.choice((1, 2, 31, 32, 63, 65, 200, 300)))]
    body = {
        "input_ids": prompt,
        "sampling_params": {name: rng.choice(PARAMETERS[name]) for name in names},
    }
    if rng.random() < 0.3:
        body |= {"return_logprob": True, "top_logprobs_num": rng.choice((0, 2, 20, 99))}
        body["logprob_start_len"] = rng.choice((-1, 0, 5, 10**6))
    if rng.random() < 0.1:
        body |= rng.choice(({"priority": 3}, {"lora_path": "none"}, {"input_ids": [10**9]}))
    return body


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(1, 4))]
)
def test_no_request_ends_an_engine(cache, tmp_path, seed):
    rng, model = random.Random(seed), tiny_with_tokenizer(cache, tmp_path / "model")
    flags = some_flags(rng)
    bodies = [some_body(rng) for _ in range(NUM_REQUESTS)]
    own = ("--dtype", "float32")
    with Cluster(tmp_path, model, flags=own, vllm_flags=flags) as cluster:
        with ThreadPoolExecutor(8) as pool:
            answered = list(pool.map(lambda body: post(f"{cluster.url}/generate", body), bodies))
        wrong = [
            (body, status, answer)
            for body, (status, answer) in zip(bodies, answered, strict=True)
            if status not in {200, 400}
        ]
        assert not wrong, (flags, wrong[:3])
        assert sum(status == 200 for status, _ in answered) > NUM_REQUESTS // 4
        assert all(node.process.is_running() for node in cluster.nodes)
        cluster.wait_free()
