"""Tiny random-weight checkpoints of several architectures, made in seconds."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 320
CONTEXT_LENGTH = 512

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # the default makes logits nearly equal: argmax would be noise
}

CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    # The window is shorter than the prompts, so that it has an effect.
    "mistral": lambda: MistralConfig(**SIZES, head_dim=16, sliding_window=24),
    "gemma": lambda: GemmaConfig(**SIZES | {"num_key_value_heads": 1}, head_dim=32),
    "phi3": lambda: Phi3Config(**SIZES),
}


def make_tiny_model(kind: str, directory: Path) -> Path:
    """Write the config and seeded random float32 weights of an architecture; return the directory."""
    torch.manual_seed(sorted(CONFIGS).index(kind))
    AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).save_pretrained(
        directory
    )
    return directory
