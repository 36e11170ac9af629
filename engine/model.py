"""Loading a model through transformers, and what the rest needs to know of it."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging as hf_logging

from engine import attention
from engine.attention import AttentionNotServed, not_served, text_config_of
from engine.config import EngineConfig
from engine.fusion import fuse
from engine.model_check import ModelCheck
from engine.observation import Observed, observe
from engine.paged_model import PagedModel
from engine.shape import KV_DTYPES, ModelShape, context_length, eos_token_ids, kv_heads
from wire.errors import ConfigInvalid

# Bytes at each end of each tensor that enter the fingerprint: enough to tell two fine-tunes apart, whichever
# tensors were trained, without reading hundreds of gigabytes at start (a 70B model has 723 tensors: 12 MiB).
_SAMPLE_BYTES = 8 << 10
_DIRECTORY_BYTES = 1 << 20

# Weights that take longer to load than a small copy takes to be checked.
_LARGE_BYTES = 1 << 30

# Whose output is keys, under the names that transformers' tensor parallel plans have for it.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a model takes; the weights are those of all ranks together."""

    shape: ModelShape
    weight_bytes: int


def load_model(config: EngineConfig) -> tuple[PagedModel, ModelShape]:
    """Load weights, or make seeded random ones, with attention routed to the paged pool.

    With `tp_size` over 1 every rank calls this, after `tensor_parallel.join`, and gets its shard.

    Raises:
        ConfigInvalid: The directory holds no model that is served right; the sentence says why.
    """
    hf_logging.disable_progress_bar()  # a bar among log lines is noise; `engine.loaded` says it
    with _readable(config.model_dir) as path:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        text = text_config_of(hf_config)
        implementation = attention.register(is_compiled=config.is_compiled)
        check = ModelCheck(config, hf_config)
        if _stored_bytes(path) > _LARGE_BYTES:
            with _named(hf_config):
                check.copy()  # before minutes of loading
        with _named(hf_config):
            model = _build(config, hf_config, implementation)
    model = model.to(config.device).eval().requires_grad_(requires_grad=False)
    _head_shares(config, model, text)
    with _named(hf_config):
        observed = observe(model, text)
        shape = _shape(config, model, text, observed)
        check.before(model)
        if config.is_compiled and not config.is_eager:
            compile_layers(model, config.device)  # which cannot look into packed weights
        elif config.tp_size == 1:
            fuse(model, observed.called)
        check.after(observed.model, shape)
    return observed.model, shape


@contextmanager
def _named(hf_config: Any) -> Iterator[None]:
    """Have a refusal name the type of the model."""
    try:
        yield
    except KeyError as error:
        if attention.NAME not in str(error):
            raise
        # A model that has classes of its own for each way to attend, and none for ours.
        reason = "its attention does not go through transformers' attention interface"
        raise not_served(hf_config.model_type, reason) from error
    except AttentionNotServed as error:
        raise not_served(hf_config.model_type, error.message) from error


def model_needs(config: EngineConfig) -> ModelNeeds:
    """Return what a model takes, from its configuration alone: no weight is read or made.

    Raises:
        ConfigInvalid: The directory holds no model we can serve; the sentence says why.
    """
    with _readable(config.model_dir) as path:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        text = text_config_of(hf_config)
        unsharded = msgspec.structs.replace(config, load_format="dummy", tp_size=1)
        implementation = attention.register()
        with torch.device("meta"), _named(hf_config):
            model = _build(unsharded, hf_config, implementation)
        shares = _head_shares(config, model, text)
        with _named(hf_config):
            observed = ModelCheck(unsharded, hf_config).copy().cut(shares)
            shape = _shape(config, model, text, observed)
    if getattr(hf_config, "quantization_config", None) is not None:
        sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    else:
        sizes = [each.numel() * each.itemsize for each in model.parameters()]
    return ModelNeeds(shape, sum(sizes))


def _stored_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


@contextmanager
def _readable(model_dir: str) -> Iterator[Path]:
    """Give the directory; what transformers says about it becomes one kind of error."""
    path = Path(model_dir)
    if not (path / "config.json").is_file():
        raise ConfigInvalid(
            f"{path} has no config.json: give a transformers directory or a GGUF file"
        )
    try:
        yield path
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigInvalid(f"cannot load the model in {path}: {error}") from error


def _build(config: EngineConfig, hf_config: object, implementation: str) -> torch.nn.Module:
    dtype = _dtype(config, hf_config)
    sharding = DistributedConfig(tp_size=config.tp_size) if config.tp_size > 1 else None
    if config.load_format == "dummy":
        torch.manual_seed(config.random_seed)
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            hf_config,
            dtype=dtype,
            attn_implementation=implementation,
            trust_remote_code=config.trust_remote_code,
        )
        return model if sharding is None else _sharded(model, sharding)
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        config.model_dir,
        config=hf_config,
        dtype=dtype,
        attn_implementation=implementation,
        trust_remote_code=config.trust_remote_code,
        local_files_only=True,
        distributed_config=sharding,
    )
    return loaded


def compile_layers(model: torch.nn.Module, device: str) -> None:
    """Have torch.compile replace the model's decoder layers, at their first forward.

    They are where the time goes, and all alike: one compilation serves every layer, and, with its sizes
    symbolic, every batch. Attention stays outside; see `attention.register`.

    Raises:
        ConfigInvalid: The machine lacks what torch.compile makes code with.
    """
    compiler = "triton" if device != "cpu" else "a C++ compiler"
    is_there = find_spec("triton") if device != "cpu" else which("g++") or which("clang++")
    if not is_there:
        raise ConfigInvalid(
            f"--enable-torch-compile needs {compiler} on {device}: install one, or leave the flag out"
        )
    get_decoder: Any = getattr(model, "get_decoder", lambda: model)
    layers = getattr(get_decoder(), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ConfigInvalid(
            f"--enable-torch-compile does not know the layers of {type(model).__name__}; leave it out"
        )
    for layer in layers:
        layer.compile(dynamic=True)


def _sharded(model: Any, sharding: DistributedConfig) -> torch.nn.Module:
    """Cut a whole model down to this rank's shard: every rank made the same one from the seed."""
    _, _, meshes = model.prepare_distribute_model(sharding)
    sharded: torch.nn.Module = model.maybe_distribute_model(model, sharding, meshes)
    return sharded


def _dtype(config: EngineConfig, hf_config: object) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)  # type: ignore[no-any-return]
    own = getattr(hf_config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.float32


def _shape(
    config: EngineConfig, model: torch.nn.Module, text: Any, observed: Observed
) -> ModelShape:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, dtype)
    layers = observed.layers
    is_alike = len({*layers}) == 1 and layers[0].key_dim == layers[0].value_dim
    if config.tp_size > 1 and not is_alike:
        raise ConfigInvalid(
            f"--tp {config.tp_size} cannot share the KV of a model whose layers differ, or whose K and V "
            "do: leave --tp out"
        )
    elements = sum(each.num_kv_heads * (each.key_dim + each.value_dim) for each in layers)
    return ModelShape(
        num_layers=len(layers),
        num_kv_heads=layers[0].num_kv_heads if is_alike else 1,
        model_kv_heads=kv_heads(text) if is_alike else 1,
        head_dim=layers[0].key_dim if is_alike else elements,
        vocab_size=text.vocab_size,
        context_length=context_length(config.context_length, text),
        eos_token_ids=eos_token_ids(Path(config.model_dir), text),
        dtype=dtype,
        kv_dtype=kv_dtype,
        fingerprint=_fingerprint(config, text, dtype, kv_dtype),
        layers=() if is_alike else layers,
        sources=observed.sources,
        attention=observed.features,
    )


def _head_shares(config: EngineConfig, model: Any, text: Any) -> int:
    """Return into how many shares ranks cut the KV heads; 1 where each rank has all of them.

    Raises:
        ConfigInvalid: The shares would not be equal.
    """
    if config.tp_size == 1:
        return 1
    num_heads, num_kv_heads = text.num_attention_heads, kv_heads(text)
    is_split = any(
        name.rpartition(".")[2] in _KEY_PROJECTIONS and style == "colwise"
        for name, style in model.tp_plan.items()
    )
    if is_split and (num_kv_heads % config.tp_size or num_heads % config.tp_size):
        raise ConfigInvalid(
            f"--tp {config.tp_size} cannot share {num_heads} attention heads with {num_kv_heads} KV "
            "heads evenly: give a number that divides both"
        )
    return config.tp_size if is_split else 1


def _fingerprint(config: EngineConfig, text_config: object, dtype: str, kv_dtype: str) -> str:
    path = Path(config.model_dir)
    facts = json.loads((path / "config.json").read_text())
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(f"torch.{kv_dtype}".encode())
    if config.load_format == "dummy":
        digest.update(f"dummy {config.random_seed}".encode())
    else:
        # As transformers chooses: others where there are no safetensors.
        for file in sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin")):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            for sample in _samples_of(file):
                digest.update(sample)
    kind = type(text_config).__name__.removesuffix("Config")
    layers = text_config.num_hidden_layers  # type: ignore[attr-defined]
    return f"{kind}-{layers}layers-{dtype}-{digest.hexdigest()[:16]}"


def _samples_of(file: Path) -> Iterator[bytes]:
    """Yield a file's header, which names its tensors and where they are, and both ends of each of them."""
    with file.open("rb") as opened:
        if file.suffix == ".bin":  # an archive: its end has a checksum of each tensor
            opened.seek(max(0, file.stat().st_size - _DIRECTORY_BYTES))
            yield opened.read()
            return
        length = int.from_bytes(opened.read(8), "little")
        # No more than there is: what is no such file may begin with any number.
        header = opened.read(min(length, file.stat().st_size))
        yield header
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        for begin, end in sorted(tensor["data_offsets"] for tensor in tensors.values()):
            size = min(end - begin, _SAMPLE_BYTES)
            for first in (begin, end - size):
                opened.seek(8 + length + first)
                yield opened.read(size)
