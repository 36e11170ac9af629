"""The LoRA adapters in vLLM's memory.

```
 load ──▶ files are copied in a thread ──▶ vLLM reads them ──▶ loaded ──unload──▶ retired ──last request ended──▶ removed
                                                                 ▲                  │
                                                                 └──────load────────┘
```

An adapter's id has a hash of its files, and vLLM's number of an adapter is never used again. So a name can be loaded
with other content while requests still run with the old one.
"""

import argparse
import hashlib
import itertools
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.v1.engine.core import EngineCore

from tandem.telemetry.log import get_logger
from tandem.wire.errors import (
    AdapterLoaded,
    AdapterNotFound,
    ConfigInvalid,
    InvalidRequest,
    TandemError,
)
from tandem.wire.messages import ChangeAdapter, LoadAdapter, LoadedAdapter

log = get_logger(__name__)

_FLAG = "--lora-modules"
# The files of an adapter that vLLM reads, if they exist.
_FILES = (
    *("adapter_config.json", "adapter_model.safetensors"),
    *("adapter_model.bin", "adapter_model.pt"),
)


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--lora-modules` as `vllm serve` has it."""
    parser.add_argument(_FLAG, nargs="+", default=[])


def names_and_paths(words: Sequence[str], model_names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the path of each adapter.

    Args:
        words: Values of the flag: `name=path`, or a JSON object with `name` and `path`. A path may be a Hub repository.

    Raises:
        ConfigInvalid: A value cannot be read, or a name is used twice.
    """
    names = {*model_names}
    for word in words:
        name, path = _name_and_path(word)
        if name in names:
            raise ConfigInvalid(
                f"{_FLAG}: the name {name!r} is used twice; rename one", topic="docs/vllm.md"
            )
        names.add(name)
        yield name, path


def _name_and_path(word: str) -> tuple[str, str]:
    try:
        name, path = word.split("=", 1) if word[:1] != "{" else _of_json(word)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigInvalid(f"{_FLAG}: {word!r} is not NAME=PATH", topic="docs/vllm.md") from error
    if not (name and path):
        raise ConfigInvalid(f"{_FLAG}: {word!r} is not NAME=PATH", topic="docs/vllm.md")
    return name, path


def _of_json(word: str) -> tuple[str, str]:
    fields = json.loads(word)
    return str(fields["name"]), str(fields["path"])


class _Files(NamedTuple):
    """A private copy of an adapter's files, and their hash."""

    folder: TemporaryDirectory[str]
    digest: str


def _copy_files(load: LoadAdapter) -> _Files:
    """Copy an adapter's files. Raises `AdapterNotFound`.

    vLLM maps the files into memory, where weights change with the files: an overwritten adapter would change the answers
    of running requests, and a truncated one would end the node.
    """
    source = Path(get_adapter_absolute_path(load.path))
    if not (source / _FILES[0]).is_file():
        raise AdapterNotFound(load.name, load.path)
    folder, digest = TemporaryDirectory(prefix="tandem-adapter-"), hashlib.sha256()
    try:
        for name in _FILES:
            if (source / name).is_file():
                copy = shutil.copyfile(source / name, Path(folder.name, name))
                with copy.open("rb") as opened:
                    content = hashlib.file_digest(opened, "sha256").hexdigest()
                digest.update(json.dumps([name, content]).encode())
    except BaseException:
        folder.cleanup()
        raise
    return _Files(folder, digest.hexdigest()[:32])


def add_lora(worker: Any, request: LoRARequest) -> str:
    """Load an adapter in a worker; return why it failed, or an empty string. Runs in the worker.

    If it raised, vLLM would leave the answers of the other workers unread, and take them for those to its next calls.
    """
    try:
        worker.add_lora(request)
    except Exception as error:  # noqa: BLE001 - vLLM's types vary
        return str(error) or type(error).__name__
    return ""


class _Load(NamedTuple):
    message: LoadAdapter
    files: Future[_Files]
    answer: Callable[[str | TandemError], None]


class _Held(NamedTuple):
    """An adapter in memory. `request`: what requests with this adapter carry."""

    loaded: LoadedAdapter
    request: LoRARequest


class Adapters:
    """The adapters of a node. Implements `AdapterStore`.

    Args:
        limit: Adapters that vLLM keeps in memory (`--max-cpu-loras`). Beyond it, vLLM would drop an adapter, and could
            not read it again. 0: LoRA is not enabled.
        used: Returns vLLM's numbers of the adapters that requests need.
    """

    def __init__(self, core: EngineCore, limit: int, used: Callable[[], Set[int]]) -> None:
        self._core, self._limit, self._used = core, limit, used
        self._numbers = itertools.count(1)
        self._loaded: dict[str, _Held] = {}
        self._retired: dict[str, _Held] = {}
        self._loads: deque[_Load] = deque()
        self._reader = ThreadPoolExecutor(1, "adapters")

    def loaded(self) -> list[LoadedAdapter]:
        """Return the adapters that requests may name, in the order of loading."""
        return [held.loaded for held in self._loaded.values()]

    def find(self, adapter: str) -> LoRARequest | None:
        """Return an adapter by its id, also a retired one: its weights are those that the id names."""
        held = self._loaded.get(adapter) or self._retired.get(adapter)
        return None if held is None else held.request

    def load(self, name: str, path: str) -> None:
        """Load an adapter now. Raises a `TandemError`."""
        message = LoadAdapter(name=name, path=path)
        self._finish(message, _copy_files(message))

    def change(self, change: ChangeAdapter, answer: Callable[[str | TandemError], None]) -> None:
        """Load or unload an adapter; see `RequestRunner.change_adapter`."""
        if isinstance(change, LoadAdapter):
            if not self._limit:
                raise InvalidRequest(
                    "the node does not serve adapters: start it with -- --enable-lora"
                )
            self._loads.append(_Load(change, self._reader.submit(_copy_files, change), answer))
            return
        held = self._loaded.pop(change.adapter, None)
        if held is not None:
            self._retired[change.adapter] = held
            log.info("adapter.unloaded", adapter=change.adapter)
        answer(change.adapter)

    def poll(self) -> None:
        """Load the adapters whose files have been copied, and remove retired ones that no request needs."""
        while self._loads and self._loads[0].files.done():
            message, files, answer = self._loads.popleft()
            try:
                result: str | TandemError = self._finish(message, files.result())
            except TandemError as error:
                result = error
            except Exception as error:  # noqa: BLE001 - of the file system or the Hub
                result = InvalidRequest(_failure(message, str(error)))
            answer(result)
        if self._retired:
            used = self._used()
            for adapter, held in list(self._retired.items()):
                if held.request.lora_int_id not in used:
                    del self._retired[adapter]
                    self._core.remove_lora(held.request.lora_int_id)
                    log.info("adapter.removed", adapter=adapter)

    def _finish(self, message: LoadAdapter, files: _Files) -> str:
        """Load an adapter and delete the copy, which stays on the disk while vLLM maps it; return the id."""
        with files.folder:
            return self._load(message, files)

    def _load(self, message: LoadAdapter, files: _Files) -> str:
        name, adapter = message.name, f"{message.name}@{files.digest}"
        if message.digest not in {"", files.digest}:
            raise InvalidRequest(
                f"the files in {message.path} are not those that other nodes have loaded as {name!r}: "
                "copy the files, or load the new ones with load_inplace"
            )
        if adapter in self._loaded:
            return adapter
        has_name = any(held.loaded.name == name for held in self._loaded.values())
        if has_name and not message.in_place:
            raise AdapterLoaded(name)
        # The same number again: vLLM takes two requests for the same adapter if their names are equal.
        held = self._retired.pop(adapter, None)
        request = self._read(message, files, adapter) if held is None else held.request
        self._loaded[adapter] = _Held(LoadedAdapter(id=adapter, path=message.path), request)
        log.info("adapter.loaded", adapter=adapter, path=message.path)
        return adapter

    def _read(self, message: LoadAdapter, files: _Files, adapter: str) -> LoRARequest:
        """Let vLLM read an adapter's files into memory."""
        num_held = len(self._loaded) + len(self._retired)
        if num_held >= self._limit:
            raise InvalidRequest(
                f"the node has {num_held} adapters in memory: unload one, or raise --max-cpu-loras"
            )
        request = LoRARequest(adapter, next(self._numbers), files.folder.name)
        failures = self._core.model_executor.collective_rpc(add_lora, args=(request,))
        if any(failures):
            self._core.remove_lora(request.lora_int_id)  # some workers may have it
            raise InvalidRequest(_failure(message, next(filter(None, failures))))
        return request


def _failure(message: LoadAdapter, reason: str) -> str:
    words = " ".join(reason.split())[:500]
    return f"vLLM cannot load adapter {message.name!r} from {message.path}: {words}"
