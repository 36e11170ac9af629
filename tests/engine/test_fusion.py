"""Fused and packed layers against the layers they replace."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tandem.engine.fusion import fuse
from tests.tiny_models import CONFIGS, VOCAB_SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_a_fused_model_computes_what_it_did(kind, dtype, tiny_model):
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
    """Calls its siblings with different tensors, and in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 5), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up_proj(x)
        return torch.cat([self.gate_proj(x + 1), up, self.gate_proj(x), self.up_proj(x * 2)], -1)


@torch.inference_mode()
def test_siblings_that_are_called_in_any_way_are_right():
    odd = Odd()
    x = torch.randn(4, 8)
    before = odd(x)
    fuse(odd, dict(odd.named_modules()))
    torch.testing.assert_close(odd(x), before)
    torch.testing.assert_close(odd(x), before)


class Reader(nn.Module):
    """Calls one layer, and reads the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(x) @ self.read.weight.T


@torch.inference_mode()
def test_a_layer_whose_weights_are_read_is_left_alone():
    reader, x = Reader(), torch.randn(4, 8)
    before = reader(x)
    assert fuse(reader, {"called"}) == 1
    torch.testing.assert_close(reader(x), before)
