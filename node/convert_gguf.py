"""`python -m node.convert_gguf SOURCE.gguf TARGET`: a GGUF file as a transformers directory.

Weights are dequantised and written as bfloat16 safetensors. Run as a process of its own by
`node.checkpoint`, because reading GGUF takes torch and most of the memory of a node.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(source: Path, target: Path) -> None:
    """Write tokenizer, config and weights of a GGUF file into a new directory."""
    target.mkdir(parents=True)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16
    )
    # The weights are plain now; transformers refuses to save a model it still takes for quantised.
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
