"""Disaggregated answers equal those of vLLM in one process, token for token."""

import asyncio

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from tests.vllm_router import vllm_router
from tests.with_vllm.models import embedded, prompts, tiny_with_tokenizer
from tests.with_vllm.nodes import NUM_NEW, Cluster, again, alone, check_answers


# In bfloat16, plain vLLM's answers depend on the rest of the batch.
@pytest.mark.parametrize(
    ("dtype", "transport", "every"),
    [
        ("float32", "auto", 6),
        pytest.param("float32", "auto", 1, marks=pytest.mark.thorough),
        pytest.param("bfloat16", "tcp", 1, marks=pytest.mark.thorough),
    ],
)
def test_embedded_model_matches_plain_vllm(tmp_path, cache, dtype, transport, every):
    model = embedded(cache)
    asked = prompts(40_000, block=128, longest=700, count=40)[::every]
    flags = ("--max-num-batched-tokens", "256", "--max-model-len", "1024")
    questions = [(ids, {}) for ids in [*asked, *again(asked)]]
    expected = alone(model, questions, tmp_path, "--dtype", dtype, *flags)
    own = ("--dtype", dtype, "--transfer-backend", transport)
    with Cluster(tmp_path, model, flags=own, vllm_flags=flags) as cluster:
        check_answers(cluster, asked, expected, is_exact_at_once=dtype == "float32")


@pytest.mark.thorough
def test_sequential_halves_of_vllm_router_match_our_router(tmp_path, cache):
    model, flags = tiny_with_tokenizer(cache, tmp_path / "model"), ("--max-model-len", "512")
    asked = prompts(40_000, block=128, longest=300, count=12)
    body = {"model": "default", "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}

    async def answers(prefill, decode):
        async def answer(ids):
            words = body | {"prompt": ids, "return_token_ids": True}
            async with session.post(server.make_url("/v1/completions"), json=words) as response:
                assert response.status == 200, await response.text()
                return (await response.json())["choices"][0]["token_ids"]

        async with (
            TestServer(vllm_router(prefill, decode)) as server,
            aiohttp.ClientSession() as session,
        ):
            one_by_one = [await answer(ids) for ids in asked]
            return one_by_one, await asyncio.gather(*map(answer, asked))

    with Cluster(tmp_path, model, flags=("--dtype", "float32"), vllm_flags=flags) as cluster:
        expected = [cluster.generate(ids) for ids in asked]
        [prefill], [decode] = cluster.prefills, cluster.decodes
        received = decode.load["received_bytes"]
        assert asyncio.run(answers(prefill.url, decode.url)) == (expected, expected)
        cluster.wait_free()
        assert decode.load["received_bytes"] > received, "decode computed the prompts itself"
