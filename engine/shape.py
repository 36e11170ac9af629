"""What an engine and its pool need to know of a model. Numbers and names: nothing is loaded for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.engine.weight_files import read_object
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hand_off import LayerKV
from tandem.wire.prefixes import PageSpace

# latents: V is a part of K; unequal: K and V of a head differ in size.
AttentionFeature = Literal["sinks", "chunks", "latents", "unequal"]

# `--kv-cache-dtype` beside `auto`.
KV_DTYPES = {"fp8_e4m3": "float8_e4m3fn"}

GENERATION_CONFIG = "generation_config.json"

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Geometry of a model, or of one rank's shard of it.

    Attributes:
        num_kv_heads: Of this rank.
        head_dim: Of K and of V, where layers are alike.
        dtype: Name of the type of weights, such as bfloat16.
        kv_dtype: Name of the type of K and V; one of `ITEM_BYTES`.
        fingerprint: Equal on two nodes exactly when a head's KV on one is what the other would have
            computed; begins with words that a person can compare.
        model_kv_heads: Of the whole model; 0 means as many as this rank has.
        layers: What each layer keeps, where they differ or K and V do; `num_kv_heads` is then 1 and
            `head_dim` all elements of a token. Empty where all layers are alike.
        sources: For each layer that keeps nothing, the layer whose K and V it reads.
        attention: What the model asks of attention beyond causal softmax with a window or a softcap.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    dtype: str
    kv_dtype: str
    fingerprint: str
    model_kv_heads: int = 0
    layers: tuple[LayerKV, ...] = ()
    sources: tuple[tuple[int, int], ...] = ()
    attention: frozenset[AttentionFeature] = frozenset()

    @property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        """What each layer keeps of one token."""
        alike = LayerKV(self.num_kv_heads, self.head_dim, self.head_dim)
        return self.layers or (alike,) * self.num_layers

    @property
    def kv_sources(self) -> dict[int, int]:
        """The layer that each layer which keeps nothing reads."""
        return dict(self.sources)

    @property
    def kv_item_bytes(self) -> int:
        """Bytes of one element of K or V."""
        return ITEM_BYTES[self.kv_dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        sizes = (each.num_kv_heads * (each.key_dim + each.value_dim) for each in self.kv_layers)
        return sum(sizes) * self.kv_item_bytes

    def page_space(self, page_size: int, tp_rank: int, tp_size: int) -> PageSpace:
        """Return what the keys of all pages of a rank's pool have in common."""
        return PageSpace(self.fingerprint, self.kv_dtype, page_size, f"{tp_rank}/{tp_size}")


def kv_heads(text_config: Any) -> int:
    """Return the KV heads of a whole model; its attention heads where it does not say."""
    own: int | None = getattr(text_config, "num_key_value_heads", None)
    return own or int(text_config.num_attention_heads)


def head_dim(text_config: Any) -> int:
    """Return the width of one head."""
    own: int | None = getattr(text_config, "head_dim", None)
    return own or int(text_config.hidden_size // text_config.num_attention_heads)


def context_length(asked: int, text_config: Any) -> int:
    """Return the tokens of one request at most: what was asked for, or the model's own for 0.

    LongRoPE has one table of frequencies for sequences up to the original length and another beyond, chosen
    by the longest sequence of a forward. Such models end at the original length here: what a request is
    answered must not depend on what it is computed with.

    Raises:
        ConfigInvalid: The model has fewer, or does not tell.
    """
    own = longest_context(text_config)
    if own is None and not asked:
        raise ConfigInvalid(
            "config.json names no max_position_embeddings: give --context-length", topic="models"
        )
    if own is not None and asked > own:
        why = "" if own == text_config.max_position_embeddings else ", where its LongRoPE changes"
        raise ConfigInvalid(
            f"--context-length {asked} is over the model's own {own}{why}; give at most that",
            topic="models",
        )
    return asked or own or 0


def longest_context(text_config: Any) -> int | None:
    """Return the tokens of one request that a model is served with at most; None: it does not tell."""
    own = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(own, int) or own < 1:
        return None
    return min(own, _original_length(text_config) or own)


def _original_length(text_config: Any) -> int | None:
    """Return up to which length a model with LongRoPE uses its first table; None for other models."""
    rope = getattr(text_config, "rope_parameters", None) or getattr(
        text_config, "rope_scaling", None
    )
    if not isinstance(rope, dict):
        return None
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    lengths = [
        each.get("original_max_position_embeddings")
        or getattr(text_config, "original_max_position_embeddings", None)
        for each in ropes
        if "longrope" in (each.get("rope_type"), each.get("type"))
    ]
    return min((length for length in lengths if isinstance(length, int)), default=None)


def generation_config(model_dir: Path) -> dict[str, Any]:
    """Return what a model's generation_config.json says; nothing where there is none."""
    path = model_dir / GENERATION_CONFIG
    return read_object(path) if path.is_file() else {}


def eos_token_ids(model_dir: Path, text_config: Any) -> frozenset[int]:
    """Return the ids that end an answer: of generation_config.json, or else of the model's config."""
    of_config = getattr(text_config, "eos_token_id", None)
    found = generation_config(model_dir).get("eos_token_id") or of_config
    if found is None:
        return frozenset()
    ids = found if isinstance(found, list | tuple) else [found]
    if not all(type(token_id) is int for token_id in ids):
        raise ConfigInvalid(
            f"eos_token_id of the model in {model_dir} is {found!r}: it must be a token id or a list of them"
        )
    return frozenset(ids)
