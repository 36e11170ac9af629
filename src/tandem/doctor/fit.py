"""What a model would take of this machine, by the numbers that a node would use. Imports torch."""

from pathlib import Path

import msgspec
import torch

from tandem.doctor.facts import Model
from tandem.engine.config import EngineConfig
from tandem.engine.kv_pool import pool_pages
from tandem.engine.model import model_needs
from tandem.engine.weight_files import weight_files
from tandem.frontend.tokenizer import Tokenizer
from tandem.frontend.tokenizer_files import tokenizer_files
from tandem.node.checkpoint import model_name, resolve_model


def model_facts(settings: EngineConfig, cache_dir: Path) -> Model:
    """Return the facts of a model. A directory may still be without weights: its config.json tells what they take.

    Args:
        settings: `model_dir` is a directory or a GGUF file, which is converted once, as a node would.

    Raises:
        ConfigInvalid: No node could serve it.
    """
    name, given = model_name(settings.model_dir), Path(settings.model_dir)
    if (given / "config.json").is_file() and not weight_files(given):
        settings = msgspec.structs.replace(settings, load_format="dummy")
    directory = resolve_model(settings.model_dir, cache_dir, settings)
    if files := tokenizer_files(directory):
        Tokenizer.from_files(files)
    settings = msgspec.structs.replace(settings, model_dir=str(directory))
    needs = model_needs(settings)
    shape, is_gpu = needs.shape, settings.device != "cpu"
    device_bytes = _device_bytes(settings.device) if is_gpu else 0
    room_bytes = (
        int(device_bytes * settings.mem_fraction_static) - needs.weight_bytes // settings.tp_size
        if is_gpu
        else settings.kv_bytes // settings.tp_size
    )
    num_pages = (
        settings.max_total_tokens // settings.page_size
        if settings.max_total_tokens
        else pool_pages(shape, settings.page_size, max(0, room_bytes))
    )
    num_tokens = num_pages * settings.page_size
    return Model(
        name=name,
        dtype=shape.dtype,
        weight_bytes=needs.weight_bytes,
        kv_bytes_per_token=shape.kv_bytes_per_token * settings.tp_size,
        num_tokens=num_tokens,
        pool_bytes=num_tokens * shape.kv_bytes_per_token * settings.tp_size,
        context_length=shape.context_length,
        device=settings.device,
        device_memory_bytes=device_bytes * settings.tp_size,
    )


def _device_bytes(device: str) -> int:
    """Return the memory of one GPU; 0 where there is none."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)
