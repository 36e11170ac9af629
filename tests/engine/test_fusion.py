"""Fused and packed layers compared with the layers that they replace."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tandem.engine.kernels.narrow_product import MAX_ROWS, NarrowProduct, fits_bfloat16
from tandem.engine.model import fusion
from tandem.engine.model.fusion import Product, fuse
from tests.tiny_models import CONFIGS, VOCAB_SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_fused_model_matches_the_original(kind, dtype, tiny_model):
    path = tiny_model(kind)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    ids = torch.arange(24).unsqueeze(0) * 7 % VOCAB_SIZE
    with torch.inference_mode():
        before = model(input_ids=ids, use_cache=False).logits.float()
        assert fuse(model, dict(model.named_modules())) > 0
        after = model(input_ids=ids, use_cache=False).logits.float()
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(after, before, atol=tolerance, rtol=tolerance)


class Odd(nn.Module):
    """Calls its siblings with different tensors and in a different order."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 5), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up_proj(x)
        return torch.cat([self.gate_proj(x + 1), up, self.gate_proj(x), self.up_proj(x * 2)], -1)


@torch.inference_mode()
def test_fused_siblings_are_correct_in_any_call_order():
    odd = Odd()
    x = torch.randn(4, 8)
    before = odd(x)
    fuse(odd, dict(odd.named_modules()))
    torch.testing.assert_close(odd(x), before)
    torch.testing.assert_close(odd(x), before)


class Reader(nn.Module):
    """Calls one layer and reads the weights of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(x) @ self.read.weight.T


@torch.inference_mode()
def test_layer_whose_weights_are_read_directly_is_not_fused():
    reader, x = Reader(), torch.randn(4, 8)
    before = reader(x)
    assert fuse(reader, {"called"}) == 1
    torch.testing.assert_close(reader(x), before)


class Twins(nn.Module):
    """Two layers with the same weight and different biases."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.right.weight = self.left.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x))


@torch.inference_mode()
def test_layers_with_a_tied_weight_keep_their_biases():
    twins, x = Twins(), torch.randn(4, 8)
    before = twins(x)
    assert fuse(twins, dict(twins.named_modules())) == 2
    torch.testing.assert_close(twins(x), before)


@torch.inference_mode()
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("num_out", [1, 6, 101])
@pytest.mark.parametrize("dtype", MAX_ROWS)
def test_narrow_product_matches_the_product_of_bfloat16_weights(
    dtype, num_out, num_rows, has_bias, num_threads, torch_threads
):
    torch_threads(num_threads)
    torch.manual_seed(0)
    weight = torch.randn(num_out, 67).bfloat16().to(dtype)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    rows = torch.randn(num_rows, 67).to(dtype)
    assert fits_bfloat16(weight)
    expected = functional.linear(
        rows.double(), weight.double(), None if bias is None else bias.double()
    )
    tolerance = 1e-4 if dtype is torch.float32 else 1e-2  # of which bfloat16 has 8 bits
    for product in (Product(weight, bias), NarrowProduct(weight, bias)):
        found = product(rows).double()
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", MAX_ROWS)
def test_narrow_product_supports_few_rows_only(dtype):
    narrow = NarrowProduct(torch.zeros(3, 8, dtype=dtype), None)
    most = MAX_ROWS[dtype]
    assert narrow.supports(torch.zeros(most, 8, dtype=dtype))
    assert not narrow.supports(torch.zeros(most + 1, 8, dtype=dtype))
    assert not narrow.supports(torch.zeros(most, 8, dtype=torch.float16))


def test_only_weights_exact_in_bfloat16_fit():
    weight = torch.randn(8, 8).bfloat16()
    assert fits_bfloat16(weight)
    assert fits_bfloat16(weight.float())
    assert not fits_bfloat16(weight.half())
    odd = weight.float()
    odd[7, 7] += 2.0**-20
    assert not fits_bfloat16(odd)


def test_large_model_gets_no_second_copy_of_its_weights(monkeypatch):
    num_copies = 0

    def copy(weight: torch.Tensor, bias: torch.Tensor | None) -> NarrowProduct:
        nonlocal num_copies
        num_copies += 1
        return NarrowProduct(weight, bias)

    monkeypatch.setattr(fusion, "NarrowProduct", copy)
    num_bytes = 2 * 8 * (5 + 3)
    for most_bytes, expected in ((num_bytes, 1), (num_bytes - 1, 0)):
        monkeypatch.setattr(fusion, "_MAX_COPY_BYTES", most_bytes)
        num_copies, odd = 0, Odd().bfloat16()
        fuse(odd, dict(odd.named_modules()))
        assert num_copies == expected
