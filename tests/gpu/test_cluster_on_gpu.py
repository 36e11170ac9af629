"""Prefill and decode as processes whose pools are a GPU's memory."""

import asyncio

import pytest

from tests.e2e.cluster import running_cluster, running_serve
from tests.e2e.test_parity import generate_all

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

FLAGS = (
    *("--dtype", "float32", "--page-size", "8", "--chunked-prefill-size", "32"),
    *("--max-total-tokens", "4096", "--log-level", "warning", "--device", "cuda:0"),
)
PROMPTS = [[3 + (i * 7 + n) % 300 for i in range(n)] for n in (1, 7, 8, 31, 33, 65, 100)]


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_a_cluster_on_one_gpu_gives_the_tokens_of_one_process(tiny_model, granularity):
    flags = ("--model", str(tiny_model("qwen3")), *FLAGS)
    with running_serve(*flags) as url:
        expected = asyncio.run(generate_all(url, PROMPTS, 8, sampled=False))
    pushed = ("--push-granularity", granularity, "--verify-kv", "always")
    with running_cluster(*flags, *pushed) as cluster:
        assert asyncio.run(generate_all(cluster.url, PROMPTS, 8, sampled=False)) == expected
