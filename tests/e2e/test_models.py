"""One router before two models: each answers as behind its own router, and loses its nodes alone."""

import asyncio
import json
import os
import signal
from functools import partial

import pytest

from tests.e2e.clients import (
    NUM_NEW,
    PROMPTS,
    QUIET,
    SIMULATED,
    ask_all,
    assert_same,
    expected,
    is_told,
    stream_all,
)
from tests.e2e.cluster import ask, running, running_cluster
from tests.frontend.tokenizer_layouts import gpt2
from tests.patience import eventually

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
GREEDY = {"max_tokens": 20, "temperature": 0}
CALLS = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "The quick brown fox"}], **GREEDY},
    ),
    "completion": ("/v1/completions", {"prompt": "def f(x):", **GREEDY}),
    "generate": (
        "/generate",
        {"text": "Paris", "sampling_params": {"max_new_tokens": 20, "temperature": 0}},
    ),
    "tokenize": ("/tokenize", {"prompt": "The capital of France"}),
}
NAMES = ("a", "also-a", "b")
# A router of two workers answers from either of them.
NUM_ASKED = 10


@pytest.fixture
def other_model(described_model, tmp_path):
    """A directory that describes a model with a different vocabulary and chat template."""
    directory = tmp_path / "other"
    directory.mkdir()
    tokenizer = gpt2()
    config = json.loads((described_model / "config.json").read_text())
    config |= {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0, "bos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def names_at(url: str) -> list[str]:
    return [card["id"] for card in ask(f"{url}/v1/models")[1].get("data", [])]


def always(is_true) -> bool:
    return all(is_true() for _ in range(NUM_ASKED))


def completion(url: str, **fields) -> tuple[int, dict]:
    return ask(f"{url}/v1/completions", {"prompt": "Hi", "max_tokens": 4, **fields})


@pytest.mark.slow
def test_two_models_behind_one_router_answer_and_fail_apart(described_model, other_model, profile):
    flags = (*SIMULATED, *QUIET, *profile(0.01, 4))
    first_flags = ("--model", str(described_model), "--served-model-name", "a", "also-a", *flags)
    second_flags = ("--model", str(other_model), "--served-model-name", "b", *flags)
    with (
        running_cluster(*first_flags, decodes=2) as first,
        running_cluster(*second_flags) as second,
        running(
            *("lb", "--prefill", *first.prefill_urls, *second.prefill_urls),
            *("--decode", *first.decode_urls, *second.decode_urls),
            *("--workers", "2", "--node-wait-s", "0.5", "--local-prefill-threshold", "0"),
        ) as (url, _),
    ):
        assert eventually(lambda: always(lambda: tuple(names_at(url)) == NAMES))
        for name, own in (("a", first.url), ("also-a", first.url), ("b", second.url)):
            calls = {key: (path, body | {"model": name}) for key, (path, body) in CALLS.items()}
            answers, own_answers = ask_all(url, calls), ask_all(own, calls)
            for key, (status, answer) in answers.items():
                assert status == 200, answer
                assert_same([status, answer], list(own_answers[key]))
            assert answers["chat"][1]["model"] == {"also-a": "a"}.get(name, name)
        for model, status in ({"model": "c"}, 404), ({}, 400):
            answered, answer = completion(url, **model)
            assert answered == status
            assert "'a', 'also-a', 'b'" in answer["error"]["message"]

        kill = partial(os.kill, first.processes[1].pid, signal.SIGKILL)

        async def stream_both():
            streams = stream_all(url, kill, model="a"), stream_all(url, model="b")
            return await asyncio.gather(*streams)

        for model, streams in zip(
            (described_model, other_model), asyncio.run(stream_both()), strict=True
        ):
            assert streams == [expected(model, prompt, NUM_NEW) for prompt in PROMPTS]

        os.kill(first.processes[2].pid, signal.SIGKILL)
        assert eventually(lambda: always(lambda: completion(url, model="a")[0] == 503))
        assert always(lambda: completion(url, model="b")[0] == 200)
        assert completion(url)[0] == 400, "no other model answers for one that is lost"
        assert is_told(f"{url}/health", 200, "a: no decode node reachable", "b: 1 of 1")
        metrics = ask(f"{url}/metrics")[1]
        for name in ("a", "b"):
            assert (
                f'tandem_router_requests_total{{model_name="{name}",outcome="finished"}}' in metrics
            )
            assert f'tandem_edge_output_tokens_total{{model_name="{name}"}}' in metrics
        assert 'model_name="also-a"' not in metrics
        assert 'tandem_router_nodes_up{role="decode"} 1.0' in metrics
