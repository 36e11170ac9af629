"""A small copy of a model's config: few layers that cover each kind, small windows, a small vocabulary.

What decides how attention works stays: heads, their sizes, the rope, the order of kinds.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from tandem.engine.attention import NAME, AttentionNotServed, text_config_of

_MOST_LAYERS = 8
VOCAB_SIZE = 512
# No multiple of a row: rows of one weight differ.
_NOISE = (1 << 20) - 3

# What is made smaller where it is larger: windows so that a short sequence leaves them, widths that
# attention does not depend on so that the copy is made in a moment.
_WINDOWS = {"sliding_window": 7, "attention_chunk_size": 8, "floor_scale": 4}
_WIDTHS = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, eq=False)
class SmallCopy:
    """A model of a small copy of a config.

    Attributes:
        layers: The layers of the whole model that the copy has.
        of_kind: For each layer of the whole model, one of its kind in the copy.
        window: The smallest that a layer has; None without one.
    """

    module: torch.nn.Module
    text_config: Any
    layers: tuple[int, ...]
    of_kind: tuple[int, ...]
    window: int | None


def make_copy(hf_config: Any, device: str, *, trusts_code: bool) -> SmallCopy:
    """Make a model of a small copy of a config, with seeded random float32 weights.

    Raises:
        AttentionNotServed: There is no such model; the sentence says why.
    """
    text = text_config_of(hf_config)
    layers, of_kind = _chosen(text)
    refusal: Exception | None = None
    for changes in ({**_WINDOWS, **_WIDTHS}, {**_WINDOWS, "vocab_size": VOCAB_SIZE}):
        try:
            small = _reduced(text, layers, changes)
            module = _build(_composed(hf_config, text, small), device, trusts_code=trusts_code)
        except KeyError as error:
            if NAME in str(error):  # there is no such way to attend: the model says so itself
                raise
            refusal = error
            continue
        except Exception as error:  # noqa: BLE001 - configs raise what they please; less may pass
            refusal = error
            continue
        windows = [
            getattr(small, name, None) for name in ("sliding_window", "attention_chunk_size")
        ]
        least = min((window for window in windows if window), default=None)
        return SmallCopy(module, small, layers, of_kind, least)
    raise AttentionNotServed(f"a small copy of it cannot be made: {refusal}") from refusal


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
            attn_implementation=NAME,
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
