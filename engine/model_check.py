"""Checks at every start that the engine computes the same logits as transformers.

Two seeded sequences go through plain transformers, one at a time, and through the engine's forwards: first
one whole prompt, then both sequences in chunks, with decoding rows, over shuffled pages. All logits are
compared. A model that is small enough is checked with its own weights. If that is too expensive or proves
too little, as in 16 bits, a small copy is checked: few layers of each kind, small windows, random float32
weights.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from tandem.engine.attention import (
    NAME,
    AttentionBackend,
    AttentionNotServed,
    PagedModel,
    text_config_of,
)
from tandem.engine.attention_backends import choose_backend
from tandem.engine.attention_torch import TorchAttention
from tandem.engine.config import EngineConfig
from tandem.engine.forward import ForwardInputs, Ints
from tandem.engine.kv_pool import make_pool
from tandem.engine.llama import speed_up
from tandem.engine.observation import Observed, observe
from tandem.engine.runner import ModelRunner
from tandem.engine.shape import ModelShape, longest_context
from tandem.telemetry import log as logs

log = logs.get_logger(__name__)

# Limits of the largest logit difference, in standard deviations of the logits. In float32, correct models
# differ by some 1e-5, and a mask off by one key by 0.05 or more. In 16 bits the median row is judged, because
# an expert router may differ in single rows; this only detects broken layers, and the copy checks attention.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.3, torch.float16: 0.1}
# Limits of floating-point operations in a check with the model's own weights: under a second.
_AFFORDABLE = {"cpu": 1e11, "16-bit cpu": 1e10, "gpu": 5e14}
_SEED = 1
# A model with a longer window is checked by a copy with a short one.
_LONGEST_WINDOW = 32

# Upper bounds in a small copy: windows that a short sequence exceeds, and widths that do not affect
# attention, so that the copy is created quickly.
_MOST_LAYERS = 8
VOCAB_SIZE = 512
# Not a multiple of usual row lengths, so that the rows of a weight differ.
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


@dataclass(frozen=True, slots=True)
class Sequences:
    """The two sequences of a check.

    Attributes:
        ids: Shape (2, num_tokens).
        page_size: Tokens per page in the check.
    """

    ids: Ints
    page_size: int

    @classmethod
    def of(
        cls, vocab_size: int, page_size: int, window: int | None, longest: int | None
    ) -> "Sequences":
        """Draw sequences longer than a page and than a short window, but at most `longest` tokens."""
        span = max(page_size, window if window and window <= _LONGEST_WINDOW else 0)
        # From the middle of the vocabulary, because special tokens are at its ends.
        draw = np.random.default_rng(_SEED)
        ids = draw.integers(
            vocab_size // 4, max(vocab_size // 2, 1), (2, min(span + 9, longest or span + 9))
        )
        return cls(ids, page_size)

    @property
    def num_tokens(self) -> int:
        """Length of each sequence."""
        return len(self.ids[0])

    def leave(self, window: int | None) -> bool:
        """Return whether the sequences are longer than the window; True if there is none."""
        return window is None or window < self.num_tokens


def is_affordable(module: nn.Module, sequences: Sequences) -> bool:
    """Return whether a model is small enough to be checked with its own weights."""
    first = next(module.parameters())
    size = sum(each.numel() for each in module.parameters())
    kind = "gpu" if first.device.type != "cpu" else "cpu"
    if kind == "cpu" and first.dtype is not torch.float32:
        kind = "16-bit cpu"
    # Two sequences through transformers, and as many tokens as three through the engine.
    return 2.0 * size * 5 * sequences.num_tokens <= _AFFORDABLE[kind]


@torch.inference_mode()
def plain_logits(module: nn.Module, sequences: Sequences) -> torch.Tensor:
    """Return the logits of plain transformers. Shape (2, num_tokens, vocab_size), float32.

    Afterwards the module uses paged attention again.
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
    one, other = sequences.ids
    found = [
        # First the whole first sequence. Then a part of it, with all but two tokens of the second.
        # Then these as decoding rows, one alone, the other with the rest of the first.
        (runner.forward(_rows([(one, 0, num, whole)])), expected[0]),
        (
            runner.forward(_rows([(one, 0, cut, first), (other, 0, num - 2, second)])),
            torch.cat([expected[0, :cut], expected[1, : num - 2]]),
        ),
        (
            runner.forward(_rows([(other, num - 2, num - 1, second)])),
            expected[1, num - 2 : num - 1],
        ),
        (
            runner.forward(_rows([(other, num - 1, num, second), (one, cut, num, first)])),
            torch.cat([expected[1, num - 1 :], expected[0, cut:]]),
        ),
    ]
    spread = expected.std(dim=-1).mean().clamp(min=1e-30)
    return torch.cat([(got.float() - plain).abs().amax(-1) for got, plain in found]) / spread


_Part = tuple[Ints, int, int, np.ndarray]
"""Ids of a sequence, the first and one past the last token of this forward, the sequence's pages."""


def _rows(parts: Sequence[_Part]) -> ForwardInputs:
    """Return inputs over parts of sequences that request all logits; a decoding part must come first."""
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


class ModelCheck:
    """The check of one model at its start.

    ```
    copy ── before large weights are loaded     before ── compute the logits of transformers
    copy ── if the weights proved too little ◀── after ── compare the engine's logits, with fused layers
    ```

    Raises, in every step:
        AttentionNotServed: The engine does not compute this model correctly; the message gives the reason.
    """

    def __init__(self, config: EngineConfig, hf_config: Any) -> None:
        self._config = config
        self._hf_config = hf_config
        text = text_config_of(hf_config)
        names = ("sliding_window", "attention_chunk_size")
        windows = [getattr(text, name, None) for name in names]
        self._window = min((each for each in windows if each), default=None)
        # Beyond the longest supported context the model may compute in another way.
        longest = longest_context(text)
        self._sequences = Sequences.of(text.vocab_size, config.page_size, self._window, longest)
        self._expected: torch.Tensor | None = None
        self._is_proved = False
        if config.skips_model_check:
            log.warning("engine.model_unchecked", note="--skip-model-check: answers may be wrong")

    def copy(self) -> Observed:
        """Check a small copy; return its observation, expanded to all layers of the whole model."""
        trusts_code = self._config.trust_remote_code
        began_s = time.monotonic()
        copy = make_copy(self._hf_config, self._device, trusts_code=trusts_code)
        observed = observe(copy.module, copy.text_config)
        if not self._config.skips_model_check:
            vocab_size = copy.text_config.vocab_size
            longest = longest_context(copy.text_config)
            page_size = self._config.page_size
            sequences = Sequences.of(vocab_size, page_size, copy.window, longest)
            expected = plain_logits(copy.module, sequences)
            shape = shape_of(observed, vocab_size)
            if self._config.is_fused:
                speed_up(observed)
            off = difference(observed.model, shape, TorchAttention(), sequences, expected)
            _judge("a small copy", float(off.max()), TOLERANCE[torch.float32], began_s)
        self._is_proved = True
        return observed.repeated(copy.of_kind)

    def before(self, module: nn.Module) -> None:
        """Store the logits of transformers with the model's own weights, if that is affordable."""
        config = self._config
        is_comparable = config.tp_size == 1 and config.kv_cache_dtype == "auto"
        is_wanted = is_comparable and not config.skips_model_check
        if is_wanted and is_affordable(module, self._sequences):
            self._expected = plain_logits(module, self._sequences)

    def after(self, model: PagedModel, shape: ModelShape) -> None:
        """Compare the engine's logits with those of `before`; check a small copy if that proves too little."""
        if self._config.skips_model_check:
            return
        if self._expected is not None:
            backend = choose_backend(self._config, shape)
            check_weights(model, shape, backend, self._sequences, self._expected)
            is_exact = shape.dtype == "float32" and self._sequences.leave(self._window)
            self._is_proved = self._is_proved or is_exact
        if not self._is_proved and self._config.tp_rank == 0:
            self.copy()

    @property
    def _device(self) -> str:
        device = self._config.device
        return device if device == "cpu" or torch.cuda.is_available() else "cpu"


def check_weights(
    model: PagedModel,
    shape: ModelShape,
    backend: AttentionBackend,
    sequences: Sequences,
    expected: torch.Tensor,
) -> None:
    """Check a model with its own weights.

    Args:
        expected: Result of `plain_logits` for the same weights, before any layer was fused or compiled.

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
    # `not <=` instead of `>`, so that NaN is rejected too.
    if not found <= tolerance:
        raise AttentionNotServed(
            f"with {what}, the logits of this engine are off transformers' by {found:.2g} of their "
            f"standard deviation, where rounding explains {tolerance:g}"
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
# It has a few layers that cover each kind, small windows and a small vocabulary. Everything that determines
# attention is unchanged: heads, their sizes, the rope, the order of kinds.


@dataclass(frozen=True, slots=True, eq=False)
class SmallCopy:
    """A model of a small copy of a config.

    Attributes:
        layers: Layer numbers of the whole model that the copy includes.
        of_kind: For each layer of the whole model, the index of a similar layer in the copy.
        window: The smallest window of any layer; None without one.
    """

    module: torch.nn.Module
    text_config: Any
    layers: tuple[int, ...]
    of_kind: tuple[int, ...]
    window: int | None


def make_copy(hf_config: Any, device: str, *, trusts_code: bool) -> SmallCopy:
    """Create a model from a small copy of a config, with seeded random float32 weights.

    Raises:
        AttentionNotServed: Such a model cannot be created; the message gives the reason.
    """
    text = text_config_of(hf_config)
    layers, of_kind = _chosen(text)
    refusal: Exception | None = None
    for changes in ({**_WINDOWS, **_WIDTHS}, {**_WINDOWS, "vocab_size": VOCAB_SIZE}):
        try:
            small = _reduced(text, layers, changes)
            module = _build(_composed(hf_config, text, small), device, trusts_code=trusts_code)
        except KeyError as error:
            if NAME in str(error):  # the model does not support our attention function
                raise
            refusal = error
            continue
        except Exception as error:  # noqa: BLE001 - configs may raise anything; retry with fewer changes
            refusal = error
            continue
        windows = [
            getattr(small, name, None) for name in ("sliding_window", "attention_chunk_size")
        ]
        least = min((window for window in windows if window), default=None)
        return SmallCopy(module, small, layers, of_kind, least)
    raise AttentionNotServed(f"a small copy of it cannot be made: {refusal}") from refusal


def _chosen(text: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layers to include in a copy, and for each layer of the whole a similar one in the copy."""
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
    # A kind beyond `_MOST_LAYERS` is represented by the copy's last layer.
    of_kind = [chosen.index(min(first[kind], chosen[-1])) for kind in kinds]
    return tuple(chosen), tuple(of_kind)


def _by_layer(value: object, count: int) -> dict[int, Any]:
    """Return a config value's entries by layer; empty if the value has no entries per layer."""
    if isinstance(value, list | tuple) and len(value) == count > 1:
        return dict(enumerate(value))
    # Dicts that map layer numbers to dicts of settings; label names also have numeric keys, but no dicts.
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        return {}
    return {int(key): each for key, each in value.items() if str(key).isdigit()}


def _reduced(text: Any, layers: tuple[int, ...], changes: dict[str, int]) -> Any:
    """Return a config with only these layers, and with values limited to those of `changes`."""
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
    facts.pop("quantization_config", None)  # the copy is not quantized
    _reduce_experts(facts, names)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if facts.get(name) is not None:
            facts[name] = 0
    return type(text).from_dict(facts)


def _at_most(given: Any, most: int) -> Any:
    """Limit a size, or a list of sizes, to `most`; other values are returned unchanged."""
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
    """Return the config to create a model from: the text config if transformers accepts it, else the whole."""
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
    # One block of noise for all weights, because drawing each weight takes seconds for wide layers.
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.is_floating_point():
                _fill(weight, noise)
    return module.eval().requires_grad_(requires_grad=False)


def _fill(weight: torch.Tensor, noise: torch.Tensor) -> None:
    """Fill a weight with noise so that every layer affects the logits, even norms, biases and sinks."""
    if weight.dim() < 2:  # norms, biases, sinks
        weight.copy_(1 + 0.3 * noise[: weight.numel()].view(weight.shape))
        return
    for begin, part in enumerate(torch.split(weight.view(-1), len(noise))):
        torch.mul(noise.roll(begin)[: len(part)], weight.shape[-1] ** -0.5, out=part)
