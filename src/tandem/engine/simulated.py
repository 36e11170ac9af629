"""Simulates forwards by waiting: a `Launcher` without a model.

Everything around the launcher is real. It behaves like an asynchronous device such as a GPU: forwards run one after
the other, each for the time that the profile gives, while the host prepares the next. So a step takes the longer of
the simulated time and the host's time, not their sum.

```
 host     launch 1 ─ launch 2 ┐        ┌ hand out 1 ─ launch 3 ┐      ┌ hand out 2 ...
 device   ╞══════ 1 ═══════════════════╡╞════════ 2 ══════════════════╡╞═ 3 ...
                              └ sleeps ┘                       └sleeps┘
```

A token depends only on (key, index), and the key only on the prompt and, unless the request is greedy, the seed. So
prefill, decode and later attempts choose the same tokens.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tandem.engine.config import EngineConfig
from tandem.engine.profile import Profile, SimKV, attended_pairs
from tandem.engine.scheduling.forward import Batch, Chunk, Ints, OnLayerWritten, Slots
from tandem.engine.scheduling.step import Outcome
from tandem.engine.shape import (
    ITEM_BYTES,
    KV_DTYPES,
    ModelShape,
    context_length,
    eos_token_ids,
    head_dim,
    kv_heads,
)
from tandem.engine.vocabulary import read_vocabulary
from tandem.engine.weight_files import read_object
from tandem.wire.errors import ConfigInvalid, InvalidRequest
from tandem.wire.generation import GenerateRequest
from tandem.wire.hand_off import LayerKV
from tandem.wire.prefixes import token_array

# Bytes that a forward writes at the start of each slab, enough to distinguish pages.
_MARK_BYTES = 8
# Fields needed from config.json. If one is missing, the defaults of transformers' config class are used.
_NEEDED = ("num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")


class SimulatedPages:
    """The bytes of a pool, which are pushed like real KV.

    A forward marks the pages that it fills with unique numbers, so that checks detect misplaced pages as with real
    KV. A page has `num_slabs` slabs (K or V of a layer), each of which starts with a mark.
    """

    def __init__(
        self, memory: npt.NDArray[np.uint8], num_pages: int, page_size: int, num_slabs: int
    ) -> None:
        self._slabs = memory.reshape(num_pages, num_slabs, -1)
        self._page_size = page_size
        # Start at a random number, so that nodes use different marks and no mark equals initial zeros.
        self._next_mark = secrets.randbits(62)

    def fill(self, chunk: Chunk) -> None:
        """Mark the pages that a chunk writes. Nothing may read them yet."""
        first, end = chunk.begin // self._page_size, -(-chunk.end // self._page_size)
        pages = chunk.request.page_ids[first:end]
        numbers = np.arange(self._next_mark, self._next_mark + len(pages), dtype=np.int64)
        self._next_mark += len(pages)
        marks = numbers.view(np.uint8).reshape(-1, 1, _MARK_BYTES)
        room = min(_MARK_BYTES, self._slabs.shape[2])
        self._slabs[pages, :, :room] = marks[:, :, :room]


@dataclass(frozen=True, slots=True)
class Clock:
    """The time source; tests replace it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def wait_until(self, due_s: float) -> None:
        """Sleep until `due_s`. Return at once if it has passed."""
        if (left_s := due_s - self.now()) > 0:
            self.sleep(left_s)


class SimulatedLauncher:
    """A `Launcher` that chooses tokens from `ordinary_ids` by hash, and waits.

    Args:
        num_layers: Number of layers to report as written.
        pages: Destination of the bytes that prompts write; None if nothing reads them.
    """

    is_asynchronous = True

    def __init__(
        self,
        profile: Profile,
        ordinary_ids: Ints,
        num_layers: int,
        *,
        pages: SimulatedPages | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._profile = profile
        self._ordinary_ids = ordinary_ids
        self._num_layers = num_layers
        self._pages = pages
        self._clock = clock or Clock()
        self._idle_at_s = 0.0

    def seed(self, request: GenerateRequest, drawn: int) -> int:
        """Return a key derived from the prompt and, unless the request is greedy, from the seed."""
        features = unsupported(request)
        if features:
            raise InvalidRequest(
                f"the simulated engine does not support {features}, because it has no probabilities: omit it"
            )
        num_prompt = len(request.prompt_ids) - request.num_prior_tokens
        return answer_key(
            request.prompt_ids[:num_prompt], drawn if request.sampling.temperature > 0 else 0
        )

    def launch(
        self, batch: Batch, slots: Slots, on_layer_written: OnLayerWritten | None
    ) -> Callable[[], Outcome]:
        """Start a forward when the previous one ends."""
        rows = batch.sampled_rows()
        ids = tokens_at(slots.seed[rows], slots.next_index[rows], self._ordinary_ids)
        begin_s = max(self._idle_at_s, self._clock.now())
        self._idle_at_s = end_s = begin_s + self._forward_s(batch, slots)
        if self._pages is not None:
            for chunk in batch.chunks:
                self._pages.fill(chunk)

        def read() -> Outcome:
            if on_layer_written is not None:
                for layer in range(self._num_layers):
                    share = (layer + 1) / self._num_layers
                    self._clock.wait_until(begin_s + share * (end_s - begin_s))
                    on_layer_written(layer)
            self._clock.wait_until(end_s)
            return Outcome(ids, end_s - begin_s)

        return read

    def _forward_s(self, batch: Batch, slots: Slots) -> float:
        num_new = sum(chunk.num_tokens for chunk in batch.chunks)
        num_before = sum(chunk.begin for chunk in batch.chunks)
        num_read = int(slots.num_tokens[batch.rows].sum())
        num_pairs = sum(attended_pairs(chunk.num_tokens, chunk.begin) for chunk in batch.chunks)
        return self._profile.prefill.forward_s(num_new, num_before, num_pairs) + (
            self._profile.decode.forward_s(len(batch.decodes), num_read)
        )


def answer_key(prompt_ids: list[int], seed: int) -> int:
    """Return the 63-bit key that determines all tokens of an answer."""
    return xxhash.xxh3_64_intdigest(token_array(prompt_ids), seed=seed % 2**64) >> 1


def tokens_at(keys: npt.NDArray[np.uint64], indexes: Ints, ordinary_ids: Ints) -> Ints:
    """Return the token at each index of the answer with each key. All arrays have shape (n,)."""
    # SplitMix64 (Steele et al. 2014), with the key as the generator's seed.
    bits = keys + (indexes.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    ids: Ints = ordinary_ids[(bits % np.uint64(len(ordinary_ids))).astype(np.int64)]
    return ids


def unsupported(request: GenerateRequest) -> str:
    """Return the names of the requested features that need probabilities; empty if there are none."""
    p = request.sampling
    found = {
        "structured output": p.grammar is not None,
        "logprobs": request.logprobs is not None,
        "logit_bias": bool(p.logit_bias),
        "frequency_penalty": bool(p.frequency_penalty),
        "presence_penalty": bool(p.presence_penalty),
        "repetition_penalty": p.repetition_penalty != 1.0,
        # End-of-sequence ids are never chosen, but stop token ids may be.
        "min_new_tokens with stop_token_ids": bool(p.min_new_tokens and p.stop_token_ids),
    }
    return ", ".join(name for name, is_requested in found.items() if is_requested)


# ── the model's shape and its ordinary tokens ────────────────────────────────────────────────────


def read_model(config: EngineConfig, kv: SimKV) -> tuple[ModelShape, Ints]:
    """Return a model's shape, and the token ids from which its simulation chooses.

    Raises:
        ConfigInvalid: The directory does not describe a model. The message gives the reason.
    """
    path = Path(config.model_dir)
    facts = read_object(path / "config.json")
    text = _text_config(path, facts, trusts_code=config.trust_remote_code)
    eos = eos_token_ids(path, text)
    ordinary = _ordinary_ids(path, text.vocab_size, eos)
    dtype = _dtype(config, facts, text)
    kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, dtype)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(f"{kv_dtype} {kv}".encode())
    digest.update(ordinary.tobytes())
    name = f"{facts.get('model_type', 'model')}-{text.num_hidden_layers}layers"
    layers = _latent_layers(text)
    shape = ModelShape(
        num_layers=text.num_hidden_layers,
        num_kv_heads=1 if layers else kv_heads(text),
        head_dim=sum(layer.key_dim for layer in layers) or head_dim(text),
        vocab_size=text.vocab_size,
        context_length=context_length(config.context_length, text),
        eos_token_ids=eos,
        dtype=dtype,
        kv_dtype=kv_dtype,
        fingerprint=f"{name}-simulated-kv-{kv}-{digest.hexdigest()[:16]}",
        layers=layers,
        attention=frozenset({"latents"} if layers else ()),
    )
    return (shape if kv == "real" else _without_kv(shape)), ordinary


def _latent_layers(text: Any) -> tuple[LayerKV, ...]:
    """Return the stored row of each latent attention layer, one for all heads; empty for other models."""
    rank = getattr(text, "kv_lora_rank", None)
    return (LayerKV(1, rank + text.qk_rope_head_dim, 0),) * text.num_hidden_layers if rank else ()


def _without_kv(shape: ModelShape) -> ModelShape:
    """Return the same shape with minimal KV: two bytes per token."""
    return replace(shape, num_layers=1, num_kv_heads=1, head_dim=1, kv_dtype="uint8", layers=())


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
        raise ConfigInvalid(
            f"the shape of the model in {path} cannot be determined: {error}"
        ) from error
    missing = [name for name in _NEEDED if not hasattr(text, name)]
    if missing:
        raise ConfigInvalid(f"config.json in {path} has no {', '.join(missing)}: add it")
    return text


def _dtype(config: EngineConfig, facts: dict[str, Any], text: Any) -> str:
    own = getattr(text, "dtype", None) or facts.get("dtype") or facts.get("torch_dtype")
    name = config.dtype if config.dtype != "auto" else str(own or "float32")
    name = name.removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ConfigInvalid(f"config.json has the unknown dtype {name}: set --dtype")
    return name


def _ordinary_ids(path: Path, vocab_size: int, eos: frozenset[int]) -> Ints:
    """Return all ids except added and end-of-sequence tokens. Without a tokenizer, added tokens are unknown."""
    vocabulary = read_vocabulary(path)
    ids = set(range(vocab_size))
    if vocabulary is not None:
        ids &= vocabulary.ordinary_ids
    ids -= eos
    if not ids:
        raise ConfigInvalid(f"the tokenizer in {path} has no ordinary token to generate")
    return np.array(sorted(ids), np.int64)
