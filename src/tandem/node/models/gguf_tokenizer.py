"""Reads the tokenizer of a GGUF file completely, or rejects the file by the key that cannot be read.

transformers' own reader splits text as GPT-2 does if it does not know `tokenizer.ggml.pre`, and drops named chat
templates, the ends of turns, and what llama.cpp derives from the other keys.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from tandem.wire.errors import ConfigInvalid

# Values of `tokenizer.ggml.pre` by the way of splitting, as in llama.cpp's llama-vocab.cpp.
_AS_GPT2 = ("gpt-2", "exaone4", "gigachat", "granite-docling", "jais", "mpt", "olmo", "phi-2")
_SINGLE_DIGITS = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
_AS_QWEN2 = ("hunyuan", "solar", "stablelm2")
# These put the token for the beginning of a text first, and use a token of the vocabulary before any merge.
_AS_LLAMA3 = (
    *("falcon-h1", "falcon3", "jina-v5-nano", "lfm2", "llama-bpe", "llama-v3", "llama3"),
    *("midm-2.0", "pixtral", "tekken"),
)
# Ways of splitting of files that name none, which converters wrote before May 2024.
_BEFORE_NAMES = {"gpt2": "gpt-2", "qwen2": "qwen2", "qwen2moe": "qwen2", "starcoder2": "starcoder"}
_CHAT_TEMPLATE = "tokenizer.chat_template"
# Tokens that end an answer: of a text, of a turn and of a message.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def read_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Any:
    """Return the tokenizer of a GGUF file, with its chat templates.

    Raises:
        ConfigInvalid: The file splits text in a way that is not known.
    """
    is_byte_level = metadata.get("tokenizer.ggml.model") == "gpt2"
    pre = _pre(path, metadata) if is_byte_level else ""
    begins = {"add_bos_token": True} if pre in _AS_LLAMA3 else {}
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **begins)
    backend = tokenizer.backend_tokenizer
    if pre in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif pre in _AS_QWEN2:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre in _AS_LLAMA3:
        backend.model.ignore_merges = True
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    if not has_prefix and isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    tokenizer.chat_template = chat_templates(metadata) or None
    return tokenizer


def _pre(path: Path, metadata: Mapping[str, Any]) -> str:
    pre: str = metadata.get("tokenizer.ggml.pre", "default")
    if pre == "default":
        pre = _BEFORE_NAMES.get(metadata["general.architecture"], pre)
    known = {*_AS_GPT2, *_SINGLE_DIGITS, *_AS_QWEN2, *GGUF_PRE_TOKENIZER_SPLITS}
    if pre not in known:
        raise ConfigInvalid(
            f"{path} has tokenizer.ggml.pre = {pre}, which cannot be read: use a newer file, or pass the model's "
            "directory with tokenizer.json and safetensors"
        )
    return pre


def chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str]:
    """Return the only chat template of a file, or all by name."""
    named = {
        key.removeprefix(f"{_CHAT_TEMPLATE}."): text
        for key, text in metadata.items()
        if key.startswith(f"{_CHAT_TEMPLATE}.")
    }
    default: str = metadata.get(_CHAT_TEMPLATE, "")
    return ({"default": default} if default else {}) | named if named else default


def generation_config(metadata: Mapping[str, Any]) -> GenerationConfig:
    """Return the tokens that end an answer, and the sampling parameters that the file recommends."""
    keys = [f"tokenizer.ggml.{name}" for name in _ENDS]
    ends = {int(metadata[key]) for key in keys if key in metadata}
    own = {name: metadata[key] for key, name in _SAMPLING.items() if key in metadata}
    return GenerationConfig(eos_token_id=sorted(ends) or None, do_sample=bool(own), **own)
