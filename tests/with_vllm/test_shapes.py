"""Every shape of models and settings: nodes answer like vLLM in one process, or refuse it at start."""

import pytest

from tests.with_vllm.shapes import SHAPES, Refused, Served

QUICK = ("Windows in some layers (Gemma 3)",)


def cases(kind):
    found = [each for each in SHAPES if isinstance(each, kind)]
    marks = dict.fromkeys(QUICK, ())
    return [
        pytest.param(each, id=each.name, marks=marks.get(each.name, pytest.mark.thorough))
        for each in found
    ]


@pytest.mark.parametrize("shape", cases(Served))
def test_answers_match_plain_vllm(tmp_path, shape):
    seen = shape.run(tmp_path)
    assert seen.num_equal == seen.num_asked
    assert seen.num_replayed == 0
    if shape.differs:
        assert seen.num_repeated < seen.num_asked, "vLLM itself is exact, so nodes must be"
    else:
        assert seen.num_equal_at_once == seen.num_repeated == seen.num_asked
    drafted, drafted_alone = seen.num_drafted
    assert drafted == drafted_alone
    assert bool(drafted) == shape.has_drafts


@pytest.mark.parametrize("shape", cases(Refused))
def test_unsupported_shape_is_refused_at_start(tmp_path, shape):
    assert shape.refusal(tmp_path)
