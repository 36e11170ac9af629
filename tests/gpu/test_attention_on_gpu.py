"""Every backend on a real GPU against the reference on the CPU."""

from dataclasses import replace

import pytest
import torch

from tandem.engine.attention.paged import AttentionBackend
from tandem.engine.attention.torch import TorchAttention
from tandem.engine.attention.triton import TritonAttention
from tests.attention_cases import CASES, Case, error, tolerance

pytestmark = pytest.mark.gpu

# As large as a real layer, which the shared cases, made for an interpreter, are not.
LARGE = {
    "large decodes": Case(
        tuple((1 + 977 * i, 1) for i in range(9)), 32, 8, 128, page_size=16, dtype=torch.bfloat16
    ),
    "a large decode among small ones": Case(
        ((30_000, 1), *((100 + i, 1) for i in range(15))),
        32,
        8,
        128,
        page_size=16,
        dtype=torch.bfloat16,
    ),
    "large prompts": Case(
        ((5000, 1), (1111, 1), (900, 900), (3000, 1500)),
        28,
        4,
        128,
        page_size=16,
        dtype=torch.bfloat16,
    ),
    "head dim 256, window, softcap": Case(
        ((700, 1), (800, 300)),
        8,
        4,
        256,
        page_size=16,
        window=200,
        softcap=30.0,
        dtype=torch.bfloat16,
    ),
}


def backend(name: str) -> AttentionBackend:
    if name == "torch":
        return TorchAttention()
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    return TritonAttention(processors)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_it_answers_as_the_reference_does(name, case):
    asked = (CASES | LARGE)[case]
    if name == "torch":
        # It multiplies what it masked, so NaN must not lie there.
        asked = replace(asked, fill=0.0)
    assert error(asked, backend(name), "cuda") <= tolerance(asked)
