"""Whether the engine computes what transformers computes, asked at every start.

The model is a small copy of the one that is served: few layers that cover each kind, small windows, random
float32 weights. Two seeded sequences go through plain transformers, one at a time, and through the engine's
forwards: one prompt whole, then both together, cut into chunks and with a decoding row, over pages that are
shuffled. All logits are compared.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from tandem.engine.attention import (
    NAME,
    AttentionNotServed,
    register,
    text_config_of,
)
from tandem.engine.attention_backends import choose_backend
from tandem.engine.attention_torch import TorchAttention
from tandem.engine.config import EngineConfig
from tandem.engine.forward import ForwardInputs, Ints
from tandem.engine.fusion import fuse
from tandem.engine.kv_pool import make_pool
from tandem.engine.observation import Observed, observe
from tandem.engine.runner import ModelRunner
from tandem.engine.shape import ModelShape, longest_context
from tandem.telemetry import log as logs

log = logs.get_logger(__name__)

# Of the largest difference of logits to their spread. In float32 models differ by some 1e-5; a mask that
# is off by one key, by 0.05 and more.
TOLERANCE = 0.01
_SEED = 1

# Of a small copy. What is made smaller where it is larger: windows so that a short sequence leaves them,
# widths that attention does not depend on so that the copy is made in a moment.
_MOST_LAYERS = 8
VOCAB_SIZE = 512
# No multiple of a row: rows of one weight differ.
_NOISE = (1 << 20) - 3

_WINDOWS = {"sliding_window": 7, "attention_chunk_size": 8, "floor_scale": 4}
_WIDTHS = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_copy(config: EngineConfig, hf_config: Any) -> Observed:
    """Check a small copy of a model, unless `skips_model_check`.

    Returns:
        What its layers ask of attention, for each layer of the whole model.

    Raises:
        AttentionNotServed: The model is not served right; the sentence says why.
    """
    began_s = time.monotonic()
    device = config.device if torch.cuda.is_available() else "cpu"
    copy = make_copy(hf_config, device, trusts_code=config.trust_remote_code)
    observed = observe(copy.module, copy.text_config)
    if not config.skips_model_check:
        sequences = draw(copy.text_config, config.page_size)
        expected = plain_logits(copy.module, sequences)
        shape = _shape_of(observed, copy.text_config.vocab_size)
        auto = msgspec.structs.replace(config, attention_backend="auto")
        backend = TorchAttention() if device == "cpu" else choose_backend(auto, shape)
        if not config.is_compiled:
            fuse(copy.module, observed.called)
        pool = make_pool(
            shape, 3 * _num_pages(sequences, config.page_size), config.page_size, device
        )
        check_logits(ModelRunner(observed.model, pool, backend), sequences, expected)
        log.info("engine.model_checked", duration_s=round(time.monotonic() - began_s, 3))
    return observed.repeated(copy.of_kind)


def draw(text_config: Any, page_size: int) -> Ints:
    """Draw two sequences longer than a page and than a window. Shape (2, num_tokens)."""
    # A longer context than is served may be computed in another way.
    num_tokens = max(page_size, *_WINDOWS.values()) + 9
    num_tokens = min(num_tokens, longest_context(text_config) or num_tokens)
    # From the middle of the vocabulary: marks are at its ends.
    vocab_size = text_config.vocab_size
    random = np.random.default_rng(_SEED)
    return random.integers(vocab_size // 4, max(vocab_size // 2, 1), (2, num_tokens))


@torch.inference_mode()
def plain_logits(module: nn.Module, sequences: Ints) -> torch.Tensor:
    """Return what transformers computes by itself. Shape (2, num_tokens, vocab_size), float32.

    The module attends through pages again afterwards.
    """
    device = next(module.parameters()).device
    module.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        rows = [
            module(input_ids=torch.from_numpy(ids[None]).to(device), use_cache=False).logits[0]
            for ids in sequences
        ]
    finally:
        module.set_attn_implementation(NAME)  # type: ignore[operator]
    return torch.stack(rows).float()


@torch.inference_mode()
def check_logits(runner: ModelRunner, sequences: Ints, expected: torch.Tensor) -> None:
    """Compare the engine's logits with those of `plain_logits`, over a pool for three sequences.

    Raises:
        AttentionNotServed: They differ.
    """
    num = sequences.shape[1]
    width = _num_pages(sequences, runner.pool.page_size)
    order = np.random.default_rng(_SEED).permutation(3 * width).astype(np.int32)
    whole, first, second = order.reshape(3, width)
    cut = num // 2 + 1
    one, other = sequences
    found = [
        # All of the first sequence; then a part of it beside all but the last token of the other; then
        # that token, decoding, beside the rest.
        (runner.forward(_rows([(one, 0, num, whole)])), expected[0]),
        (
            runner.forward(_rows([(one, 0, cut, first), (other, 0, num - 1, second)])),
            torch.cat([expected[0, :cut], expected[1, : num - 1]]),
        ),
        (
            runner.forward(_rows([(other, num - 1, num, second), (one, cut, num, first)])),
            torch.cat([expected[1, num - 1 :], expected[0, cut:]]),
        ),
    ]
    spread = expected.std(dim=-1).mean().clamp(min=1e-30)
    off = float(max((got.float() - plain).abs().max() for got, plain in found) / spread)
    # A NaN may be lost by `max`, and compares as false: both are refused.
    if not off <= TOLERANCE or any(got.isnan().any() for got, _ in found):
        raise AttentionNotServed(
            f"with a small copy, the logits of this engine are off transformers' by {off:.2g} of their "
            f"standard deviation, where rounding explains {TOLERANCE:g}"
        )


def _num_pages(sequences: Ints, page_size: int) -> int:
    return -(-len(sequences[0]) // page_size)


_Part = tuple[Ints, int, int, np.ndarray]
"""Ids of a sequence, the first and one past the last token of this forward, the sequence's pages."""


def _rows(parts: Sequence[_Part]) -> ForwardInputs:
    """Return a forward over parts of sequences that tells all logits; a decoding one comes first."""
    sizes = [end - begin for _, begin, end, _ in parts]
    num_rows = sum(sizes)
    return ForwardInputs(
        token_ids=np.concatenate([ids[begin:end] for ids, begin, end, _ in parts]),
        sources=np.full(num_rows, -1, np.int64),
        positions=np.concatenate([np.arange(begin, end) for _, begin, end, _ in parts]),
        query_starts=np.cumsum([0, *sizes]).astype(np.int32),
        kv_lens=np.array([end for _, _, end, _ in parts], np.int32),
        page_table=np.stack([pages for *_, pages in parts]),
        num_decodes=int(sizes[0] == 1),
        logit_rows=np.arange(num_rows),
    )


def _shape_of(observed: Observed, vocab_size: int) -> ModelShape:
    elements = sum(each.num_kv_heads * (each.key_dim + each.value_dim) for each in observed.layers)
    return ModelShape(
        num_layers=len(observed.layers),
        num_kv_heads=1,
        head_dim=elements,
        vocab_size=vocab_size,
        context_length=1,
        eos_token_ids=frozenset(),
        dtype="float32",
        kv_dtype="float32",
        fingerprint="",
        layers=observed.layers,
        sources=observed.sources,
        attention=observed.features,
    )


# ── a small copy of a config ─────────────────────────────────────────────────────────────────────
#
# It has few layers that cover each kind, small windows and a small vocabulary. What decides how attention
# works stays: heads, their sizes, the rope, the order of kinds.


@dataclass(frozen=True, slots=True, eq=False)
class SmallCopy:
    """A model of a small copy of a config.

    Attributes:
        of_kind: For each layer of the whole model, one of its kind in the copy.
    """

    module: torch.nn.Module
    text_config: Any
    of_kind: tuple[int, ...]


def make_copy(hf_config: Any, device: str, *, trusts_code: bool) -> SmallCopy:
    """Make a model of a small copy of a config, with seeded random float32 weights.

    Raises whatever transformers raises of a config that no model can be made of.
    """
    text = text_config_of(hf_config)
    layers, of_kind = _chosen(text)

    def copy(changes: dict[str, int]) -> SmallCopy:
        small = _reduced(text, layers, changes)
        module = _build(_composed(hf_config, text, small), device, trusts_code=trusts_code)
        return SmallCopy(module, small, of_kind)

    try:
        return copy({**_WINDOWS, **_WIDTHS})
    except Exception:  # noqa: BLE001 - configs raise what they please; fewer changes may pass
        return copy({**_WINDOWS, "vocab_size": VOCAB_SIZE})


def _chosen(text: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layers that a copy has, and for each layer of the whole its like in the copy."""
    count = int(text.num_hidden_layers)
    by_layer = [each for value in text.to_dict().values() if (each := _by_layer(value, count))]
    shared = int(getattr(text, "num_kv_shared_layers", 0) or 0)
    dense = int(getattr(text, "first_k_dense_replace", 0) or 0)
    kinds = [
        (*(str(each.get(index)) for each in by_layer), index >= count - shared, index < dense)
        for index in range(count)
    ]
    first: dict[Any, int] = {}
    for index, kind in enumerate(kinds):
        first.setdefault(kind, index)
    chosen = sorted(first.values())[:_MOST_LAYERS]
    others = [index for index in range(count) if index not in chosen]
    chosen = sorted(chosen + others[: max(0, 2 - len(chosen))])
    # A kind that found no place is taken for the last of those that did.
    of_kind = [chosen.index(min(first[kind], chosen[-1])) for kind in kinds]
    return tuple(chosen), tuple(of_kind)


def _by_layer(value: object, count: int) -> dict[int, Any]:
    """Return what a value of a config has for each layer; nothing where it is of another kind."""
    if isinstance(value, list | tuple) and len(value) == count > 1:
        return dict(enumerate(value))
    # Settings of some layers, by their numbers; names of labels have numbers too.
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        return {}
    return {int(key): each for key, each in value.items() if str(key).isdigit()}


def _reduced(text: Any, layers: tuple[int, ...], changes: dict[str, int]) -> Any:
    """Return a config of these layers, made smaller by `changes` where it has larger."""
    facts, count = text.to_dict(), int(text.num_hidden_layers)
    names: dict[str, str] = getattr(text, "attribute_map", {})
    for name, value in facts.items():
        each = _by_layer(value, count)
        if each and isinstance(value, dict):
            facts[name] = {i: each[index] for i, index in enumerate(layers) if index in each}
        elif each:
            facts[name] = [each[index] for index in layers]
    for name, value in changes.items():
        key = names.get(name, name)
        if key in facts:
            facts[key] = _at_most(facts[key], value)
    facts[names.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    if shared := facts.get("num_kv_shared_layers"):
        facts["num_kv_shared_layers"] = sum(index >= count - shared for index in layers)
    if dense := facts.get("first_k_dense_replace"):
        facts["first_k_dense_replace"] = sum(index < dense for index in layers)
    facts.pop("quantization_config", None)  # the copy's numbers are plain
    _reduce_experts(facts, names)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if facts.get(name) is not None:
            facts[name] = 0
    return type(text).from_dict(facts)


def _at_most(given: Any, most: int) -> Any:
    """Return a size, or the sizes of all layers, no larger than `most`; what is no size stays."""
    if isinstance(given, list):
        return [_at_most(each, most) for each in given]
    return min(given, most) if isinstance(given, int) else given


def _reduce_experts(facts: dict[str, Any], names: dict[str, str]) -> None:
    per_token = int(facts.get(names.get("num_experts_per_tok", "num_experts_per_tok")) or 0)
    least = max(8, 2 * per_token, 4 * int(facts.get("n_group") or 0))
    for name in (names.get(each, each) for each in _EXPERTS):
        if isinstance(facts.get(name), int) and facts[name] > least:
            facts[name] = least


def _composed(hf_config: Any, text: Any, small: Any) -> Any:
    """Return the config that a model is made of: the text's own where transformers knows it so."""
    if text is hf_config or type(small) in AutoModelForCausalLM._model_mapping:  # noqa: SLF001
        return small
    facts = hf_config.to_dict()
    facts["text_config"] = small.to_dict()
    facts.pop("quantization_config", None)
    return type(hf_config).from_dict(facts)


def _build(config: Any, device: str, *, trusts_code: bool) -> torch.nn.Module:
    with torch.device(device), no_init_weights():
        module: torch.nn.Module = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=register(),
            trust_remote_code=trusts_code,
        )
    # One block of noise for all weights: to draw each costs seconds where layers are wide.
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.is_floating_point():
                _fill(weight, noise)
    return module.eval().requires_grad_(requires_grad=False)


def _fill(weight: torch.Tensor, noise: torch.Tensor) -> None:
    """Draw a weight so that each layer shapes the logits, and what often is all ones or zeros counts too."""
    if weight.dim() < 2:  # norms, biases, sinks
        weight.copy_(1 + 0.3 * noise[: weight.numel()].view(weight.shape))
        return
    for begin, part in enumerate(torch.split(weight.view(-1), len(noise))):
        torch.mul(noise.roll(begin)[: len(part)], weight.shape[-1] ** -0.5, out=part)
