"""Checkpoints for vLLM: the embedded model in a given type, and tiny random ones that vLLM's CPU kernels support."""

import json
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    FalconH1Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tandem.node.models.checkpoint import resolve_model

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
NOISE = 0.005
RANK = 8
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
TINY = {
    "full attention": lambda: LlamaConfig(**SIZES),
    "one layer": lambda: LlamaConfig(**SIZES | {"num_hidden_layers": 1}),
    "experts": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4),
    "with four KV heads": lambda: Qwen3MoeConfig(
        **SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4}, **EXPERTS, num_experts=4
    ),
    "sliding window": lambda: MistralConfig(**SIZES, sliding_window=48),
    "windows in some layers": lambda: Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
    ),
    "windows and sinks": lambda: GptOssConfig(
        **SIZES | {"num_hidden_layers": 4},
        sliding_window=48,
        num_experts_per_tok=2,
        num_local_experts=4,
    ),
    "chunks in some layers": lambda: Llama4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        intermediate_size_mlp=96,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=2,
        attention_chunk_size=64,
    ),
    "latent attention": lambda: DeepseekV2Config(
        **SIZES | {"num_key_value_heads": 4},
        **EXPERTS,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        topk_method="group_limited_greedy",
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
    ),
    "state": lambda: FalconH1Config(
        **SIZES,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_ssm=128,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=32,
    ),
    "state in some layers": lambda: Qwen3NextConfig(
        **SIZES | {"num_hidden_layers": 4},
        **EXPERTS,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        shared_expert_intermediate_size=64,
    ),
    "one layer and a draft": lambda: Glm4MoeConfig(
        **SIZES | {"num_hidden_layers": 1},
        **EXPERTS,
        n_routed_experts=4,
        first_k_dense_replace=0,
        num_nextn_predict_layers=1,
    ),
}


def tiny(kind: str, directory: Path) -> Path:
    torch.manual_seed(sorted(TINY).index(kind))
    model = AutoModelForCausalLM.from_config(TINY[kind](), dtype=torch.float32)
    model.save_pretrained(directory)
    return directory


def with_eagle_draft(directory: Path) -> Path:
    """Write a tiny Llama model, and an EAGLE draft of it in `draft`."""
    model, tensors = _with_unit_embeddings("one layer", directory)
    # Unlike the model, vLLM's drafts have no norm before their first layer, which unit embeddings do not need.
    layers = {
        name.removeprefix("model."): each for name, each in tensors.items() if "layers" in name
    }
    del layers["layers.0.input_layernorm.weight"]
    model.config.save_pretrained(directory / "draft")
    save_file(layers | {"fc.weight": _mostly_embeddings()}, directory / "draft/model.safetensors")
    return directory


def with_mtp_draft(directory: Path) -> Path:
    """Write a tiny GLM 4.5 of one layer, and a second layer for multi-token prediction."""
    _, tensors = _with_unit_embeddings("one layer and a draft", directory)
    own = {
        name.replace("layers.0", "layers.1"): each
        for name, each in tensors.items()
        if "layers.0" in name
    }
    norms = ("enorm", "hnorm", "shared_head.norm")
    own |= {f"model.layers.1.{name}.weight": torch.ones(SIZES["hidden_size"]) for name in norms}
    own["model.layers.1.eh_proj.weight"] = _mostly_embeddings()
    save_file(
        tensors | {name: each.clone() for name, each in own.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    return directory


def _with_unit_embeddings(kind: str, directory: Path):
    """Write a tiny model whose embeddings have an RMS of 1; return it and its tensors.

    A draft with the same layers, which reads the embedding of the next token, then often predicts what the model does:
    only the first tokens of the prompt are missing in its KV.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TINY[kind](), dtype=torch.float32)
    weight = model.get_input_embeddings().weight.data
    weight /= weight.square().mean(-1, keepdim=True).sqrt()
    model.save_pretrained(directory)
    return model, load_file(directory / "model.safetensors")


def _mostly_embeddings() -> torch.Tensor:
    """Return the projection of a draft's input, the next token's embedding and the model's last hidden state."""
    size = SIZES["hidden_size"]
    return torch.cat([torch.eye(size), NOISE * torch.randn(size, size)], dim=1)


def tiny_with_tokenizer(cache: Path, directory: Path) -> Path:
    """Write a random model with the tokenizer of the embedded one, which grammars need."""
    shutil.copytree(embedded(cache), directory, dirs_exist_ok=True)
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    config = AutoConfig.from_pretrained(directory)
    config.update(
        {
            "hidden_size": 128,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "initializer_range": 0.3,
        }
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def adapter(model: Path, directory: Path, seed: int) -> Path:
    """Write a random LoRA adapter of a Llama model, in PEFT's format, strong enough to change its answers."""
    config = AutoConfig.from_pretrained(model)
    head = config.hidden_size // config.num_attention_heads
    outs = {"q_proj": config.hidden_size, "v_proj": head * config.num_key_value_heads}
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, num_out in outs.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, config.hidden_size) * 0.05
            tensors[f"{key}.lora_B.weight"] = torch.randn(num_out, RANK) * 0.05
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    wanted = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": [*outs]}
    (directory / "adapter_config.json").write_text(json.dumps(wanted))
    return directory


def quantized(model: Path, directory: Path) -> Path:
    """Quantize the layers of a checkpoint to 8 bits: compressed-tensors, W8A8, one scale per row."""
    shutil.copytree(model, directory)
    [file] = directory.glob("*.safetensors")
    tensors = load_file(file)
    for name in [each for each in tensors if each.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, file)
    whole = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": whole | {"strategy": "channel", "dynamic": False},
        "input_activations": whole | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def embedded(cache: Path) -> Path:
    return resolve_model(None, cache)


def prompts(vocab_size: int, block: int, longest: int, count: int = 19) -> list[list[int]]:
    """Return prompts of one token, with lengths around block boundaries, of several chunks, and with shared prefixes.

    Those beyond 19 have prefixes of others and ends of their own.
    """
    rng = random.Random(7)
    base = [rng.randrange(3, vocab_size) for _ in range(longest)]
    around = [block * n + more for n in (1, 2, 3) for more in (-1, 0, 1)]
    shared = [base[:length] for length in (*around, longest // 2, longest)]
    lengths = [1, 2, block + 7, 2 * block + 40, longest // 3, longest - 1]
    own = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
    mixed = [shared[0] + own[2][:50], shared[1] + own[3][:50]]
    more = [
        [*base[: rng.randrange(longest // 3)], rng.randrange(3, vocab_size)]
        for _ in range(count - 19)
    ]
    return [*shared, *own, *mixed, *more]
