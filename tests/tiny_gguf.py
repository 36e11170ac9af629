"""A tiny random GGUF file whose float32 values have no exact smaller type."""

from pathlib import Path

import gguf
import numpy as np

NUM_LAYERS, HIDDEN, FEED_FORWARD, VOCAB_SIZE = 2, 64, 96, 300


def tensors() -> dict[str, np.ndarray]:
    """Return the tensors by name."""
    random = np.random.default_rng(0)
    square, wide, tall = (HIDDEN, HIDDEN), (FEED_FORWARD, HIDDEN), (HIDDEN, FEED_FORWARD)
    layer = {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), square),
        **dict.fromkeys(("ffn_gate", "ffn_up"), wide),
        "ffn_down": tall,
        **dict.fromkeys(("attn_norm", "ffn_norm"), (HIDDEN,)),
    }
    shapes = {f"blk.{i}.{name}": shape for i in range(NUM_LAYERS) for name, shape in layer.items()}
    shapes |= {
        "token_embd": (VOCAB_SIZE, HIDDEN),
        "output": (VOCAB_SIZE, HIDDEN),
        "output_norm": (HIDDEN,),
    }
    return {
        f"{name}.weight": random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(path: Path, without: str = "") -> Path:
    """Write the file, omitting the tensor `without`; return its path."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    letters = [chr(0x100 + i) for i in range(VOCAB_SIZE - 1)]
    writer.add_token_list([*letters, letters[0] + letters[1]])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB_SIZE)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in tensors().items():
        if name != without:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
