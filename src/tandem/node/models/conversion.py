"""Converts a GGUF file to a transformers directory: tokenizer, config and weights.

`python -m tandem.node.models.conversion SOURCE.gguf TARGET DTYPE` converts in a separate process, because reading GGUF
needs torch and most of a node's memory. If it fails, the last line of its standard error is the reason.
"""

import sys
from functools import lru_cache
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.gguf import read_gguf_metadata

from tandem.engine.model.checkpoint import check_complete, in_one_sentence
from tandem.node.models.gguf_config import read_config
from tandem.node.models.gguf_tokenizer import generation_config, read_tokenizer
from tandem.wire.errors import TandemError

_GGUFReader = gguf.GGUFReader


def convert_gguf(source: Path, target: Path, dtype: str) -> None:
    """Write the tokenizer, config and weights of a GGUF file to a new directory.

    Weights are dequantized and written as safetensors in `dtype`.

    Raises:
        ConfigInvalid: The file is invalid, truncated, or has keys or tensors that cannot be read.
    """
    # transformers reads the file three times and rebuilds the table of names for each module, which takes most of the
    # time. Caching both is safe, because this process does nothing else.
    for name, made in (
        ("GGUFReader", _reader),
        ("get_tensor_name_map", gguf.get_tensor_name_map),
    ):
        setattr(gguf, name, lru_cache(made))
    with in_one_sentence(f"cannot convert {source}, which may be truncated"):
        metadata, _ = read_gguf_metadata(str(source))
        tensors = gguf.GGUFReader(str(source)).tensors
    with in_one_sentence(f"cannot read the config of {source}"):
        config = read_config(source, metadata, tensors)
    with in_one_sentence(f"cannot convert {source}"):
        tokenizer = read_tokenizer(source, metadata)
        model, info = AutoModelForCausalLM.from_pretrained(
            source.parent,
            config=config,
            gguf_file=source.name,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_complete` rejects them by name
        )
    check_complete(model, info, source)
    # The weights are dequantized; transformers refuses to save a model that is still marked as quantized.
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    target.mkdir(parents=True)
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
    generation_config(metadata).save_pretrained(target)


def _reader(path: str) -> gguf.GGUFReader:
    """Return a reader that slices arrays: it makes a slice for each token, and those of `np.memmap` take 5 s more."""
    memmap = np.memmap
    np.memmap = lambda path, mode: np.asarray(memmap(path, mode=mode))  # type: ignore[assignment,misc]
    try:
        return _GGUFReader(path)
    finally:
        np.memmap = memmap  # type: ignore[misc]


def main(source: str, target: str, dtype: str) -> int:
    """Convert a GGUF file; return the exit status."""
    try:
        convert_gguf(Path(source), Path(target), dtype)
    except TandemError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
