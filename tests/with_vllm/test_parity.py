"""What comes out of prefill and decode apart is what vLLM in one process answers, token for token."""

import json

import pytest

from tests.with_vllm.models import embedded, prompts, quantized
from tests.with_vllm.nodes import Cluster, alone, check_answers


# In bfloat16 the answers of vLLM alone depend on what else is in the batch.
@pytest.mark.parametrize(("dtype", "transport"), [("float32", "shm"), ("bfloat16", "tcp")])
def test_the_embedded_model_answers_apart_as_vllm_alone(tmp_path, cache, dtype, transport):
    model = embedded(cache)
    asked = prompts(40_000, block=128, longest=900)
    flags = ("--max-num-batched-tokens", "256", "--max-model-len", "1024")
    expected = alone(model, [(ids, {}) for ids in asked * 2], tmp_path, "--dtype", dtype, *flags)
    own = ("--dtype", dtype, "--transfer-backend", transport)
    with Cluster(tmp_path, model, flags=own, vllm_flags=flags) as cluster:
        check_answers(
            cluster, asked, expected[: 2 * len(asked)], is_exact_at_once=dtype == "float32"
        )


def test_speculation_by_lookup_in_the_prompt_answers_apart_as_vllm_alone(tmp_path, cache):
    model = embedded(cache)
    loops = [ids[:20] * 12 for ids in prompts(40_000, block=128, longest=600) if len(ids) > 20]
    wanted = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    flags = ("--speculative-config", json.dumps(wanted), "--max-model-len", "1024")
    expected = alone(model, [(ids, {}) for ids in loops], tmp_path, "--dtype", "float32", *flags)
    own = ("--dtype", "float32")
    with Cluster(tmp_path, model, flags=own, vllm_flags=flags) as cluster:
        assert [cluster.generate(ids) for ids in loops] == expected
        cluster.wait_free()


def test_a_quantized_checkpoint_answers_apart_as_in_vllm_alone(tmp_path, cache):
    model = quantized(embedded(cache), tmp_path / "model")
    asked = prompts(40_000, block=128, longest=700)
    flags = ("--max-num-batched-tokens", "512", "--max-model-len", "1024")
    own = ("--dtype", "bfloat16")
    expected = alone(model, [(ids, {}) for ids in asked * 2], tmp_path, *own, *flags)
    with Cluster(tmp_path, model, flags=own, vllm_flags=flags) as cluster:
        check_answers(cluster, asked, expected, is_exact_at_once=False)
