"""The sizes of a model for an estimate, from a table or from a model directory.

For a directory the sizes come from the engine's own `model_needs`. So a token's KV is the KV that a node would
store, including compressed latents, layers of different sizes and layers that share KV. Reading a directory
imports torch, but loads no weights. A name on the Hugging Face Hub is downloaded without them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tandem.engine.config import EngineConfig
from tandem.engine.shape import ITEM_BYTES
from tandem.engine.weight_files import INDEX, read_object, weight_files
from tandem.node.checkpoint import model_name
from tandem.node.hub import download, hub_model
from tandem.wire.errors import ConfigInvalid

# All have bfloat16, 8 KV heads of dimension 128, gated feed-forward layers and untied embeddings. Columns:
# layers, hidden width, attention heads, feed-forward width, vocabulary, context length.
KNOWN = {
    "llama-8b": (32, 4096, 32, 14_336, 128_256, 131_072),
    "llama-70b": (80, 8192, 64, 28_672, 128_256, 131_072),
    "qwen3-32b": (64, 5120, 64, 25_600, 151_936, 40_960),
}
_KV_HEADS, _HEAD_DIM = 8, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of a model, over all ranks of a node.

    Attributes:
        item_bytes: The size of one element of an activation.
        layer_params: The parameters that each token passes through, without the output head.
        head_params: The parameters of the output head, which only sampled tokens pass through.
        pair_flops: The attention FLOPs of one query with one key over all layers, ignoring windows.
        kv_bytes: The KV of one token, as pages store it and attention reads it.
    """

    name: str
    num_layers: int
    hidden: int
    context_length: int
    weight_bytes: float
    item_bytes: int
    layer_params: float
    head_params: float
    pair_flops: float
    kv_bytes: int


def read_model(model: str, tp: int) -> ModelFacts:
    """Return the facts of a model that `tp` devices share.

    Args:
        model: A name in `KNOWN`, a directory with config.json, or a name on the hub.

    Raises:
        ConfigInvalid: The model is unknown or cannot be estimated, or `tp` devices cannot share it.
    """
    if model in KNOWN:
        if tp < 1 or _KV_HEADS % tp:
            raise ConfigInvalid(f"{tp} devices cannot share {_KV_HEADS} KV heads evenly")
        return _of_table(model)
    if (named := hub_model(model)) is not None:
        folder = download(msgspec.structs.replace(named, has_weights=False))
    else:
        folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigInvalid(
            f"--model {model}: give a directory with config.json, a name on the Hugging Face Hub (org/name), or one of "
            f"{', '.join(KNOWN)}"
        )
    from tandem.engine.checkpoint import in_one_sentence  # imports torch, which takes seconds

    # A config may lack a size that only an estimate requires.
    with in_one_sentence(f"cannot estimate the model in {folder}"):
        return _of_directory(model_name(model), folder, tp)


def _of_table(name: str) -> ModelFacts:
    num_layers, hidden, num_heads, feed_forward, vocab_size, context_length = KNOWN[name]
    attention = 2 * hidden * _HEAD_DIM * (num_heads + _KV_HEADS)
    layer_params = num_layers * (attention + 3 * hidden * feed_forward)
    return ModelFacts(
        name=name,
        num_layers=num_layers,
        hidden=hidden,
        context_length=context_length,
        weight_bytes=2 * (layer_params + 2 * vocab_size * hidden),
        item_bytes=2,
        layer_params=layer_params,
        head_params=vocab_size * hidden,
        pair_flops=4 * num_layers * num_heads * _HEAD_DIM,
        kv_bytes=4 * num_layers * _KV_HEADS * _HEAD_DIM,
    )


def _of_directory(name: str, folder: Path, tp: int) -> ModelFacts:
    from tandem.engine.attention import text_config_of
    from tandem.engine.checkpoint import read_config
    from tandem.engine.model import model_needs

    # Assume random weights: the directory may have no weights, and packed ones hide the number of parameters.
    config = EngineConfig(model_dir=str(folder), load_format="dummy", tp_size=tp)
    needs = model_needs(config)
    shape, text = needs.shape, text_config_of(read_config(config))
    # A layer without KV reads another layer's KV; a latent serves as key and value.
    layers = [shape.kv_layers[shape.kv_sources.get(i, i)] for i in range(shape.num_layers)]
    key_and_value = [each.key_dim + (each.value_dim or each.key_dim) for each in layers]
    item_bytes, embedding = ITEM_BYTES[shape.dtype], text.vocab_size * text.hidden_size
    num_params = needs.weight_bytes / item_bytes - (not text.tie_word_embeddings) * embedding
    return ModelFacts(
        name=name,
        num_layers=shape.num_layers,
        hidden=text.hidden_size,
        context_length=shape.context_length,
        weight_bytes=_stored_bytes(folder) or needs.weight_bytes,
        item_bytes=item_bytes,
        layer_params=num_params - embedding - _idle_expert_params(text),
        head_params=embedding,
        kv_bytes=tp * shape.kv_bytes_per_token,
        pair_flops=2 * text.num_attention_heads * sum(key_and_value),
    )


def _stored_bytes(folder: Path) -> int:
    """Return the bytes of a directory's weights, which may be absent although an index lists them; 0: unknown."""
    if (folder / INDEX).is_file():
        metadata = read_object(folder / INDEX).get("metadata") or {}
        return int(metadata.get("total_size", 0))
    return sum(file.stat().st_size for file in weight_files(folder))


def _idle_expert_params(text: Any) -> int:
    """Return the number of parameters in the experts that one token does not pass through."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((found for name in names if (found := getattr(text, name, 0))), 0)
    if not num_experts:
        return 0
    num_layers = text.num_hidden_layers - (getattr(text, "first_k_dense_replace", 0) or 0)
    width = getattr(text, "moe_intermediate_size", 0) or text.intermediate_size
    return int(num_layers * (num_experts - text.num_experts_per_tok) * 3 * text.hidden_size * width)
