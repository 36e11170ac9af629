"""Requests with a LoRA adapter: same answers as plain vLLM, and no prefix shared between adapters."""

import random

import pytest

from tests.with_vllm.models import adapter, embedded
from tests.with_vllm.nodes import NUM_NEW, Cluster, alone, get, post

FLAGS = ("--max-model-len", "1024", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")


@pytest.mark.thorough
def test_adapters_match_plain_vllm_and_share_no_prefix(tmp_path, cache):
    model, rng = embedded(cache), random.Random(5)
    paths = {
        name: adapter(model, tmp_path / name, seed) for seed, name in enumerate(["sql", "law"])
    }
    names = [None, "sql", "law"]
    asked = [[rng.randrange(3, 40_000) for _ in range(length)] for length in (1, 130, 400)]
    # Each prompt with each adapter, one after the other, then all again with a warm cache.
    turns = [(ids, name) for _ in range(2) for ids in asked for name in names]
    own = {name: {"adapter": str(path)} for name, path in paths.items()}
    questions = [(ids, own.get(name, {})) for ids, name in turns]
    expected = alone(model, questions, tmp_path, "--dtype", "float32", *FLAGS)
    assert len({tuple(answer) for answer in expected[3:6]}) == 3
    modules = ("--lora-modules", *(f"{name}={path}" for name, path in paths.items()))
    with Cluster(
        tmp_path, model, flags=("--dtype", "float32"), vllm_flags=(*FLAGS, *modules)
    ) as cluster:
        assert [cluster.generate(ids, adapter=name) for ids, name in turns] == expected
        models = get(f"{cluster.url}/v1/models")[1]["data"]
        assert [each["id"] for each in models][1:] == ["sql", "law"]
        body = {"model": "law", "prompt": asked[1], "max_tokens": NUM_NEW, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        status, answer = post(f"{cluster.url}/v1/completions", body)
        assert (status, answer["model"]) == (200, "law")
        assert answer["choices"][0]["token_ids"] == expected[turns.index((asked[1], "law"))]
        status, answer = post(f"{cluster.url}/v1/completions", body | {"model": "poems"})
        assert status == 404
        assert "'sql', 'law'" in answer["error"]["message"]
        cluster.wait_free()
