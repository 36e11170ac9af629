"""Checkpoints for vLLM: the embedded model in a type, and tiny random ones whose heads vLLM's CPU kernels take."""

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3MoeConfig

from tandem.node.checkpoint import resolve_model

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # the default makes logits nearly equal: argmax would be noise
}
TINY = {
    "experts": lambda: Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
    "sliding window": lambda: MistralConfig(**SIZES, sliding_window=48),
}


def tiny(kind: str, directory: Path) -> Path:
    torch.manual_seed(sorted(TINY).index(kind))
    model = AutoModelForCausalLM.from_config(TINY[kind](), dtype=torch.float32)
    model.save_pretrained(directory)
    return directory


def embedded(cache: Path) -> Path:
    return resolve_model(None, cache)


def prompts(vocab_size: int, block: int, longest: int) -> list[list[int]]:
    """Return prompts of one token, around the borders of blocks, of several chunks, and with shared prefixes."""
    rng = random.Random(7)
    base = [rng.randrange(3, vocab_size) for _ in range(longest)]
    around = [block * n + more for n in (1, 2, 3) for more in (-1, 0, 1)]
    shared = [base[:length] for length in (*around, longest // 2, longest)]
    lengths = [1, 2, block + 7, 2 * block + 40, longest // 3, longest - 1]
    own = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
    return [*shared, *own, shared[0] + own[2][:50], shared[1] + own[3][:50]]
