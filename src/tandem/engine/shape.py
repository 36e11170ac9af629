"""The shape of a model, as its engine and pool need it, and helpers that read it from a config."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.engine.vocabulary import tokenizer_end
from tandem.engine.weight_files import read_object
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hand_off import LayerKV
from tandem.wire.prefixes import PageSpace

# latents: V is part of K; unequal: K and V of a head differ in size.
AttentionFeature = Literal["sinks", "chunks", "latents", "unequal"]

# Values of `--kv-cache-dtype` other than `auto`, and their torch types.
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
        num_kv_heads: KV heads on this rank.
        head_dim: Size of K and of V per head, if all layers are alike.
        dtype: Type of the weights, such as bfloat16.
        kv_dtype: Type of K and V; a key of `ITEM_BYTES`.
        fingerprint: Equal on two nodes exactly if both compute the same KV. Starts with a readable description.
        model_kv_heads: KV heads of the whole model; 0: the same as on this rank.
        layers: Stored heads and sizes of each layer if layers differ or K and V differ; `num_kv_heads` is then 1,
            and `head_dim` is the number of elements per token. Empty if all layers are alike.
        sources: Pairs of a layer that stores nothing and the layer whose K and V it reads.
        attention: Features needed in addition to causal softmax with a window or a softcap.
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
        """Stored heads and sizes of each layer."""
        alike = LayerKV(self.num_kv_heads, self.head_dim, self.head_dim)
        return self.layers or (alike,) * self.num_layers

    @property
    def kv_sources(self) -> dict[int, int]:
        """Maps each layer that stores nothing to the layer whose K and V it reads."""
        return dict(self.sources)

    @property
    def kv_item_bytes(self) -> int:
        """Bytes per element of K or V."""
        return ITEM_BYTES[self.kv_dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V per token over all layers."""
        sizes = (each.num_kv_heads * (each.key_dim + each.value_dim) for each in self.kv_layers)
        return sum(sizes) * self.kv_item_bytes

    def page_space(self, page_size: int, tp_rank: int, tp_size: int) -> PageSpace:
        """Return the common part of all page keys of a rank's pool."""
        return PageSpace(self.fingerprint, self.kv_dtype, page_size, f"{tp_rank}/{tp_size}")


def kv_heads(text_config: Any) -> int:
    """Return the number of KV heads of a whole model, which defaults to that of its attention heads."""
    own: int | None = getattr(text_config, "num_key_value_heads", None)
    return int(text_config.num_attention_heads) if own is None else own


def head_dim(text_config: Any) -> int:
    """Return the width of one head."""
    own: int | None = getattr(text_config, "head_dim", None)
    return own or int(text_config.hidden_size // text_config.num_attention_heads)


def context_length(requested: int, text_config: Any) -> int:
    """Return the context length: `requested`, or the model's limit if that is 0.

    LongRoPE has one frequency table for sequences up to the original length and a different one beyond it. The
    longest sequence of a forward selects the table. Such models are limited to the original length here, because
    an answer must not depend on the other requests in its batch.

    Raises:
        ConfigInvalid: `requested` exceeds the model's limit, or is 0 although the model has no limit.
    """
    own = longest_context(text_config)
    if own is None and not requested:
        raise ConfigInvalid(
            "config.json has no max_position_embeddings: set --context-length",
            topic="docs/models.md",
        )
    if own is not None and requested > own:
        why = "" if own == text_config.max_position_embeddings else ", where its LongRoPE changes"
        raise ConfigInvalid(
            f"--context-length {requested} exceeds the model's limit of {own}{why}: set at most {own}",
            topic="docs/models.md",
        )
    return requested or own or 0


def longest_context(text_config: Any) -> int | None:
    """Return the model's limit on the tokens of a request; None if its config has none."""
    own = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(own, int) or own < 1:
        return None
    return min(own, _original_length(text_config) or own)


def _original_length(text_config: Any) -> int | None:
    """Return the length up to which a LongRoPE model uses its first frequency table; None for other models."""
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
    """Return the content of a model's generation_config.json; empty if there is none."""
    path = model_dir / GENERATION_CONFIG
    return read_object(path) if path.is_file() else {}


def eos_token_ids(model_dir: Path, text_config: Any) -> frozenset[int]:
    """Return the ids that end an answer.

    These are the ids of generation_config.json, or else of the model's config, and the tokenizer's `eos_token`: a
    fine-tune may have changed only one of them.
    """
    found = generation_config(model_dir).get("eos_token_id")
    if found is None:
        found = getattr(text_config, "eos_token_id", None)
    ids = [] if found is None else found if isinstance(found, list | tuple) else [found]
    if not all(type(token_id) is int for token_id in ids):
        raise ConfigInvalid(
            f"eos_token_id of the model in {model_dir} is {found!r}: it must be a token id or a list of token ids"
        )
    of_tokenizer = tokenizer_end(model_dir)
    return frozenset(ids) | ({of_tokenizer} if of_tokenizer is not None else set())
