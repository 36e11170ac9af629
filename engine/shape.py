"""What an engine and its pool need to know of a model. Numbers and names: nothing is loaded for it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire.errors import ConfigInvalid
from wire.page_keys import PageSpace

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
        dtype: Name of the type of weights, such as bfloat16.
        kv_dtype: Name of the type of K and V; one of `ITEM_BYTES`.
        fingerprint: Equal on two nodes exactly when a head's KV on one is what the other would have
            computed; begins with words that a person can compare.
        model_kv_heads: Of the whole model; 0 means as many as this rank has.
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

    @property
    def kv_item_bytes(self) -> int:
        """Bytes of one element of K or V."""
        return ITEM_BYTES[self.kv_dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_item_bytes

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

    Raises:
        ConfigInvalid: The model has fewer.
    """
    own = int(text_config.max_position_embeddings)
    if asked > own:
        raise ConfigInvalid(
            f"--context-length {asked} is over the model's own {own}; give at most that"
        )
    return asked or own


def generation_config(model_dir: Path) -> dict[str, Any]:
    """Return what a model's generation_config.json says; nothing where there is none.

    Raises:
        ConfigInvalid: It is no JSON object.
    """
    path = model_dir / GENERATION_CONFIG
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigInvalid(f"{path} is not a JSON object")
    return found


def eos_token_ids(model_dir: Path, text_config: Any) -> frozenset[int]:
    """Return the ids that end an answer: of generation_config.json, or else of the model's config.

    Raises:
        ConfigInvalid: They are no ids.
    """
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
