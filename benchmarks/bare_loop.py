"""The upper bound for decoding: a Llama decoder in plain torch without a serving engine.

q, k and v are one matrix product, and so are gate and up. Grouped attention does not expand K and V. The KV
cache of all streams is one dense tensor. It has no pages and no requests, and samples greedily.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class BareLoop:
    """Greedy decoding of `num_streams` streams of equal length.

    Args:
        model: A LlamaForCausalLM, as transformers loads it.
    """

    def __init__(self, model: Any, num_streams: int, max_tokens: int) -> None:
        config = model.config
        self._eps = config.rms_norm_eps
        self._num_heads, self._num_kv = config.num_attention_heads, config.num_key_value_heads
        self._dim = config.hidden_size // self._num_heads
        self._layers = [_layer(layer) for layer in model.model.layers]
        self._embed = model.model.embed_tokens.weight
        self._norm = model.model.norm.weight
        dtype = self._embed.dtype
        shape = (len(self._layers), num_streams, self._num_kv, max_tokens, self._dim)
        self._keys, self._values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        theta = config.rope_parameters["rope_theta"]
        inverse = theta ** -(torch.arange(0, self._dim, 2).float() / self._dim)
        angles = torch.outer(torch.arange(max_tokens).float(), inverse).repeat(1, 2)
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """Return the next token of each stream. Input and output have the shape (num_streams,)."""
        x = functional.embedding(tokens, self._embed)
        num_q, num_k = self._num_heads * self._dim, self._num_kv * self._dim
        for index, layer in enumerate(self._layers):
            qkv = functional.linear(self._normed(x, layer.input_norm), layer.qkv)
            q, k, v = torch.split(qkv, [num_q, num_k, num_k], dim=-1)
            keys, values = self._keys[index], self._values[index]
            keys[:, :, position] = self._rotated(k.view(-1, self._num_kv, self._dim), position)
            values[:, :, position] = v.view(-1, self._num_kv, self._dim)
            q = self._rotated(q.view(-1, self._num_heads, self._dim), position)
            q = q.view(-1, self._num_kv, self._num_heads // self._num_kv, self._dim)
            scores = q @ keys[:, :, : position + 1].transpose(-1, -2) * self._dim**-0.5
            weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
            attended = (weights @ values[:, :, : position + 1]).reshape(len(tokens), num_q)
            x = x + functional.linear(attended, layer.out)
            gate_up = functional.linear(self._normed(x, layer.post_norm), layer.gate_up)
            gate, up = gate_up.chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        return functional.linear(self._normed(x, self._norm), self._embed).argmax(dim=-1)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * self._cos[position] + torch.cat([-right, left], -1) * self._sin[position]


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    with torch.inference_mode():
        return _Layer(
            input_norm=layer.input_layernorm.weight,
            qkv=torch.cat([linear.weight for linear in projections]),
            out=attention.o_proj.weight,
            post_norm=layer.post_attention_layernorm.weight,
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=mlp.down_proj.weight,
        )
