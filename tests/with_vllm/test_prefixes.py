"""Routing by the prefixes that vLLM has cached."""

import random

from tests.patience import eventually
from tests.with_vllm.models import tiny
from tests.with_vllm.nodes import Cluster, get, post

FLAGS = ("--block-size", "32", "--skip-tokenizer-init", "--max-num-seqs", "64")


def test_prompt_is_routed_to_the_prefill_with_its_prefix(tmp_path):
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

        def wait_settled(num_blocks):
            """Wait until the router sees idle prefill nodes with this total number of cached blocks."""

            def is_settled() -> bool:
                nodes = get(f"{cluster.url}/server_info")[1]["nodes"]
                prefills = [node for node in nodes if node["role"] == "prefill"]
                counts = [node["prefixes"]["num_blocks"] for node in prefills]
                is_idle = not any(node["busy_tokens"] for node in prefills)
                return is_idle and sum(counts) == num_blocks

            assert eventually(is_settled), get(f"{cluster.url}/server_info")[1]

        # The router's canary requests left prompts there.
        for node in cluster.prefills:
            assert post(f"{node.url}/flush_cache", {})[0] == 200
        wait_settled(0)
        assert cached_tokens(prompts[0]) == 0
        for number, other in enumerate(prompts[1:], 1):
            wait_settled(2 * number)
            assert cached_tokens(other) == 0
            # The other prefill node is idle too, but has none of the prefix.
            wait_settled(2 * number + 2)
            assert cached_tokens(prompts[0][:260] + other[:40]) == 256
