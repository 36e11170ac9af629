"""Loads the model in a directory with all of its weights, or reports in one sentence why it cannot.

transformers reads the files. It only warns about missing tensors, mismatched shapes, surplus layers, and quantized
numbers mistaken for plain ones; this module rejects such models. `weight_files.py` finds the files, and `loading.py`
determines the model's shape.
"""

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
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

from tandem.engine.attention import paged as attention
from tandem.engine.config import EngineConfig
from tandem.engine.model.config_keys import check_config, check_values
from tandem.engine.weight_files import (
    check_weights,
    read_object,
    some,
    weight_samples,
)
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid, TandemError

log = get_logger(__name__)

# Weights of a norm of queries or keys, with the names of their attention, and of what they normalize.
_QK_NORM = re.compile(r"(.+)\.(q|k|query|key)_(layer_?)?norm(\.norms\.\d+)?\.(weight|bias)")
# Characters of a library's error to show. Longer errors list everything that the library supports.
_MAX_REASON = 300


def read_config(config: EngineConfig) -> Any:
    """Return transformers' config of the model. Raise ConfigInvalid if transformers does not support the model."""
    path = Path(config.model_dir)
    with in_one_sentence(f"cannot load the model in {path}"):
        if not (path / "config.json").is_file():
            raise ConfigInvalid(
                f"{path} has no config.json: pass a transformers directory or a GGUF file"
            )
        _check_known(config, path)
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        check_config(path, read_object(path / "config.json"), hf_config)
        return hf_config


def load_checkpoint(config: EngineConfig, hf_config: Any) -> torch.nn.Module:
    """Load a model onto its device, or create one with seeded random weights.

    With `tp_size` over 1 every rank must call this after `tensor_parallel.join`, and gets its shard.

    Raises:
        ConfigInvalid: The model is missing or incomplete, or cannot be loaded on this device.
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
                # Errors in headers are found before minutes of reading.
                _from_headers(config, hf_config, path)
            # Each tensor is copied to its device when it is read: host memory may be smaller than the model.
            place = config.device if sharding is None else None
            model = _from_files(
                config, hf_config, path, device_map=place, distributed_config=sharding
            ).to(config.device)
            _check_numbers(model, path)
    return model.eval().requires_grad_(requires_grad=False)


def fingerprint(config: EngineConfig, text_config: Any, dtype: str, kv_dtype: str) -> str:
    """Return a name that is equal on two nodes only if they have the same weights and types."""
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
    """Convert all errors in the block to a ConfigInvalid of one line."""
    try:
        yield
    except TandemError:
        raise
    except Exception as error:
        # transformers, torch and a model's code may raise any exception for an invalid file.
        log.debug("checkpoint.refused", exc_info=True)
        raise ConfigInvalid(f"{what_fails}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if " " in text else repr(error)  # a KeyError's text is only the key
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} ..."


def _check_known(config: EngineConfig, path: Path) -> None:
    facts = read_object(path / "config.json")
    check_values(path, facts)
    kind = facts["model_type"]
    if kind not in CONFIG_MAPPING and not config.trust_remote_code:
        if "auto_map" in facts:
            raise ConfigInvalid(
                f"the model in {path} (model_type {kind}) includes Python code: review it, and set "
                "--trust-remote-code to run it"
            )
        raise ConfigInvalid(
            f"the installed transformers {transformers.__version__} does not support model_type {kind} of "
            f"{path}: install a version that does, or use a different model"
        )


def _random(
    config: EngineConfig, hf_config: Any, sharding: DistributedConfig | None
) -> torch.nn.Module:
    torch.manual_seed(config.random_seed)
    model: Any = AutoModelForCausalLM.from_config(hf_config, **_settings(config, hf_config))
    if sharding is None:
        return model  # type: ignore[no-any-return]
    # All ranks create the same model from the seed, and keep their shard.
    _, _, meshes = model.prepare_distribute_model(sharding)
    return model.maybe_distribute_model(model, sharding, meshes)  # type: ignore[no-any-return]


def _from_headers(config: EngineConfig, hf_config: Any, path: Path) -> torch.nn.Module:
    """Return a model with plain weights on the meta device, reading only the headers of its files."""
    model = _from_files(config, hf_config, path, device_map="meta")
    packed = [name for name, each in model.named_parameters() if each.itemsize == 1]
    if packed:
        raise ConfigInvalid(
            f"the weight files in {path} lack the scales of quantized tensors ({some(packed)}): copy all files"
        )
    return model


def _from_files(
    config: EngineConfig, hf_config: Any, path: Path, **placement: Any
) -> torch.nn.Module:
    hf_logging.disable_progress_bar()  # `engine.loaded` is logged instead
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
                    f"the tensors in {path} that make up {some(broken)} do not match: one is missing or has the "
                    "wrong shape; copy the files again"
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
    """Collect transformers' load report instead of logging it, because our errors cover its content."""
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
    """Check the loading info of `from_pretrained`: all tensors must come from the files.

    Raises:
        ConfigInvalid: A tensor is missing or has the wrong shape, or the files have surplus layers, biases or norms.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigInvalid(
            f"the weight files in {path} lack {len(missing)} of the model's tensors ({some(missing)}): copy all "
            "files, and the config.json of the same model"
        )
    for name, found, expected in sorted(info["mismatched_keys"]):
        raise ConfigInvalid(
            f"{name} has shape {list(found)} in the files of {path} and {list(expected)} according to its "
            "config.json: copy both from the same model"
        )
    unused = sorted(info["unexpected_keys"])
    modules = _modules(model)
    if beyond := [name for name in unused if _is_beyond(modules, name)]:
        raise ConfigInvalid(
            f"the weight files in {path} have more layers than config.json ({some(beyond)}): copy both from the "
            "same model"
        )
    biases = [name for name in unused if _is_bias(modules, name)]
    norms = [name for name in unused if _is_qk_norm(modules, name, unused)]
    for kind, names in (("biases", biases), ("norms of queries or keys", norms)):
        if names:
            raise ConfigInvalid(
                f"the weight files in {path} have {kind} that the model does not have ({some(names)}): copy the "
                "config.json of the same model"
            )
    # A load onto the meta device is only a check. The actual load follows and logs this.
    if unused and model.device.type != "meta":
        log.warning(
            "checkpoint.unused_tensors",
            path=str(path),
            num=len(unused),
            such_as=some(unused),
            effect="not loaded, because the model does not have these tensors",
        )


def _modules(model: Any) -> dict[str, torch.nn.Module]:
    """Return the modules by their names in the files, which may be those of the bare decoder."""
    own, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."
    return {name.removeprefix(prefix): each for name, each in own.items()} | own


def _is_beyond(modules: Mapping[str, torch.nn.Module], name: str) -> bool:
    """Return whether a tensor belongs to a layer after the model's last."""
    for number in re.finditer(r"\.(\d+)\.", name):
        layers = modules.get(name[: number.start()])
        if isinstance(layers, torch.nn.ModuleList) and int(number[1]) >= len(layers):
            return True
    return False


def _is_bias(modules: Mapping[str, torch.nn.Module], name: str) -> bool:
    """Return whether a tensor is the bias of a plain linear layer."""
    return name.endswith(".bias") and isinstance(
        modules.get(name.removesuffix(".bias")), torch.nn.Linear
    )


def _is_qk_norm(modules: Mapping[str, torch.nn.Module], name: str, unused: Collection[str]) -> bool:
    """Return whether a tensor normalizes queries or keys that one of the modules computes."""
    found = _QK_NORM.fullmatch(name)
    # A layer that reads the keys of a different layer has neither this norm nor the projection before it.
    return bool(
        found and found[1] in modules and f"{found[1]}.{found[2]}_proj.weight" not in unused
    )


def _check_numbers(model: torch.nn.Module, path: Path) -> None:
    """Reject weights that are infinite or NaN.

    This reads all weights once (7 to 11 GB/s on one CPU core) and allocates no memory.
    """
    for name, tensor in model.state_dict().items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # Packed weights of quantizers have special types, and torch cannot compare 8-bit floats.
        is_plain = type(own) is torch.Tensor and own.is_floating_point() and own.itemsize > 1
        if is_plain and own.numel() and not all(end.isfinite() for end in torch.aminmax(own)):
            raise ConfigInvalid(
                f"{name} in {path} has infinite or NaN elements in {own.dtype}: copy the files again, or use a "
                "different --dtype"
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
        raise ConfigInvalid(
            f"quantization_config in {path}/config.json has no quant_method: add it"
        )
    method = settings.get("quant_method", "bitsandbytes")
    if not AutoHfQuantizer.supports_quant_method(settings):
        raise ConfigInvalid(
            f"the weights in {path} are quantized with {method}, which transformers {transformers.__version__} does not "
            "support: use weights in a different format"
        )
    try:
        quantizer = AutoHfQuantizer.from_config(dict(settings), pre_quantized=True)
        quantizer.validate_environment(device_map={"": config.device})
    except Exception as error:
        # Quantizers raise errors of many types, such as ImportError, RuntimeError, ValueError and TypeError.
        raise ConfigInvalid(
            f"the weights in {path} are quantized with {method}, which cannot be loaded for --device {config.device}: "
            f"{_reason(error)}"
        ) from error
    if not _stays_packed(quantizer):
        log.warning(
            "checkpoint.dequantized",
            method=method,
            device=config.device,
            effect="this device cannot compute in this format, so weights take the memory of plain ones",
        )
    return quantizer


def _stays_packed(quantizer: Any | None) -> bool:
    return quantizer is not None and not getattr(quantizer.quantization_config, "dequantize", False)
