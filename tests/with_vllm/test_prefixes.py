"""The router knows what vLLM has cached."""

import random

from tests.patience import patiently
from tests.with_vllm.models import tiny
from tests.with_vllm.nodes import Cluster, get, post

FLAGS = ("--block-size", "32", "--skip-tokenizer-init", "--max-num-seqs", "64")


def test_a_prompt_goes_to_the_prefill_that_has_its_prefix(tmp_path):
    model, rng = tiny("experts", tmp_path / "model"), random.Random(2)
    prompts = [[rng.randrange(3, 320) for _ in range(300)] for _ in range(4)]
    policy = ("--policy", "cache_aware")
    with Cluster(
        tmp_path, model, 2, flags=("--dtype", "float32"), vllm_flags=FLAGS, router_flags=policy
    ) as cluster:

        def cached_tokens(prompt_ids):
            params = {"max_new_tokens": 4, "ignore_eos": True}
            body = {"input_ids": prompt_ids, "sampling_params": params}
            status, answer = post(f"{cluster.url}/generate", body)
            assert status == 200, answer
            return answer["meta_info"]["cached_tokens"]

        def num_known():
            nodes = get(f"{cluster.url}/server_info")[1]["nodes"]
            return [node["prefixes"]["num_blocks"] for node in nodes if node["role"] == "prefill"]

        assert cached_tokens(prompts[0]) == 0
        for _ in patiently():
            if sorted(num_known()) == [0, 2]:
                break
        assert sorted(num_known()) == [0, 2]
        for other in prompts[1:]:
            # The other prefill is as idle, and would have nothing of the prefix.
            assert cached_tokens(other) == 0
            assert cached_tokens(prompts[0][:260] + other[:40]) == 256
