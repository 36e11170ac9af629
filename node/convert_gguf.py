"""`python -m tandem.node.convert_gguf SOURCE.gguf TARGET DTYPE`: a GGUF file as a transformers directory.

Weights are dequantised and written as safetensors of one type. Run as a process of its own by
`tandem.node.checkpoint`, because reading GGUF takes torch and most of the memory of a node. What it says last, on
standard error, is why it failed.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.engine.checkpoint import check_complete, in_one_sentence
from tandem.wire.errors import TandemError


def convert(source: Path, target: Path, dtype: str) -> None:
    """Write tokenizer, config and weights of a GGUF file into a new directory.

    Raises:
        ConfigInvalid: The file is none, not whole, or not of a kind that transformers reads.
    """
    target.mkdir(parents=True)
    with in_one_sentence(f"cannot convert {source}, which may not have been copied whole"):
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model, info = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
        )
    check_complete(model, info, source)
    # The weights are plain now; transformers refuses to save a model it still takes for quantised.
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


def main(source: str, target: str, dtype: str) -> int:
    """Convert; return the exit status."""
    try:
        convert(Path(source), Path(target), dtype)
    except TandemError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
