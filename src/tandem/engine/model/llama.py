"""The forward of Llama-like models in about 12 operators per layer instead of the modelling code's 40.

    rows ─ add_norm ─ qkv ─ rotate ─ attend ─ out ─ add_norm ─ gate_up ─ gated ─ down ─▶ delta of the next add_norm

On CPUs the small operators of the modelling code take as long as reading the weights once. Weights, RoPE and attention
are those of the loaded model. Supported classes are listed below; the start-up check (`check.py`) compares the result
with transformers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tandem.engine.attention.paged import LayerInputs, Scoring
from tandem.engine.kernels.operators import Operators, operators_for
from tandem.engine.model.fusion import Product, fuse, shared_product
from tandem.engine.model.observation import Observed

# Names of classes in transformers. Other classes have additional multipliers, norms or caps.
_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer.

    Attributes:
        head_norms: Norms of query and key heads before RoPE, as in Qwen 3; else empty.
    """

    scoring: Scoring
    input_norm: _Norm
    qkv: Product
    head_norms: tuple[_Norm, ...]
    out: Product
    post_norm: _Norm
    gate_up: Product
    down: Product


def speed_up(observed: Observed) -> None:
    """Fuse a model's layers in place, and replace its forward if the model is Llama-like."""
    module = observed.model.module
    fuse(module, observed.called)
    observed.model.direct = llama_forward(module, observed.scorings)


class LlamaForward:
    """Computes a model's logits; see `llama_forward`."""

    def __init__(self, module: Any, layers: Sequence[_Layer], operators: Operators) -> None:
        config = module.config
        self._layers, self._operators = layers, operators
        self._num_heads, self._num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._embed, self._rotary = module.model.embed_tokens, module.model.rotary_emb
        self._norm, self._head = _norm(module.model.norm), module.lm_head

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        attend: Callable[[LayerInputs], torch.Tensor],
    ) -> torch.Tensor:
        """Run the model; see `PagedModel.logits`."""
        operators, num_rows = self._operators, len(token_ids)
        sizes = [self._num_heads, self._num_kv_heads, self._num_kv_heads]
        rows: torch.Tensor = self._embed(token_ids)
        cos, sin = (part[0] for part in self._rotary(rows, positions.unsqueeze(0)))
        rotate = operators.rotate
        rotary = (cos, sin) if rotate is None else None
        delta = None
        for index, layer in enumerate(self._layers):
            normed = operators.add_norm(rows, delta, layer.input_norm.weight, layer.input_norm.eps)
            heads = layer.qkv(normed).view(num_rows, sum(sizes), -1)
            query, key, value = heads.split(sizes, dim=1)
            if layer.head_norms:
                query, key = (
                    self._normed(part, norm)
                    for part, norm in zip((query, key), layer.head_norms, strict=True)
                )
            if rotate is not None:
                both = heads[:, : sizes[0] + sizes[1]]
                for part in (query, key) if layer.head_norms else (both,):
                    rotate(part, cos, sin)
            inputs = LayerInputs(index, query, key, value, layer.scoring, rotary=rotary)
            attended = attend(inputs)
            delta = layer.out(attended.reshape(num_rows, -1))
            normed = operators.add_norm(rows, delta, layer.post_norm.weight, layer.post_norm.eps)
            delta = layer.down(operators.gated(layer.gate_up(normed)))
        assert delta is not None
        rows, delta = rows[logit_rows], delta[logit_rows]
        normed = operators.add_norm(rows, delta, self._norm.weight, self._norm.eps)
        logits: torch.Tensor = self._head(normed)
        return logits

    def _normed(self, heads: torch.Tensor, norm: _Norm) -> torch.Tensor:
        # `reshape` would return rows with gaps if there is one head.
        flat = heads.contiguous().view(-1, heads.shape[-1])
        return self._operators.add_norm(flat, None, norm.weight, norm.eps).view(heads.shape)


def llama_forward(module: Any, scorings: Sequence[Scoring]) -> LlamaForward | None:
    """Return the forward of a fused model, or None if the model is not Llama-like or not all weights were fused.

    Args:
        module: Causal language model after `fuse`.
        scorings: Observed scoring of each layer.
    """
    kind, config = type(module), module.config
    is_known = kind.__name__ in _CLASSES and kind.__module__.startswith("transformers.")
    if not is_known or config.hidden_act != "silu":
        return None
    layers = [_layer(*each) for each in zip(module.model.layers, scorings, strict=True)]
    fused = [layer for layer in layers if layer is not None]
    if len(fused) < len(layers):
        return None
    weight = module.model.norm.weight
    return LlamaForward(module, fused, operators_for(weight.device, weight.dtype))


def _layer(layer: Any, scoring: Scoring) -> _Layer | None:
    """Return the parts of a layer, or None if its linear layers were not fused."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = shared_product((attention.q_proj, attention.k_proj, attention.v_proj))
    gate_up = shared_product((mlp.gate_proj, mlp.up_proj))
    is_fused = isinstance(attention.o_proj, Product) and isinstance(mlp.down_proj, Product)
    if qkv is None or gate_up is None or not is_fused:
        return None
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return _Layer(
        scoring=scoring,
        input_norm=_norm(layer.input_layernorm),
        qkv=qkv,
        head_norms=tuple(_norm(norm) for norm in norms if norm is not None),
        out=attention.o_proj,
        post_norm=_norm(layer.post_attention_layernorm),
        gate_up=gate_up,
        down=mlp.down_proj,
    )


def _norm(norm: Any) -> _Norm:
    # The norm is torch's if `fuse` replaced it, else transformers'.
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return _Norm(norm.weight, float(eps))
