"""What a simulated engine knows of a model: its shape and its ordinary tokens. No weights, no tensors."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from tandem.engine.config import EngineConfig
from tandem.engine.forward import Ints
from tandem.engine.profile import SimKV
from tandem.engine.shape import (
    ITEM_BYTES,
    KV_DTYPES,
    ModelShape,
    context_length,
    eos_token_ids,
    head_dim,
    kv_heads,
)
from tandem.wire.errors import ConfigInvalid

# What config.json has to say by itself; where it does not, transformers knows the architecture's defaults.
_NEEDED = ("num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")


class _AddedToken(msgspec.Struct, frozen=True):
    id: int


class _Vocabulary(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _TokenizerFile(msgspec.Struct, frozen=True):
    """Of tokenizer.json what names ids; the rest, merges above all, is passed over unread."""

    model: _Vocabulary = _Vocabulary()
    added_tokens: list[_AddedToken] = []


def read_model(config: EngineConfig, kv: SimKV) -> tuple[ModelShape, Ints]:
    """Return a model's shape, and the ids that its simulation chooses from.

    Raises:
        ConfigInvalid: The directory does not describe a model; the sentence says why.
    """
    path = Path(config.model_dir)
    facts = _facts(path)
    text = _text_config(path, facts, trusts_code=config.trust_remote_code)
    eos = eos_token_ids(path, text)
    ordinary = _ordinary_ids(path, text.vocab_size, eos)
    dtype = _dtype(config, facts, text)
    kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, dtype)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(f"{kv_dtype} {kv}".encode())
    digest.update(ordinary.tobytes())
    name = f"{facts.get('model_type', 'model')}-{text.num_hidden_layers}layers"
    shape = ModelShape(
        num_layers=text.num_hidden_layers,
        num_kv_heads=kv_heads(text),
        head_dim=head_dim(text),
        vocab_size=text.vocab_size,
        context_length=context_length(config.context_length, text),
        eos_token_ids=eos,
        dtype=dtype,
        kv_dtype=kv_dtype,
        fingerprint=f"{name}-simulated-kv-{kv}-{digest.hexdigest()[:16]}",
    )
    return (shape if kv == "real" else _without_kv(shape)), ordinary


def _without_kv(shape: ModelShape) -> ModelShape:
    """Return the same model with as little KV as a page can have: two bytes a token."""
    return replace(shape, num_layers=1, num_kv_heads=1, head_dim=1, kv_dtype="uint8")


def _facts(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        facts = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"{file} cannot be read: {error}") from error
    if not isinstance(facts, dict):
        raise ConfigInvalid(f"{file} is not a JSON object")
    return facts


def _text_config(path: Path, facts: dict[str, Any], *, trusts_code: bool) -> Any:
    text = SimpleNamespace(**(facts.get("text_config") or facts))
    has_width = hasattr(text, "head_dim") or hasattr(text, "hidden_size")
    if has_width and all(hasattr(text, name) for name in _NEEDED):
        return text
    from transformers import AutoConfig

    try:
        full = AutoConfig.from_pretrained(path, trust_remote_code=trusts_code)
        text = full.get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigInvalid(f"cannot tell the shape of the model in {path}: {error}") from error
    missing = [name for name in _NEEDED if not hasattr(text, name)]
    if missing:
        raise ConfigInvalid(f"config.json in {path} does not say {', '.join(missing)}: add it")
    return text


def _dtype(config: EngineConfig, facts: dict[str, Any], text: Any) -> str:
    own = getattr(text, "dtype", None) or facts.get("dtype") or facts.get("torch_dtype")
    name = config.dtype if config.dtype != "auto" else str(own or "float32")
    name = name.removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ConfigInvalid(f"config.json names dtype {name}: give --dtype")
    return name


def _ordinary_ids(path: Path, vocab_size: int, eos: frozenset[int]) -> Ints:
    """Return the ids that are words and parts of words, not marks; all but ends without a tokenizer."""
    file = path / "tokenizer.json"
    ids = set(range(vocab_size))
    if file.is_file():
        try:
            read = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
        except msgspec.DecodeError as error:
            raise ConfigInvalid(f"{file} cannot be read: {error}") from error
        vocab = read.model.vocab
        ids &= set(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
        ids -= {token.id for token in read.added_tokens}
    ids -= eos
    if not ids:
        raise ConfigInvalid(f"{path} names no token that could be generated")
    return np.array(sorted(ids), np.int64)
