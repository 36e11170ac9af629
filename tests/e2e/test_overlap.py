"""The tokens through the cluster are the same whether layers leave one by one or chunks as a whole."""

import json
import urllib.request

import pytest

from tests.e2e.cluster import running_cluster

# 32 pages of 24 KiB a layer: layers leave eleven at a time.
CHUNK = 512
FLAGS = (
    *("--dtype", "float32", "--chunked-prefill-size", str(CHUNK), "--verify-kv", "always"),
    *("--context-length", "1024", "--max-total-tokens", "4096", "--log-level", "warning"),
)


def answers(model, granularity: str) -> list[list[int]]:
    flags = ("--model", str(model), "--push-granularity", granularity, *FLAGS)
    with running_cluster(*flags) as cluster:
        return [generate(cluster.url, [3 + i * 7 % 900 for i in range(n)]) for n in (40, 700)]


def generate(url: str, prompt: list[int]) -> list[int]:
    params = {"max_new_tokens": 8, "temperature": 0.8, "sampling_seed": 5, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": params}).encode()
    asked = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as response:
        return json.load(response)["output_ids"]


@pytest.mark.slow
def test_tokens_are_equal_however_pages_leave(embedded_model):
    assert answers(embedded_model, "layer") == answers(embedded_model, "chunk")
