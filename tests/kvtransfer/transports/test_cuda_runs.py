"""The kernel that copies runs: its bytes, in Triton's interpreter, and that it compiles for GPUs."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tandem.kvtransfer.transports.cuda_runs import BLOCK_WORDS, copy_runs
from tests.interpreter import interpreted


def test_runs_arrive_whole_and_nothing_beside_them_changes():
    assert interpreted("tests.kvtransfer.transports.runs_interpreted") is True


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_and_moves_sixteen_bytes_at_a_time(capability):
    source = ASTSource(
        copy_runs,
        {"runs": "*i64", "num_runs": "i32", "block": "constexpr"},
        {"block": BLOCK_WORDS},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["ptx"].count("ld.global.v4.b32") == BLOCK_WORDS // 128 // 4
    assert compiled.asm["ptx"].count("st.global.v4.b32") == BLOCK_WORDS // 128 // 4
