"""Observes in one short forward what a loaded model needs of attention, or why it is not supported.

Nothing is guessed from a model's name. Every layer must call our attention exactly once, with supported
arguments, be of a supported kind, and cache nothing but K and V. The tensors that layers pass determine the
layout of a page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tandem.engine.attention import (
    AttentionNotServed,
    Kept,
    Latents,
    LayerInputs,
    PagedModel,
    PagedPast,
    Scoring,
)
from tandem.engine.attention_torch import empty_output, visible
from tandem.engine.shape import AttentionFeature
from tandem.wire.hand_off import LayerKV

# Supported kinds of layers. Others keep a recurrent state, or select keys in their own way.
_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
_NUM_ROWS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """What the layers of a model pass to attention.

    Attributes:
        layers: What each layer stores per token.
        sources: Pairs (layer, source): each layer that stores nothing, and the layer whose K and V it reads.
        model: The model, set up with the latents, chunks and windows of its layers.
        called: Names of the modules that the forward called, except `kv_b_proj`, whose weights are also
            read directly.
        scorings: How each layer scores.
    """

    layers: tuple[LayerKV, ...]
    sources: tuple[tuple[int, int], ...]
    features: frozenset[AttentionFeature]
    model: PagedModel
    called: frozenset[str]
    scorings: tuple[Scoring, ...]

    def repeated(self, of_kind: Sequence[int]) -> "Observed":
        """Return the observation of a larger model, given for each of its layers a similar layer of this one."""
        layers = tuple(self.layers[index] for index in of_kind)
        last = {like: index for index, like in enumerate(of_kind)}
        read = dict(self.sources)
        sources = tuple((i, last[read[like]]) for i, like in enumerate(of_kind) if like in read)
        return replace(self, layers=layers, sources=sources)

    def cut(self, shares: int) -> "Observed":
        """Return the observation of one rank, if `shares` ranks split the KV heads."""
        layers = tuple(
            LayerKV(each.num_kv_heads // shares, each.key_dim, each.value_dim)
            for each in self.layers
        )
        return replace(self, layers=layers)


def observe(module: nn.Module, text_config: Any) -> Observed:
    """Run one short forward of a model, and return what its layers pass to attention.

    Raises:
        ConfigInvalid: The model is not supported; the message gives the reason.
    """
    kinds = _layer_kinds(text_config)
    chunks, windows = _chunks(kinds, text_config), _windows(kinds, text_config)

    def model(latents: Mapping[int, Latents], *, has_past: bool) -> PagedModel:
        return PagedModel(
            module, latents=latents, chunks=chunks, windows=windows, has_past=has_past
        )

    has_past = True
    try:
        observer = _forward(model({}, has_past=True), text_config)
    except _ForwardFailed:
        # Some models use their cache in ways that `PagedPast` does not support, but also run without one.
        has_past = False
        observer = _forward(model({}, has_past=False), text_config)
    observer.check_complete(text_config)
    observer.check_windows(kinds)
    latents = {} if _is_sharded(module) else _latents(module, observer)
    layers, sources = observer.layers(latents)
    features: set[AttentionFeature] = set()
    if any(layer.sinks is not None for layer in observer.inputs.values()):
        features.add("sinks")
    if chunks:
        features.add("chunks")
    if latents:
        features.add("latents")
    if any(each.value_dim not in (0, each.key_dim) for each in layers):
        features.add("unequal")
    has_past = has_past and (observer.has_asked or bool(latents))
    read = {getattr(each, "kv_b_proj", None) for each in module.modules()}
    called = frozenset(
        name for name, each in module.named_modules() if each in observer.called - read
    )
    paged = model(latents, has_past=has_past)
    scorings = tuple(layer.scoring for _, layer in sorted(observer.inputs.items()))
    return Observed(layers, sources, frozenset(features), paged, called, scorings)


@dataclass(slots=True)
class _Observer:
    """Records what layers pass to attention, and attends within the rows.

    Attributes:
        inputs: What each layer passed to attention, by layer number.
        kept: What each layer passed to its cache, by layer number.
        has_asked: Whether the model queried its cache for the positions of the rows.
        called: Modules that were called.
    """

    inputs: dict[int, LayerInputs] = field(default_factory=dict)
    kept: Mapping[int, Kept] = field(default_factory=dict)
    has_asked: bool = False
    called: set[nn.Module] = field(default_factory=set)

    def attend(self, layer: LayerInputs) -> torch.Tensor:
        """Record a layer's inputs; return the attention over this forward's rows alone."""
        if layer.index in self.inputs:
            raise AttentionNotServed(
                f"layer {layer.index} attends twice, which needs K and V of its own for each time"
            )
        if layer.query.shape[1] % layer.key.shape[1]:
            raise AttentionNotServed("its query heads are no multiple of its KV heads")
        self.inputs[layer.index] = layer
        rows = torch.arange(len(layer.query), device=layer.query.device)
        mask = visible(rows[:, None], rows, layer.scoring)
        out = empty_output(layer)
        group = layer.query.shape[1] // layer.key.shape[1]
        key, value = (part.repeat_interleave(group, dim=1) for part in (layer.key, layer.value))
        out[:] = nn.functional.scaled_dot_product_attention(
            layer.query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            attn_mask=mask,
            scale=layer.scoring.scale,
        ).transpose(0, 1)
        return out

    def check_complete(self, text_config: Any) -> None:
        """Raise unless every layer attended."""
        missing = sorted(set(range(text_config.num_hidden_layers)) - self.inputs.keys())
        if len(missing) == text_config.num_hidden_layers:
            raise AttentionNotServed(
                "its attention does not go through transformers' attention interface"
            )
        if missing:
            raise AttentionNotServed(
                f"not all of its layers attend through transformers' attention interface, such as "
                f"layer {missing[0]}"
            )
        if len(self.inputs) > text_config.num_hidden_layers:
            raise AttentionNotServed("it has attention beside its layers")

    def check_windows(self, kinds: list[str]) -> None:
        """Raise unless layers of sliding attention, and no others, have a window."""
        for index, kind in enumerate(kinds):
            window = self.inputs[index].scoring.window
            if (window is not None) != (kind == "sliding_attention"):
                raise AttentionNotServed(
                    f"layer {index} is of kind {kind!r} and has {window or 'no'} window"
                )

    def layers(
        self, latents: Mapping[int, Latents]
    ) -> tuple[tuple[LayerKV, ...], tuple[tuple[int, int], ...]]:
        """Return what each layer stores, and the sources of layers that store nothing."""
        found: list[LayerKV] = []
        sources: list[tuple[int, int]] = []
        owners: dict[tuple[int, int], int] = {}
        for index, layer in sorted(self.inputs.items()):
            # The tensors of all layers are still alive, so equal addresses mean the same tensor.
            name = layer.key.data_ptr(), layer.value.data_ptr()
            owner = owners.setdefault(name, index)
            if owner != index:
                sources.append((index, owner))
                found.append(LayerKV(0, 0, 0))
            elif index in latents:
                dims = sum(part.shape[-1] for part in self.kept[index])
                found.append(LayerKV(1, dims, 0))
            else:
                _, num_heads, key_dim = layer.key.shape
                found.append(LayerKV(num_heads, key_dim, layer.value.shape[-1]))
        return tuple(found), tuple(sources)


def _layer_kinds(text_config: Any) -> list[str]:
    """Return the kind of each layer; empty if the config does not list them."""
    kinds = list(getattr(text_config, "layer_types", None) or [])
    unknown = sorted({kind for kind in kinds if kind not in _KINDS})
    if unknown:
        raise AttentionNotServed(f"it has layers of kind {', '.join(map(repr, unknown))}")
    return kinds


def _chunks(kinds: list[str], text_config: Any) -> dict[int, int]:
    chunk = getattr(text_config, "attention_chunk_size", None)
    return {i: chunk for i, kind in enumerate(kinds) if kind == "chunked_attention" and chunk}


def _windows(kinds: list[str], text_config: Any) -> dict[int, int]:
    """Return the window of each layer that may express it only through its mask."""
    window = getattr(text_config, "sliding_window", None)
    if window is None or window < 1:  # some configs use 0 for no window
        return {}
    slides = [kind == "sliding_attention" for kind in kinds] or [
        True
    ] * text_config.num_hidden_layers
    return {index: window for index, is_sliding in enumerate(slides) if is_sliding}


class _ForwardFailed(AttentionNotServed):
    """A model's forward raised something."""


def _forward(model: PagedModel, text_config: Any) -> _Observer:
    """Run the forward and return its observer."""
    observer = _Observer()
    hooks = [
        each.register_forward_pre_hook(lambda module, _inputs: observer.called.add(module))
        for each in model.module.modules()
    ]
    device = next(model.module.parameters()).device
    ids = torch.arange(1, _NUM_ROWS + 1, device=device) % text_config.vocab_size
    positions = torch.arange(_NUM_ROWS, device=device)
    try:
        with torch.inference_mode():
            past = PagedPast(positions)
            model.logits(ids, positions, positions[-1:], observer.attend, past=past)
            observer.kept, observer.has_asked = past.kept, past.is_asked
    except AttentionNotServed:
        raise
    except Exception as error:
        raise _ForwardFailed(
            f"its forward needs more than tokens and their positions: {error}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return observer


def _latents(module: nn.Module, observer: _Observer) -> dict[int, Latents]:
    """Return, for each layer of latent attention, how it expands its cached latents to K and V."""
    found = {}
    for each in module.modules():
        index, expand = getattr(each, "layer_idx", None), getattr(each, "kv_b_proj", None)
        # Not for quantized layers: their stored weights are not the actual values.
        if index in observer.kept and index in observer.inputs and type(expand) is nn.Linear:
            latents = _expanding(expand, observer.inputs[index], observer.kept[index])
            if latents is not None:
                found[index] = latents
    return found


def _expanding(expand: nn.Linear, layer: LayerInputs, kept: Kept) -> Latents | None:
    """Return how `expand` computes K and V from `kept`; None if K and V are computed in another way."""
    compressed, rope = kept
    num_heads, rank, rope_dim = layer.key.shape[1], compressed.shape[-1], rope.shape[-1]
    nope_dim, value_dim = layer.key.shape[-1] - rope_dim, layer.value.shape[-1]
    if compressed.shape[1] != 1 or rope.shape[1] != 1 or expand.bias is not None or nope_dim < 1:
        return None
    if expand.weight.shape != (num_heads * (nope_dim + value_dim), rank):
        return None
    if expand.weight.dtype != compressed.dtype:
        return None
    weight = expand.weight.detach().view(num_heads, nope_dim + value_dim, rank)
    latents = Latents(weight[:, :nope_dim], weight[:, nope_dim:])
    rows = compressed[0, 0]  # (rows, rank)
    key = torch.einsum("tr,hdr->thd", rows, latents.to_key)
    value = torch.einsum("tr,hdr->thd", rows, latents.to_value)
    carried = rope[0].transpose(0, 1).expand(-1, num_heads, -1)
    is_so = _is_close(torch.cat([key, carried], -1), layer.key) and _is_close(value, layer.value)
    return latents if is_so else None


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    epsilon = torch.finfo(expected.dtype).eps
    scale = float(expected.abs().max()) or 1.0
    return bool(((found - expected).abs().max() / scale) < 8 * epsilon**0.75)


def _is_sharded(module: nn.Module) -> bool:
    return any(type(each).__name__ == "DTensor" for each in module.parameters())
