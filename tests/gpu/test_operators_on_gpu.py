"""The Triton operators on a real GPU against plain torch there."""

import pytest
import torch

from tests.engine.operators_interpreted import DTYPES, errors_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_answer_as_plain_torch_does(dtype):
    with torch.device("cuda"):
        errors = errors_of(dtype)
    assert {case: value for case, value in errors.items() if value > DTYPES[dtype]} == {}
