"""What an estimate needs to know of a model: from its config.json, or of a few that are known. No weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.engine.shape import ITEM_BYTES
from tandem.wire.errors import ConfigInvalid

_DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of a decoder with gated feed-forward layers, with experts or without.

    Attributes:
        feed_forward: Width of a feed-forward layer, or of one expert.
        num_experts: Of a layer; 1: it has none to choose from.
        num_active: Of these, how many a token passes through.
        weight_bytes: As its files have them; 0: worked out.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    feed_forward: int
    vocab_size: int
    num_experts: int = 1
    num_active: int = 1
    is_tied: bool = False
    item_bytes: int = 2
    context_length: int = 131_072
    weight_bytes: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of K and V of a token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def active_in_layers(self) -> int:
        """Return the parameters that a token passes through, the output head left out."""
        return self._in_layers(self.num_active)

    @property
    def in_head(self) -> int:
        """Return the parameters of the output head, which only sampled tokens pass through."""
        return self.vocab_size * self.hidden

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all weights."""
        embeddings = self.in_head * (1 if self.is_tied else 2)
        made = (self._in_layers(self.num_experts) + embeddings) * self.item_bytes
        return self.weight_bytes or made

    def _in_layers(self, num_experts: int) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.num_heads + self.num_kv_heads)
        routing = self.hidden * self.num_experts if self.num_experts > 1 else 0
        return self.num_layers * (
            attention + num_experts * 3 * self.hidden * self.feed_forward + routing
        )


_LLAMA: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "vocab_size": 128_256}
KNOWN = {
    facts.name: facts
    for facts in (
        ModelFacts(
            name="llama-8b",
            num_layers=32,
            hidden=4096,
            num_heads=32,
            feed_forward=14_336,
            **_LLAMA,
        ),
        ModelFacts(
            name="llama-70b",
            num_layers=80,
            hidden=8192,
            num_heads=64,
            feed_forward=28_672,
            **_LLAMA,
        ),
        ModelFacts(
            name="qwen3-32b",
            num_layers=64,
            hidden=5120,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            feed_forward=25_600,
            vocab_size=151_936,
            context_length=40_960,
        ),
    )
}


def read_model(model: str) -> ModelFacts:
    """Return what is known of a model by name, or what its directory says.

    Raises:
        ConfigInvalid: There is no such model, or its shape is not one that can be estimated.
    """
    if model in KNOWN:
        return KNOWN[model]
    path = Path(model).expanduser()
    file = path if path.name == "config.json" else path / "config.json"
    try:
        read = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigInvalid(
            f"--model {model}: {error}; give a directory with config.json, or one of {', '.join(KNOWN)}",
            topic="plan#nodes",
        ) from error
    facts = read.get("text_config") or read
    try:
        return _facts(file.parent, facts, read)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigInvalid(
            f"--model {model}: config.json does not tell {error}: such a model cannot be estimated; measure a "
            "node of it with `tandem profile`, and give --node FILE",
            topic="plan#nodes",
        ) from error


def _facts(folder: Path, text: Mapping[str, Any], whole: Mapping[str, Any]) -> ModelFacts:
    if text.get("kv_lora_rank"):
        raise ValueError("how many bytes a token's compressed KV has")
    num_heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
    num_experts = int(text.get("num_local_experts") or text.get("num_experts") or 1)
    dtype = str(text.get("dtype") or whole.get("dtype") or whole.get("torch_dtype") or "bfloat16")
    wide = text.get("moe_intermediate_size") if num_experts > 1 else None
    return ModelFacts(
        name=folder.resolve().name,
        num_layers=int(text["num_hidden_layers"]),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=int(text.get("num_key_value_heads") or num_heads),
        head_dim=int(text.get("head_dim") or hidden // num_heads),
        feed_forward=int(wide or text["intermediate_size"]),
        vocab_size=int(text["vocab_size"]),
        num_experts=num_experts,
        num_active=int(text.get("num_experts_per_tok") or 1) if num_experts > 1 else 1,
        is_tied=bool(text.get("tie_word_embeddings", whole.get("tie_word_embeddings", False))),
        item_bytes=ITEM_BYTES[dtype],
        context_length=int(text.get("max_position_embeddings") or _DEFAULT_CONTEXT),
        weight_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
    )
