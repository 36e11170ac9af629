"""Checks at every start that the engine computes the same logits as transformers.

Two seeded sequences go through plain transformers, one at a time, and through the engine's forwards: first a whole
prompt, then both sequences in chunks and as decoding rows, over shuffled pages. All logits are compared. A small
model is checked with its own weights. If that is too expensive or not conclusive, as in 16 bits, a small copy is
checked: few layers of each kind, small windows, and random float32 weights.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from tandem.engine.attention.backends import choose_backend
from tandem.engine.attention.paged import (
    NAME,
    AttentionBackend,
    AttentionNotServed,
    PagedModel,
    text_config_of,
)
from tandem.engine.attention.torch import TorchAttention
from tandem.engine.config import EngineConfig
from tandem.engine.execution.runner import ModelRunner
from tandem.engine.model.llama import speed_up
from tandem.engine.model.observation import Observed, observe
from tandem.engine.pages.pool import make_pool
from tandem.engine.scheduling.forward import ForwardInputs, Ints
from tandem.engine.shape import ModelShape, longest_context
from tandem.telemetry import log as logs

log = logs.get_logger(__name__)

# Limits of the largest logit difference, in standard deviations of the logits. In float32, correct models differ by
# about 1e-5, and a mask that is off by one key changes logits by 0.05 or more. In 16 bits the median row is compared,
# because an expert router may differ in single rows. This detects only broken layers; the copy checks attention.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.3, torch.float16: 0.1}
# Maximum floating-point operations of a check with the model's own weights, which take less than a second.
_AFFORDABLE = {"cpu": 1e11, "16-bit cpu": 1e10, "gpu": 5e14}
_SEED = 1
# A model with a longer window is checked through a copy with a short window.
_LONGEST_WINDOW = 32

# Upper bounds of values in a small copy: windows that a short sequence exceeds, and widths that do not affect
# attention, which make the copy quick to create.
_MOST_LAYERS = 8
# Length of the noise. Not a multiple of common row lengths, so that the rows of a weight differ.
_NOISE = (1 << 20) - 3

_LARGEST = {
    "sliding_window": 7,
    "attention_chunk_size": 8,
    "floor_scale": 4,
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Sequences:
    """The two sequences of a check.

    Attributes:
        ids: Shape (2, num_tokens).
        page_size: Tokens per page in the check.
        exceed_windows: Whether the sequences are longer than the smallest window; True if there is none.
    """

    ids: Ints
    page_size: int
    exceed_windows: bool

    @classmethod
    def of(cls, text: Any, page_size: int) -> "Sequences":
        """Draw sequences longer than a page and than a short window, for a model of this text config."""
        sizes = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
        window = min((each for each in sizes if each), default=0)
        desired = max(page_size, window if window <= _LONGEST_WINDOW else 0) + 9
        # Beyond the longest supported context the model may compute differently.
        num_tokens = min(desired, longest_context(text) or desired)
        # Ids are drawn from the middle of the vocabulary, because special tokens are at its ends.
        first, end = text.vocab_size // 4, max(text.vocab_size // 2, 1)
        ids = np.random.default_rng(_SEED).integers(first, end, (2, num_tokens))
        return cls(ids, page_size, window < num_tokens)

    @property
    def num_tokens(self) -> int:
        """Length of each sequence."""
        return len(self.ids[0])


def is_affordable(module: nn.Module, sequences: Sequences) -> bool:
    """Return whether a model is small enough to be checked with its own weights."""
    first = next(module.parameters())
    size = sum(each.numel() for each in module.parameters())
    kind = "gpu" if first.device.type != "cpu" else "cpu"
    if kind == "cpu" and first.dtype is not torch.float32:
        kind = "16-bit cpu"
    # transformers computes two sequences, and the engine as many tokens as three sequences have.
    return 2.0 * size * 5 * sequences.num_tokens <= _AFFORDABLE[kind]


@torch.inference_mode()
def plain_logits(module: nn.Module, sequences: Sequences) -> torch.Tensor:
    """Return the logits of plain transformers, shape (2, num_tokens, vocab_size), float32.

    The module uses paged attention again afterwards.
    """
    device = next(module.parameters()).device
    module.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        rows = [
            module(input_ids=torch.from_numpy(ids[None]).to(device), use_cache=False).logits[0]
            for ids in sequences.ids
        ]
    finally:
        module.set_attn_implementation(NAME)  # type: ignore[operator]
    return torch.stack(rows).float()


@torch.inference_mode()
def difference(
    model: PagedModel,
    shape: ModelShape,
    backend: AttentionBackend,
    sequences: Sequences,
    expected: torch.Tensor,
) -> torch.Tensor:
    """Return each row's largest logit error, in standard deviations of the logits. Shape (num_rows,)."""
    num, page_size = sequences.num_tokens, sequences.page_size
    width = -(-num // page_size)
    pool = make_pool(shape, 3 * width, page_size, str(expected.device))
    runner = ModelRunner(model, pool, backend)
    order = np.random.default_rng(_SEED).permutation(3 * width).astype(np.int32)
    whole, first, second = order.reshape(3, width)
    cut = num // 2 + 1
    forwards = [
        # The whole first sequence, then part of it with all but two tokens of the second.
        [_Part(0, 0, num, whole)],
        [_Part(0, 0, cut, first), _Part(1, 0, num - 2, second)],
        # The last two tokens of the second as decoding rows: one alone, one with the rest of the first sequence.
        [_Part(1, num - 2, num - 1, second)],
        [_Part(1, num - 1, num, second), _Part(0, cut, num, first)],
    ]
    found = []
    for parts in forwards:
        plain = torch.cat([expected[each.sequence, each.begin : each.end] for each in parts])
        got = runner.forward(_rows(sequences.ids, parts)).float()
        found.append((got - plain).abs().amax(-1))
    return torch.cat(found) / expected.std(dim=-1).mean().clamp(min=1e-30)


class _Part(NamedTuple):
    """Tokens `begin` ... `end` - 1 of a sequence, computed in one forward, and the sequence's pages."""

    sequence: int
    begin: int
    end: int
    pages: NDArray[np.int32]


def _rows(ids: Ints, parts: Sequence[_Part]) -> ForwardInputs:
    """Return inputs for parts of sequences that request all logits. A decoding row must come first."""
    sizes = [each.end - each.begin for each in parts]
    num_rows = sum(sizes)
    return ForwardInputs(
        token_ids=np.concatenate([ids[each.sequence, each.begin : each.end] for each in parts]),
        sources=np.full(num_rows, -1, np.int64),
        positions=np.concatenate([np.arange(each.begin, each.end) for each in parts]),
        query_starts=np.cumsum([0, *sizes]).astype(np.int32),
        kv_lens=np.array([each.end for each in parts], np.int32),
        page_table=np.stack([each.pages for each in parts]),
        num_decodes=int(sizes[0] == 1),
        logit_rows=np.arange(num_rows),
    )


class ModelCheck:
    """The check of a model at the start.

    ```
    large model:  check_copy ──▶ load weights
    small model:  load weights ──▶ record_expected ──▶ fuse layers ──▶ compare ──not conclusive──▶ check_copy
    ```

    Every step may raise:
        AttentionNotServed: The engine does not compute this model correctly. The message gives the reason.
    """

    def __init__(self, config: EngineConfig, hf_config: Any) -> None:
        self._config = config
        self._hf_config = hf_config
        self._sequences = Sequences.of(text_config_of(hf_config), config.page_size)
        self._expected: torch.Tensor | None = None
        self._is_proved = False
        if config.skips_model_check:
            log.warning("engine.model_unchecked", note="--skip-model-check: answers may be wrong")

    def check_copy(self) -> None:
        """Check a small copy."""
        config, began_s = self._config, time.monotonic()
        if config.skips_model_check:
            return
        copy = make_copy(self._hf_config, config.device, trusts_code=config.trust_remote_code)
        observed = observe(copy.module, copy.text_config)
        sequences = Sequences.of(copy.text_config, config.page_size)
        expected = plain_logits(copy.module, sequences)
        if config.is_fused:
            speed_up(observed)
        shape = shape_of(observed, copy.text_config.vocab_size)
        off = difference(observed.model, shape, TorchAttention(), sequences, expected)
        _judge("a small copy", float(off.max()), TOLERANCE[torch.float32], began_s)
        self._is_proved = True

    def record_expected(self, module: nn.Module) -> None:
        """Store the logits of transformers with the model's own weights if the model is small enough."""
        config = self._config
        is_comparable = config.tp_size == 1 and config.kv_cache_dtype == "auto"
        is_checked = is_comparable and not config.skips_model_check
        if is_checked and is_affordable(module, self._sequences):
            self._expected = plain_logits(module, self._sequences)

    def compare(self, model: PagedModel, shape: ModelShape) -> None:
        """Compare the engine's logits with those of `record_expected`. Check a small copy if that is not conclusive."""
        if self._config.skips_model_check:
            return
        if self._expected is not None:
            backend = choose_backend(self._config, shape)
            check_weights(model, shape, backend, self._sequences, self._expected)
            if shape.dtype == "float32" and self._sequences.exceed_windows:
                self._is_proved = True
        if not self._is_proved and self._config.tp_rank == 0:
            self.check_copy()


def check_weights(
    model: PagedModel,
    shape: ModelShape,
    backend: AttentionBackend,
    sequences: Sequences,
    expected: torch.Tensor,
) -> None:
    """Check a model with its own weights.

    Args:
        expected: Result of `plain_logits` for the same weights before layers were fused or compiled.

    Raises:
        AttentionNotServed: The logits differ.
    """
    began_s = time.monotonic()
    off = difference(model, shape, backend, sequences, expected)
    dtype: torch.dtype = getattr(torch, shape.dtype)
    found = float(off.median() if dtype.itemsize == 2 else off.max())
    _judge("its own weights", found, TOLERANCE.get(dtype, TOLERANCE[torch.float32]), began_s)


def shape_of(observed: Observed, vocab_size: int) -> ModelShape:
    """Return the shape of a float32 model whose layers may differ."""
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


def _judge(what: str, found: float, tolerance: float, began_s: float) -> None:
    # The comparison is negated so that NaN is rejected too.
    if not found <= tolerance:
        raise AttentionNotServed(
            f"with {what}, its logits differ from transformers' by {found:.2g} standard deviations, and "
            f"rounding explains only {tolerance:g}"
        )
    log.info(
        "engine.model_checked",
        what=what,
        difference=float(f"{found:.2g}"),
        tolerance=tolerance,
        duration_s=round(time.monotonic() - began_s, 3),
    )


# ── a small copy of a config ─────────────────────────────────────────────────────────────────────
#
# The copy has a few layers of each kind, small windows and a small vocabulary. Everything that determines attention
# is unchanged: number and size of heads, RoPE, and the order of layer kinds.


class SmallCopy(NamedTuple):
    """A model made from a small copy of a config, and the text part of that config."""

    module: torch.nn.Module
    text_config: Any


def make_copy(hf_config: Any, device: str, *, trusts_code: bool) -> SmallCopy:
    """Create a model from a small copy of a config, with seeded random float32 weights.

    Raises:
        AttentionNotServed: The model cannot be created. The message gives the reason.
    """
    text = text_config_of(hf_config)
    try:
        small = _reduced(text, _chosen(text))
        module = _build(_composed(hf_config, text, small), device, trusts_code=trusts_code)
    except Exception as error:  # configs may raise any exception
        if isinstance(error, KeyError) and NAME in str(error):
            raise  # the model does not support our attention function
        raise AttentionNotServed(f"a small copy of it cannot be created: {error}") from error
    return SmallCopy(module, small)


def _chosen(text: Any) -> list[int]:
    """Return the layers to include in a copy: the first of each kind, and at least two layers."""
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
    remaining = [index for index in range(count) if index not in chosen]
    return sorted(chosen + remaining[: max(0, 2 - len(chosen))])


def _by_layer(value: object, count: int) -> dict[int, Any]:
    """Return the entries of a config value by layer; empty if it has no entries per layer."""
    if isinstance(value, list | tuple) and len(value) == count > 1:
        return dict(enumerate(value))
    # Dicts may map layer numbers to dicts of settings. Label names also have numeric keys, but no dicts as values.
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        return {}
    return {int(key): each for key, each in value.items() if str(key).isdigit()}


def _reduced(text: Any, layers: Sequence[int]) -> Any:
    """Return a config with only these layers, and with values limited by `_LARGEST`."""
    facts, count = text.to_dict(), int(text.num_hidden_layers)
    names: dict[str, str] = getattr(text, "attribute_map", {})
    for name, value in facts.items():
        each = _by_layer(value, count)
        if each and isinstance(value, dict):
            facts[name] = {i: each[index] for i, index in enumerate(layers) if index in each}
        elif each:
            facts[name] = [each[index] for index in layers]
    for name, value in _LARGEST.items():
        key = names.get(name, name)
        if key in facts:
            facts[key] = _at_most(facts[key], value)
    facts[names.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    if shared := facts.get("num_kv_shared_layers"):
        facts["num_kv_shared_layers"] = sum(index >= count - shared for index in layers)
    if dense := facts.get("first_k_dense_replace"):
        facts["first_k_dense_replace"] = sum(index < dense for index in layers)
    facts.pop("quantization_config", None)  # the copy is not quantized
    _reduce_experts(facts, names)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if facts.get(name) is not None:
            facts[name] = 0
    return type(text).from_dict(facts)


def _at_most(value: Any, limit: int) -> Any:
    """Limit a size or a list of sizes to `limit`. Other values are returned unchanged."""
    if isinstance(value, list):
        return [_at_most(each, limit) for each in value]
    return min(value, limit) if isinstance(value, int) else value


def _reduce_experts(facts: dict[str, Any], names: dict[str, str]) -> None:
    per_token = int(facts.get(names.get("num_experts_per_tok", "num_experts_per_tok")) or 0)
    least = max(8, 2 * per_token, 4 * int(facts.get("n_group") or 0))
    for name in (names.get(each, each) for each in _EXPERTS):
        if isinstance(facts.get(name), int) and facts[name] > least:
            facts[name] = least


def _composed(hf_config: Any, text: Any, small: Any) -> Any:
    """Return the config to create a model from: the text config if transformers accepts it, else the full config."""
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
            attn_implementation=NAME,
            trust_remote_code=trusts_code,
        )
    # All weights share one block of noise, because drawing each weight takes seconds for wide layers.
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.is_floating_point():
                _fill(weight, noise)
    return module.eval().requires_grad_(requires_grad=False)


def _fill(weight: torch.Tensor, noise: torch.Tensor) -> None:
    """Fill a weight with noise, so that every layer affects the logits, including norms, biases and sinks."""
    if weight.dim() < 2:  # norms, biases, sinks
        weight.copy_(1 + 0.3 * noise[: weight.numel()].view(weight.shape))
        return
    for begin, part in enumerate(torch.split(weight.view(-1), len(noise))):
        torch.mul(noise.roll(begin)[: len(part)], weight.shape[-1] ** -0.5, out=part)
