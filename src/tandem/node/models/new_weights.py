"""`POST /update_weights_from_disk`: checks whether a checkpoint can replace the one that a node serves.

The supervisor drains the node, stops its engine and starts a new one with the config of `config_with_weights`. So no
page, prefix or CUDA graph of the old weights survives, all ranks change together, and the new engine has a new
fingerprint: peers and tiers reject KV of the old weights.

Everything that can be checked from the file headers is checked here, before the drain.
"""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.engine.config import EngineConfig
from tandem.engine.weight_files import read_object, some, tensor_shapes
from tandem.frontend.chat.body import Body
from tandem.frontend.text.tokenizer_files import tokenizer_files
from tandem.node.config import MAX_DRAIN_S, NodeConfig
from tandem.node.models.checkpoint import check_directory, sampling_defaults
from tandem.wire.errors import ConfigInvalid, EngineFailed, InvalidRequest, TandemError

# Keys in config.json that do not change the model.
_HARMLESS = {"_name_or_path", "transformers_version", "use_cache", "attn_implementation"}


class UpdateBody(Body):
    """`POST /update_weights_from_disk`. `timeout_s` is our addition: the time for running requests to finish.

    SGLang's other fields are accepted and have no effect.
    """

    model_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_format: Literal["auto", "safetensors"] = "auto"
    abort_all_requests: bool = False
    weight_version: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    timeout_s: Annotated[float, Meta(ge=0, le=MAX_DRAIN_S)] | None = None
    is_async: bool = False
    keep_pause: bool = False
    flush_cache: bool = True

    def __post_init__(self) -> None:
        """Reject SGLang's values that are not supported."""
        if self.is_async:
            raise ValueError(
                "is_async: must be false, because the answer is sent once the new weights serve"
            )
        if self.keep_pause:
            raise ValueError(
                "keep_pause: must be false; to pause, POST /drain once the new weights serve"
            )
        if not self.flush_cache:
            raise ValueError(
                "flush_cache: must be true, because the cached KV belongs to the old weights"
            )


class Update:
    """An update in progress.

    Attributes:
        error: Why the engine did not start with the new weights; the old ones are then loaded again.
        outcome: Set when the node serves again or ends.
    """

    def __init__(self, old: NodeConfig, new: NodeConfig) -> None:
        self.old, self.new = old, new
        self.error: TandemError | None = None
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: TandemError | None) -> None:
        """Set the outcome: `error`, the error of the new engine, or success."""
        if error is None and self.error is not None:
            kind = InvalidRequest if isinstance(self.error, ConfigInvalid) else EngineFailed
            error = kind(f"{self.error.message}; the node keeps the old weights")
        if error is None:
            self.outcome.set_result(None)
        else:
            self.outcome.set_exception(error)


def update_answer(config: NodeConfig) -> dict[str, object]:
    """Return the answer to an update, in SGLang's form."""
    return {
        "success": True,
        "message": f"serving the weights in {config.engine.model_dir}",
        "num_paused_requests": 0,
        "weight_version": config.weight_version,
    }


def config_with_weights(config: NodeConfig, body: UpdateBody) -> NodeConfig:
    """Return the node's config with the checkpoint in `body`.

    Raises:
        InvalidRequest: The checkpoint does not belong to the same model; the message says what to do.
    """
    if config.engine.simulation is not None:
        raise InvalidRequest("model_path: a simulated engine has no weights to update")
    # Resolve symbolic links: one such as `latest` may move before the next update compares with this directory.
    path = Path(body.model_path).expanduser().resolve()
    engine = msgspec.structs.replace(config.engine, model_dir=str(path), load_format="auto")
    try:
        check_directory(path, engine)
        _check_same_model(config.engine, path)
        sampling = config.default_sampling
        if config.generation_config == "auto":
            sampling = sampling_defaults(path)
    except (ConfigInvalid, OSError) as error:
        raise InvalidRequest(f"model_path: {error}; the node keeps the old weights") from error
    return msgspec.structs.replace(
        config,
        engine=engine,
        default_sampling=sampling,
        weight_version=body.weight_version or path.name,
    )


def _check_same_model(current: EngineConfig, path: Path) -> None:
    old_path = Path(current.model_dir)
    if not (old_path / "config.json").is_file():
        raise ConfigInvalid(
            f"the directory of the current weights, {old_path}, is gone, so the new weights cannot be compared with it; "
            "restore it, or restart the node"
        )
    facts = read_object(path / "config.json")
    _check_config(current, read_object(old_path / "config.json"), facts)
    old_files, files = (
        tokenizer_files(each, trusts_code=current.trust_remote_code) for each in (old_path, path)
    )
    if files != old_files:
        raise ConfigInvalid(
            f"{path} has a different tokenizer than {old_path}; copy the tokenizer files from there"
        )
    if current.load_format == "auto":
        old, new = tensor_shapes(old_path), tensor_shapes(path)
        if facts.get("tie_word_embeddings") is not False:
            # If the head is tied to the embeddings, only some trainers write it.
            for shapes in (old, new):
                shapes.pop("lm_head.weight", None)
        _check_tensors(old, new)


def _check_config(current: EngineConfig, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Reject a config.json that contradicts the old one. Only common keys count: releases of transformers differ."""
    before, after = dict(_scalars(old)), dict(_scalars(new))
    if current.dtype != "auto":
        before = {name: value for name, value in before.items() if not name.endswith("dtype")}
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            raise ConfigInvalid(
                f"{name} in config.json is {after[name]}, but {before[name]} in the model that the node serves"
            )


def _scalars(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | int]]:
    for key, value in facts.items():
        name = prefix + ("dtype" if key == "torch_dtype" else key)
        if isinstance(value, dict):
            yield from _scalars(value, f"{name}.")
        elif isinstance(value, str | int) and not (
            key in _HARMLESS or key.endswith("_token_id") or key.startswith("_")
        ):
            yield name, value


def _check_tensors(old: Mapping[str, tuple[int, ...]], new: Mapping[str, tuple[int, ...]]) -> None:
    if missing := sorted(old.keys() - new.keys()):
        raise ConfigInvalid(f"missing tensors: {some(missing)}")
    if added := sorted(new.keys() - old.keys()):
        raise ConfigInvalid(f"unexpected tensors: {some(added)}")
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            raise ConfigInvalid(
                f"tensor {name} has shape {list(new[name])}, but {list(old[name])} in the model that the node serves"
            )
