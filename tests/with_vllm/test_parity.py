"""Disaggregated answers equal those of vLLM in one process, token for token."""

import pytest

from tests.with_vllm.models import embedded, prompts
from tests.with_vllm.nodes import Cluster, again, alone, check_answers


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
