"""The Triton operators: their answers, in Triton's interpreter, and that they compile for GPUs."""

import pytest

from tests.engine.operators_interpreted import DTYPES
from tests.engine.triton_compiled import compile_typed, operators
from tests.interpreter import interpreted


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, float]]:
    """What a process that interprets the kernels found: errors by type and case."""
    return interpreted("tests.engine.operators_interpreted")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", ["norm", "gate"])
def test_an_operator_answers_as_plain_torch_does(errors, operator, dtype):
    own = {case: value for case, value in errors[str(dtype)].items() if case.startswith(operator)}
    assert len(own) >= 5
    assert {case: value for case, value in own.items() if value > DTYPES[dtype]} == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_operators_compile_and_move_sixteen_bytes_at_a_time(dtype, capability):
    for name, typed in operators(dtype).items():
        compiled = compile_typed(name, typed, capability)
        assert compiled.metadata.shared <= 48 << 10
        assert "ld.global.v4.b32" in compiled.asm["ptx"]
        assert "st.global.v4.b32" in compiled.asm["ptx"]
