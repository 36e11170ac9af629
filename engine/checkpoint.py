"""Loads a directory's model with all of its weights, or reports in one sentence why it cannot.

transformers reads the files. It only warns about missing tensors, mismatched shapes, layers beyond the last,
or quantized numbers taken for plain ones; this module rejects such models.
`weight_files.py` finds the files, and `model.py` determines what the engine needs to know of a model.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import logging as hf_logging

from tandem.engine import attention
from tandem.engine.config import EngineConfig
from tandem.engine.weight_files import (
    check_weights,
    read_object,
    some,
    weight_files,
    weight_samples,
)
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid, TandemError

log = get_logger(__name__)

# Limit of characters of a library's error: longer ones list everything that the library supports.
_MAX_REASON = 300


def read_config(config: EngineConfig) -> Any:
    """Return transformers' config of the model; raise ConfigInvalid if it does not support the model."""
    path = Path(config.model_dir)
    with in_one_sentence(f"cannot load the model in {path}"):
        if not (path / "config.json").is_file():
            raise ConfigInvalid(
                f"{path} has no config.json: give a transformers directory or a GGUF file"
            )
        _check_known(config, path)
        return AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)


def load_checkpoint(config: EngineConfig, hf_config: Any) -> torch.nn.Module:
    """Load a model onto its device, or create one with seeded random weights.

    With `tp_size` over 1 every rank calls this, after `tensor_parallel.join`, and gets its shard.

    Raises:
        ConfigInvalid: The model is missing, incomplete, or not loadable on this device.
    """
    path = Path(config.model_dir)
    with in_one_sentence(f"cannot load the model in {path}"), attention.refusing(hf_config):
        sharding = DistributedConfig(tp_size=config.tp_size) if config.tp_size > 1 else None
        if config.load_format == "dummy":
            model = _random(config, hf_config, sharding).to(config.device)
        else:
            check_weights(path)
            quantizer = _quantizer(config, hf_config, path)
            if not _stays_packed(quantizer):
                # Finds errors before minutes of reading.
                _from_headers(config, hf_config, path)
            place = config.device if quantizer is not None and sharding is None else None
            model = _from_files(
                config, hf_config, path, device_map=place, distributed_config=sharding
            ).to(config.device)
            _check_numbers(model, path)
    return model.eval().requires_grad_(requires_grad=False)


def outline(config: EngineConfig, hf_config: Any) -> tuple[torch.nn.Module, int]:
    """Return a model on the meta device, and the bytes of its weights over all ranks.

    If there are files of weights, their headers are checked as in `load_checkpoint`.
    """
    path = Path(config.model_dir)
    with in_one_sentence(f"cannot load the model in {path}"), attention.refusing(hf_config):
        files = weight_files(path) if config.load_format == "auto" else []
        if files:
            check_weights(path)
        quantizer = _quantizer(config, hf_config, path) if files else None
        if files and not _stays_packed(quantizer):
            model = _from_headers(config, hf_config, path)
        else:
            with torch.device("meta"):
                model = _random(config, hf_config, None)
        sizes = (
            [file.stat().st_size for file in files]
            if _stays_packed(quantizer)
            else [each.numel() * each.itemsize for each in model.parameters()]
        )
    return model, sum(sizes)


def fingerprint(config: EngineConfig, text_config: Any, dtype: str, kv_dtype: str) -> str:
    """Return a name that is equal on two nodes only if they have the same weights in the same types."""
    path = Path(config.model_dir)
    facts = read_object(path / "config.json")
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(f"torch.{kv_dtype}".encode())
    if config.load_format == "dummy":
        digest.update(f"dummy {config.random_seed}".encode())
    else:
        for sample in weight_samples(path):
            digest.update(sample)
    kind = type(text_config).__name__.removesuffix("Config")
    return f"{kind}-{text_config.num_hidden_layers}layers-{dtype}-{digest.hexdigest()[:16]}"


@contextmanager
def in_one_sentence(what_fails: str) -> Iterator[None]:
    """Convert any error of transformers in the block to a ConfigInvalid of one line."""
    try:
        yield
    except TandemError:
        raise
    except Exception as error:
        # For an invalid file, transformers, torch and a model's code may raise anything.
        log.debug("checkpoint.refused", exc_info=True)
        raise ConfigInvalid(f"{what_fails}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if " " in text else repr(error)  # the text of a KeyError is only the key
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} ..."


def _check_known(config: EngineConfig, path: Path) -> None:
    facts = read_object(path / "config.json")
    kind = facts.get("model_type")
    if isinstance(kind, str) and kind not in CONFIG_MAPPING and not config.trust_remote_code:
        if "auto_map" in facts:
            raise ConfigInvalid(
                f"the model in {path} (model_type {kind}) brings Python code of its own: read it, and give "
                "--trust-remote-code to run it"
            )
        raise ConfigInvalid(
            f"transformers {transformers.__version__}, which is installed, does not know model_type {kind} of "
            f"{path}: install a version that does, or give another model"
        )


def _random(
    config: EngineConfig, hf_config: Any, sharding: DistributedConfig | None
) -> torch.nn.Module:
    torch.manual_seed(config.random_seed)
    model: Any = AutoModelForCausalLM.from_config(hf_config, **_settings(config, hf_config))
    if sharding is None:
        return model  # type: ignore[no-any-return]
    # Every rank created the same model from the seed; keep this rank's shard.
    _, _, meshes = model.prepare_distribute_model(sharding)
    return model.maybe_distribute_model(model, sharding, meshes)  # type: ignore[no-any-return]


def _from_headers(config: EngineConfig, hf_config: Any, path: Path) -> torch.nn.Module:
    """Return a model of plain weights on the meta device, reading only the headers of its files."""
    model = _from_files(config, hf_config, path, device_map="meta")
    packed = [name for name, each in model.named_parameters() if each.itemsize == 1]
    if packed:
        raise ConfigInvalid(
            f"the files of weights in {path} lack the scales of quantized tensors: {some(packed)}; copy all of them"
        )
    return model


def _from_files(
    config: EngineConfig, hf_config: Any, path: Path, **placement: Any
) -> torch.nn.Module:
    hf_logging.disable_progress_bar()  # noise among log lines; `engine.loaded` is logged instead
    with _load_report() as reports:
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                config=hf_config,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `check_complete` rejects them by name
                **_settings(config, hf_config),
                **placement,
            )
        except RuntimeError as error:
            if broken := re.findall(r"on tensors destined for (\S+)\.", "".join(reports)):
                raise ConfigInvalid(
                    f"the tensors in {path} that make up {some(broken)} do not fit together: one is missing, or of "
                    "another shape; copy the files again"
                ) from error
            raise
    check_complete(model, info, path)
    return model  # type: ignore[no-any-return]


def _settings(config: EngineConfig, hf_config: Any) -> dict[str, Any]:
    own = getattr(hf_config, "dtype", None)
    auto = own if isinstance(own, torch.dtype) else torch.float32
    return {
        "dtype": auto if config.dtype == "auto" else getattr(torch, config.dtype),
        "attn_implementation": attention.register(is_compiled=config.is_compiled),
        "trust_remote_code": config.trust_remote_code,
    }


@contextmanager
def _load_report() -> Iterator[list[str]]:
    """Collect the load report of transformers instead of logging it; our errors cover its content."""
    reports: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "LOAD REPORT" in text:
            reports.append(text)
        return "LOAD REPORT" not in text

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    try:
        yield reports
    finally:
        logger.removeFilter(keep)


# ── completeness of the weights ──────────────────────────────────────────────────────────────────


def check_complete(model: Any, info: Mapping[str, Any], path: Path) -> None:
    """Check the loading info of `from_pretrained`: every tensor must come from the files.

    Raises:
        ConfigInvalid: A tensor is missing or has another shape, or the files have extra layers.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigInvalid(
            f"the files of weights in {path} lack {len(missing)} of the model's tensors: {some(missing)}; copy all "
            "of them, and the config.json that belongs to them"
        )
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise ConfigInvalid(
            f"{name} is {list(found)} in the files of {path}, and {list(wanted)} by its config.json: copy both "
            "from one model"
        )
    unused = sorted(info["unexpected_keys"])
    modules = dict(model.named_modules())
    if beyond := [name for name in unused if _is_beyond(model, modules, name)]:
        raise ConfigInvalid(
            f"the files of weights in {path} have more layers than config.json says: {some(beyond)}; copy both from "
            "one model"
        )
    if unused and model.device.type != "meta":  # on the meta device the load itself still follows
        log.warning(
            "checkpoint.unused_tensors",
            path=str(path),
            num=len(unused),
            such_as=some(unused),
            effect="they are not loaded: the model has no place for them",
        )


def _is_beyond(model: Any, modules: Mapping[str, torch.nn.Module], name: str) -> bool:
    """Return whether a tensor belongs to a layer beyond the model's last."""
    for number in re.finditer(r"\.(\d+)\.", name):
        before = name[: number.start()]
        layers = modules.get(before, modules.get(f"{model.base_model_prefix}.{before}"))
        if isinstance(layers, torch.nn.ModuleList) and int(number[1]) >= len(layers):
            return True
    return False


def _check_numbers(model: torch.nn.Module, path: Path) -> None:
    """Reject weights that are infinite or NaN.

    It reads all weights once (7 to 11 GB/s on one CPU core), and allocates no memory.
    """
    for name, tensor in model.state_dict().items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # Packed weights of quantizers have their own types, and torch cannot compare 8-bit floats.
        is_plain = type(own) is torch.Tensor and own.is_floating_point() and own.itemsize > 1
        if is_plain and own.numel() and not all(end.isfinite() for end in torch.aminmax(own)):
            raise ConfigInvalid(
                f"{name} in {path} has elements that are infinite or not a number in {own.dtype}: copy the files "
                "again, or give another --dtype"
            )


# ── quantized weights ────────────────────────────────────────────────────────────────────────────


def _quantizer(config: EngineConfig, hf_config: Any, path: Path) -> Any | None:
    """Return transformers' quantizer for the model; None for plain weights."""
    settings = getattr(hf_config, "quantization_config", None) or getattr(
        hf_config.get_text_config(decoder=True), "quantization_config", None
    )
    if settings is None:
        return None
    if not isinstance(settings, dict) or not settings.keys() & {
        "quant_method",
        "load_in_4bit",
        "load_in_8bit",
    }:
        raise ConfigInvalid(f"quantization_config in {path}/config.json names no quant_method")
    method = settings.get("quant_method", "bitsandbytes")
    if not AutoHfQuantizer.supports_quant_method(settings):
        raise ConfigInvalid(
            f"the weights in {path} are quantized with {method}, which transformers {transformers.__version__} does not "
            "know: give weights in another format"
        )
    try:
        quantizer = AutoHfQuantizer.from_config(dict(settings), pre_quantized=True)
        quantizer.validate_environment(device_map={"": config.device})
    except Exception as error:
        # Quantizers raise errors of many types: ImportError, RuntimeError, ValueError, TypeError ...
        raise ConfigInvalid(
            f"the weights in {path} are quantized with {method}, which cannot be loaded for --device {config.device}: "
            f"{_reason(error)}"
        ) from error
    if not _stays_packed(quantizer):
        log.warning(
            "checkpoint.dequantized",
            method=method,
            device=config.device,
            effect="this device cannot compute in it: weights take the memory of plain ones",
        )
    return quantizer


def _stays_packed(quantizer: Any | None) -> bool:
    return quantizer is not None and not getattr(quantizer.quantization_config, "dequantize", False)
