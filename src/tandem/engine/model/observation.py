"""Derives the page layout of a loaded model from a short forward, by observing what its layers pass to attention.

Nothing is derived from a model's name. `check.py` compares the logits, so only faults that its short sequences cannot
reveal are refused here: layers that select keys, and windows that layers do not apply.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tandem.engine.attention.paged import (
    AttentionNotServed,
    Kept,
    Latents,
    LayerInputs,
    PagedModel,
    PagedPast,
    Scoring,
)
from tandem.engine.shape import AttentionFeature
from tandem.wire.hand_off import LayerKV

# Supported kinds of layers. Other kinds keep a recurrent state or select keys differently.
_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
_NUM_ROWS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """The observed attention of a model's layers.

    Attributes:
        layers: Stored heads and sizes of each layer.
        sources: Pairs of a layer that stores nothing and the layer whose K and V it reads.
        model: The model, set up with the latents, chunks and windows of its layers.
        called: Names of the modules that the forward called, except `kv_b_proj`, whose weights are also read
            directly.
        scorings: Scoring of each layer.
    """

    layers: tuple[LayerKV, ...]
    sources: tuple[tuple[int, int], ...]
    features: frozenset[AttentionFeature]
    model: PagedModel
    called: frozenset[str]
    scorings: tuple[Scoring, ...]


def observe(module: nn.Module, text_config: Any) -> Observed:
    """Run a short forward of a model, and return the observed attention of its layers.

    Raises:
        ConfigInvalid: The model is not supported. The message gives the reason.
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
        # Some models use their cache in ways that `PagedPast` does not support, but also run without a cache.
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
    has_past = has_past and (observer.has_queried_length or bool(latents))
    read = {getattr(each, "kv_b_proj", None) for each in module.modules()}
    called = frozenset(
        name for name, each in module.named_modules() if each in observer.called - read
    )
    paged = model(latents, has_past=has_past)
    scorings = tuple(layer.scoring for _, layer in sorted(observer.inputs.items()))
    return Observed(layers, sources, frozenset(features), paged, called, scorings)


@dataclass(slots=True)
class _Observer:
    """Records the tensors that layers pass to attention.

    Attributes:
        inputs: Inputs of each layer's attention, by layer number.
        kept: Tensors that each layer passed to its cache, by layer number.
        has_queried_length: Whether the model queried the length of its cache.
        called: Modules that were called.
    """

    inputs: dict[int, LayerInputs] = field(default_factory=dict)
    kept: Mapping[int, Kept] = field(default_factory=dict)
    has_queried_length: bool = False
    called: set[nn.Module] = field(default_factory=set)

    def attend(self, layer: LayerInputs) -> torch.Tensor:
        """Record a layer's inputs, and return its output as if each row saw only itself."""
        if layer.index in self.inputs:
            raise AttentionNotServed(f"layer {layer.index} attends twice")
        self.inputs[layer.index] = layer
        group = layer.query.shape[1] // layer.key.shape[1]
        return layer.value.repeat_interleave(group, dim=1).to(layer.query.dtype)

    def check_complete(self, text_config: Any) -> None:
        """Raise unless all layers, and only layers, computed attention."""
        if sorted(self.inputs) != list(range(text_config.num_hidden_layers)):
            raise AttentionNotServed(
                "its attention does not go through transformers' attention interface"
            )

    def check_windows(self, kinds: list[str]) -> None:
        """Raise unless exactly the layers of sliding attention have a window."""
        for index, kind in enumerate(kinds):
            window = self.inputs[index].scoring.window
            if (window is not None) != (kind == "sliding_attention"):
                raise AttentionNotServed(
                    f"layer {index} is of kind {kind!r}, but its window is {window}"
                )

    def layers(
        self, latents: Mapping[int, Latents]
    ) -> tuple[tuple[LayerKV, ...], tuple[tuple[int, int], ...]]:
        """Return the stored heads and sizes of each layer, and the sources of layers that store nothing."""
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
    """Return the windows of layers, some of which express it only through their mask."""
    window = getattr(text_config, "sliding_window", None)
    if window is None or window < 1:  # some configs use 0 for no window
        return {}
    slides = [kind == "sliding_attention" for kind in kinds] or [
        True
    ] * text_config.num_hidden_layers
    return {index: window for index, is_sliding in enumerate(slides) if is_sliding}


class _ForwardFailed(AttentionNotServed):
    """The forward of a model raised an exception."""


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
            observer.kept, observer.has_queried_length = past.kept, past.is_length_queried
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
    """Return the weights that expand cached latents to K and V, for each layer of latent attention."""
    found = {}
    for each in module.modules():
        index, expand = getattr(each, "layer_idx", None), getattr(each, "kv_b_proj", None)
        # Quantized layers are excluded, because their stored weights are not the actual values.
        if index in observer.kept and index in observer.inputs and type(expand) is nn.Linear:
            latents = _expanding(expand, observer.inputs[index], observer.kept[index])
            if latents is not None:
                found[index] = latents
    return found


def _expanding(expand: nn.Linear, layer: LayerInputs, kept: Kept) -> Latents | None:
    """Return how `expand` computes K and V from `kept`, or None if the sizes are not those of latent attention."""
    compressed, rope = kept
    num_heads, rank = layer.key.shape[1], compressed.shape[-1]
    nope_dim, value_dim = layer.key.shape[-1] - rope.shape[-1], layer.value.shape[-1]
    if compressed.shape[1] != 1 or rope.shape[1] != 1 or expand.bias is not None or nope_dim < 1:
        return None
    weight = expand.weight.detach()
    if weight.shape != (num_heads * (nope_dim + value_dim), rank):
        return None
    if weight.dtype != compressed.dtype:
        return None
    by_head = weight.view(num_heads, nope_dim + value_dim, rank)
    return Latents(by_head[:, :nope_dim], by_head[:, nope_dim:])


def _is_sharded(module: nn.Module) -> bool:
    return any(type(each).__name__ == "DTensor" for each in module.parameters())
