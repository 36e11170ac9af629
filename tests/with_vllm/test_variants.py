"""Speculative decoding and quantized weights: answers equal those of vLLM in one process."""

import json

import pytest

from tests.with_vllm.models import embedded, prompts, quantized
from tests.with_vllm.nodes import Cluster, alone, check_answers

pytestmark = pytest.mark.thorough


def test_prompt_lookup_speculation_matches_plain_vllm(tmp_path, cache):
    model = embedded(cache)
    loops = [ids[:20] * 12 for ids in prompts(40_000, block=128, longest=600) if len(ids) > 20][::3]
    wanted = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    flags = ("--speculative-config", json.dumps(wanted), "--max-model-len", "1024")
    expected = alone(model, [(ids, {}) for ids in loops], tmp_path, "--dtype", "float32", *flags)
    own = ("--dtype", "float32")
    with Cluster(tmp_path, model, flags=own, vllm_flags=flags) as cluster:
        assert [cluster.generate(ids) for ids in loops] == expected
        cluster.wait_free()


def test_quantized_checkpoint_matches_plain_vllm(tmp_path, cache):
    model = quantized(embedded(cache), tmp_path / "model")
    asked = prompts(40_000, block=128, longest=700)
    flags = ("--max-num-batched-tokens", "512", "--max-model-len", "1024")
    own = ("--dtype", "bfloat16")
    expected = alone(model, [(ids, {}) for ids in asked * 2], tmp_path, *own, *flags)
    with Cluster(tmp_path, model, flags=own, vllm_flags=flags) as cluster:
        check_answers(cluster, asked, expected, is_exact_at_once=False)
