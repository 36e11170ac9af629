"""The Triton operators: results in Triton's interpreter, and compilation for GPUs."""

import pytest

from tests.engine.operators_interpreted import DTYPES
from tests.engine.triton_compiled import compile_typed, operators
from tests.interpreter import interpreted

# Triton's interpreter takes minutes of CPU time.
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, float]]:
    """Errors by type and case, from a process that interprets the kernels."""
    return interpreted("tests.engine.operators_interpreted")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", ["norm", "gate"])
def test_triton_operator_matches_torch(errors, operator, dtype):
    own = {case: value for case, value in errors[str(dtype)].items() if case.startswith(operator)}
    assert len(own) >= 5
    assert {case: value for case, value in own.items() if value > DTYPES[dtype]} == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_operators_compile_with_16_byte_accesses(dtype, capability):
    for name, typed in operators(dtype).items():
        compiled = compile_typed(name, typed, capability)
        assert compiled.metadata.shared <= 48 << 10
        assert "ld.global.v4.b32" in compiled.asm["ptx"]
        assert "st.global.v4.b32" in compiled.asm["ptx"]
