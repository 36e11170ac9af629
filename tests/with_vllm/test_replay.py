"""An answer whose decode node dies continues on another as if one vLLM had generated all of it."""

import json
import os
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.with_vllm.models import adapter, tiny_with_tokenizer
from tests.with_vllm.nodes import Cluster, alone

NUM_TOKENS = 60
# Interpreter with the version of vLLM that a rolling restart replaces; not set: the same version.
ROLL_FROM = os.environ.get("ROLL_FROM", "")
FLAGS = ("--max-num-batched-tokens", "128", "--max-model-len", "512", "--max-num-seqs", "64")
SEEDED = {"temperature": 1.0, "seed": 7}
SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string"}, "minItems": 9}},
    "required": ["names"],
    "additionalProperties": False,
}
EBNF = 'root ::= pair*\npair ::= "<" [a-z]+ ">" [0-9]+ ";"\n'
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call>"],
        "tags": [{"begin": "<call>", "content": {"type": "any_text"}, "end": "</call>"}],
    },
}
# Our parameters and vLLM's, where they differ.
SAME = {
    "greedy": {},
    "seeded": SEEDED,
    "seeded and cut": SEEDED | {"top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "presence and frequency": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.3},
    "seeded penalties": SEEDED | {"presence_penalty": 1.5, "repetition_penalty": 1.2},
}
CASES = {
    **{name: (how, how) for name, how in SAME.items()},
    "bias": ({"logit_bias": {"500": 9.0}}, {"logit_bias": {500: 9.0}}),
    "least": (
        {"min_new_tokens": 40, "ignore_eos": False, "logit_bias": {"2": 100.0}},
        {"min_tokens": 40, "ignore_eos": False, "logit_bias": {2: 100.0}},
    ),
    "schema": (
        {"json_schema": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ),
    "seeded schema": (
        SEEDED | {"json_schema": json.dumps(SCHEMA)},
        SEEDED | {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ),
    "regex": ({"regex": "(ab|cd){90}"}, {"structured_outputs": {"regex": "(ab|cd){90}"}}),
    "ebnf": ({"ebnf": EBNF}, {"structured_outputs": {"grammar": EBNF}}),
    "log-probabilities": (SEEDED | {"return_logprob": True}, SEEDED | {"logprobs": 0}),
    "tag": (
        SEEDED | {"structural_tag": json.dumps(TAG)},
        SEEDED | {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
    ),
}


def is_sampled(name: str) -> bool:
    return "seed" in CASES[name][0]


def asked(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 40_000) for _ in range(rng.randrange(1, 300))] for _ in range(count)]


def answers(cluster, cases, kill_after: int | None = None, **more) -> list:
    """Return the answers to the cases, asked 16 at a time; kill the first decode node after so many tokens."""
    lock, num_received, killed = threading.Lock(), 0, []

    def ask(case):
        nonlocal num_received
        name, ids = case
        tokens, logprobs = [], None
        for event in cluster.events(ids, max_new_tokens=NUM_TOKENS, **CASES[name][0], **more):
            with lock:
                num_received += len(event["output_ids"]) - len(tokens)
                if kill_after is not None and num_received >= kill_after and not killed:
                    killed.append(cluster.decodes[0])
                    killed[0].process.signal_tree(signal.SIGKILL)
            tokens, logprobs = event["output_ids"], event["meta_info"].get("output_token_logprobs")
        return tokens if logprobs is None else [tokens, [entry[0] for entry in logprobs]]

    with ThreadPoolExecutor(16) as pool:
        received = list(pool.map(ask, cases))
    for node in killed:
        node.start()
        cluster.wait_up()
    return received


def differences(cases, received, expected) -> list:
    """Return the answers that differ from plain vLLM's; ours do not include a stop token."""
    return [
        (name, len(ids), answer, wanted)
        for (name, ids), answer, wanted in zip(cases, received, expected, strict=True)
        if answer not in (wanted, wanted[:-1])
    ]


@pytest.fixture(scope="module")
def model(cache, tmp_path_factory):
    return tiny_with_tokenizer(cache, tmp_path_factory.mktemp("model"))


OWN_FLAGS = ("--dtype", "float32")


def cases_of(model, directory, count, more=None, flags=FLAGS, kinds=CASES) -> tuple[list, list]:
    """Return `count` cases of each kind, and plain vLLM's answers to them."""
    cases = [(name, ids) for ids in asked(count) for name in kinds]
    common = {"max_tokens": NUM_TOKENS} | (more or {})
    questions = [(ids, common | CASES[name][1]) for name, ids in cases]
    # vLLM alone would die of a seeded prompt that it computes in several chunks.
    whole = (*flags, "--max-num-batched-tokens", "512")
    return cases, alone(model, questions, directory, *OWN_FLAGS, *whole)


@pytest.mark.parametrize(
    ("count", "kills"), [(2, 1), pytest.param(8, 3, marks=pytest.mark.thorough)]
)
def test_answers_go_on_exactly_on_another_node(model, tmp_path, count, kills):
    cases, expected = cases_of(model, tmp_path, count)
    rng = random.Random(8)
    with Cluster(tmp_path, model, 1, 2, flags=OWN_FLAGS, vllm_flags=FLAGS) as cluster:
        assert not differences(cases, answers(cluster, cases), expected)
        for _ in range(kills):
            # Early: on a busy machine the nodes are far ahead of what the client has read.
            kill_after = rng.randrange(len(cases) * NUM_TOKENS // 6)
            received = answers(cluster, cases, kill_after)
            assert not differences(cases, received, expected)
        assert cluster.num_replays() > kills
        cluster.wait_free()


@pytest.mark.thorough
def test_answers_of_an_adapter_go_on_exactly(model, tmp_path):
    path = adapter(model, tmp_path / "sql", seed=1)
    flags = (*FLAGS, "--enable-lora", "--max-lora-rank", "8")
    cases, expected = cases_of(model, tmp_path, 3, {"adapter": str(path)}, flags)
    flags += ("--lora-modules", f"sql={path}")
    with Cluster(tmp_path, model, 1, 2, flags=OWN_FLAGS, vllm_flags=flags) as cluster:
        kill_after = len(cases) * NUM_TOKENS // 3
        received = answers(cluster, cases, kill_after, adapter="sql")
        assert not differences(cases, received, expected)
        assert cluster.num_replays()


@pytest.mark.thorough
def test_unseeded_answers_with_speculation_go_on_exactly(model, tmp_path):
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    flags = (*FLAGS, "--speculative-config", json.dumps(ngrams))
    # vLLM refuses biases with speculation.
    kinds = [name for name, (how, _) in CASES.items() if not {"seed", "logit_bias"} & how.keys()]
    cases, expected = cases_of(model, tmp_path, 5, flags=flags, kinds=kinds)
    with Cluster(tmp_path, model, 1, 2, flags=OWN_FLAGS, vllm_flags=flags) as cluster:
        received = answers(cluster, cases, len(cases) * NUM_TOKENS // 3)
        assert not differences(cases, received, expected)
        assert cluster.num_replays()


@pytest.mark.thorough
def test_rolling_restart_changes_no_answer(model, tmp_path):
    cases, expected = cases_of(model, tmp_path, 4)
    own = (*OWN_FLAGS, "--drain-timeout-s", "1")
    python = ROLL_FROM or sys.executable
    with Cluster(tmp_path, model, 2, 2, own, FLAGS, python=python) as cluster:

        def restart_all() -> None:
            for node in cluster.nodes:
                node.process.signal(signal.SIGTERM)
                assert node.process.wait() == 0
                node.python = sys.executable
                node.start()
                cluster.wait_up()

        with ThreadPoolExecutor(1) as pool:
            restarting = pool.submit(restart_all)
            while not restarting.done():
                different = differences(cases, answers(cluster, cases), expected)
                # Versions may draw different tokens from one seed.
                assert not [each for each in different if not (ROLL_FROM and is_sampled(each[0]))]
            restarting.result()
        assert cluster.num_replays()
        cluster.wait_free()
