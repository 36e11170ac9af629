"""References to a prompt's KV that no longer hold never bring the answer to a different prompt."""

import pytest

from benchmarks.references import KINDS, POOL, Uses, count, expect
from tests.with_vllm.models import tiny
from tests.with_vllm.servers import Pair


@pytest.mark.thorough
def test_no_use_of_a_room_brings_a_wrong_answer(tmp_path):
    model = tiny("windows in some layers", tmp_path / "model")
    expected = expect(model, tmp_path)
    kinds = [kind for kind in KINDS if kind != "out_of_range"]  # rooms name no blocks
    with Pair(tmp_path, model, 0.3, POOL) as pair:
        seen = {kind: count(Uses(pair, expected), kind, 40) for kind in kinds}
    assert {kind: answers["wrong"] for kind, answers in seen.items()} == dict.fromkeys(kinds, 0)
    assert all(answers["right"] for answers in seen.values())
