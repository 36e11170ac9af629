"""`POST /update_weights_from_disk`: which checkpoint may replace the one that a node serves.

The supervisor drains the node, ends its engine and starts another one with the config that `updated` returns. So no
page, prefix or CUDA graph of the old weights outlives them, all ranks change together, and the new engine has another
fingerprint: peers and tiers refuse KV of the old weights.

Everything that the headers of the files show is checked here, before anything changes.
"""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from tandem.engine.config import EngineConfig
from tandem.engine.weight_files import read_object, some, tensor_shapes
from tandem.frontend.body import Body, worded
from tandem.frontend.tokenizer import tokenizer_files, tokenizer_hash
from tandem.node.checkpoint import check_directory, sampling_defaults
from tandem.node.config import MAX_DRAIN_S, NodeConfig
from tandem.wire.errors import ConfigInvalid, EngineFailed, InvalidRequest, TandemError

# Numbers and names in config.json that do not change the model.
_HARMLESS = {"_name_or_path", "transformers_version", "use_cache", "attn_implementation"}


class UpdateBody(Body):
    """`POST /update_weights_from_disk`. `timeout_s` is ours: the time for running requests to finish.

    Fields of SGLang that are not named here do not change the result.
    """

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_format: Literal["auto", "safetensors"] = "auto"
    abort_all_requests: bool = False
    weight_version: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    timeout_s: Annotated[float, Field(ge=0, le=MAX_DRAIN_S)] | None = None
    is_async: Annotated[
        Literal[False], worded("must be false: the answer comes when the new weights serve")
    ] = False
    keep_pause: Annotated[
        Literal[False], worded("must be false: POST /drain once the new weights serve")
    ] = False
    flush_cache: Annotated[
        Literal[True], worded("must be true: the cached KV is that of the old weights")
    ] = True


class Update:
    """An update in progress.

    Attributes:
        error: Why the engine with the new weights did not start; then the old ones are loaded again.
        outcome: Done when the node serves again or ends.
    """

    def __init__(self, old: NodeConfig, new: NodeConfig) -> None:
        self.old, self.new = old, new
        self.error: TandemError | None = None
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: TandemError | None) -> None:
        """Answer the operator: with `error`, or with what the start of the new engine came to."""
        if error is None and self.error is not None:
            kind = InvalidRequest if isinstance(self.error, ConfigInvalid) else EngineFailed
            error = kind(f"{self.error.message}; the node goes on with the old weights")
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


def updated(config: NodeConfig, body: UpdateBody) -> NodeConfig:
    """Return the config with which a node serves the checkpoint in `body`.

    Raises:
        InvalidRequest: The checkpoint is not one of the same model; the message says what to do.
    """
    if config.engine.simulation is not None:
        raise InvalidRequest("model_path: a simulated engine has no weights to update")
    # Resolved: a link such as `latest` moves on, and the present directory is read again at the next update.
    path = Path(body.model_path).expanduser().resolve()
    engine = msgspec.structs.replace(config.engine, model_dir=str(path), load_format="auto")
    try:
        check_directory(path, engine)
        _check_same_model(config.engine, path)
        sampling = config.default_sampling
        if config.generation_config == "auto":
            sampling = sampling_defaults(path)
    except (ConfigInvalid, OSError) as error:
        raise InvalidRequest(
            f"model_path: {error}; the node goes on with the old weights"
        ) from error
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
            f"the present weights' directory {old_path} is gone, and the new ones are compared with it: keep it "
            "until the next update, or restart the node"
        )
    facts = read_object(path / "config.json")
    _check_config(current, read_object(old_path / "config.json"), facts)
    if tokenizer_hash(tokenizer_files(path)) != tokenizer_hash(tokenizer_files(old_path)):
        raise ConfigInvalid(
            f"{path} has another tokenizer than {old_path}: copy the files of the tokenizer from there"
        )
    if current.load_format == "auto":
        old, new = tensor_shapes(old_path), tensor_shapes(path)
        if facts.get("tie_word_embeddings") is not False:
            # Where the head is tied to the embeddings, some trainers write it and some do not.
            for shapes in (old, new):
                shapes.pop("lm_head.weight", None)
        _check_tensors(old, new)


def _check_config(current: EngineConfig, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Reject a config.json that contradicts the old one. Releases of transformers write different sets of keys."""
    before, after = dict(_scalars(old)), dict(_scalars(new))
    if current.dtype != "auto":
        before = {name: value for name, value in before.items() if not name.endswith("dtype")}
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            raise ConfigInvalid(
                f"its config.json has {name} {after[name]}, and the model that the node serves has {before[name]}"
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
        raise ConfigInvalid(f"its files lack tensors of the model: {some(missing)}")
    if added := sorted(new.keys() - old.keys()):
        raise ConfigInvalid(f"its files have tensors that the model has not: {some(added)}")
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            raise ConfigInvalid(
                f"{name} is {list(new[name])} in its files, and {list(old[name])} in the model that the node serves"
            )
