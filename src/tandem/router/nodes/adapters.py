"""Loads and unloads LoRA adapters on all nodes. What the nodes report is the only record of what is loaded.

```
 load ──▶ every node reads the files ──▶ all have the same id ──▶ other ids of the name are unloaded
                     └── one cannot, or has another id ──▶ unloaded again where it was new
```
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence

import msgspec

from tandem.telemetry.log import get_logger
from tandem.wire.engine_client import EngineClient
from tandem.wire.errors import (
    AdapterLoaded,
    AdapterNotFound,
    InvalidRequest,
    NoNodeAvailable,
    PeerLost,
    TandemError,
    error_from_info,
)
from tandem.wire.messages import ChangeAdapter, LoadAdapter, LoadedAdapter, UnloadAdapter

log = get_logger(__name__)

# A node may download the files.
TIMEOUT_S = 300.0

_Change = tuple[str, EngineClient, ChangeAdapter]
"""A node's role and URL, its client, and a change."""


class AdapterChanges:
    """Changes the adapters of the nodes, one change after the other.

    Args:
        clients: Returns the clients of the nodes, by role and URL. May raise a `TandemError`.
    """

    def __init__(self, clients: Callable[[], Mapping[str, EngineClient]]) -> None:
        self._clients = clients
        self._lock = asyncio.Lock()
        self._running = set[asyncio.Task[None]]()

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter on every node, also on those that connect meanwhile; see `Backend.load_adapter`."""
        await self._complete(self._load(name, path, in_place=in_place))

    async def unload(self, name: str) -> None:
        """Unload all adapters of a name; see `Backend.unload_adapter`."""
        await self._complete(self._unload(name))

    async def _complete(self, change: Coroutine[object, object, None]) -> None:
        """Run a change to its end even if its client disconnects, which would leave it on some nodes only."""
        task = asyncio.create_task(change)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    def _up(self) -> Mapping[str, EngineClient]:
        return {node: client for node, client in self._clients().items() if client.is_up}

    async def _load(self, name: str, path: str, *, in_place: bool) -> None:
        async with self._lock:
            if not in_place and all(_ids(client, name) for client in self._up().values()):
                raise AdapterLoaded(name)
            load = LoadAdapter(name=name, path=path, in_place=in_place)
            before: dict[EngineClient, set[str]] = {}
            loaded: dict[EngineClient, str] = {}
            try:
                while new := [each for each in self._up().items() if each[1] not in loaded]:
                    before |= {client: _ids(client, name) for _, client in new}
                    await _apply([(node, client, load) for node, client in new], loaded)
                _require_equal(
                    name, path, {node: loaded[each] for node, each in self._up().items()}
                )
            except TandemError:
                await self._take_back(before, loaded)
                raise
            # Not what another router has loaded since: the two would unload each other's.
            replaced = set[str]().union(*before.values()) - set(loaded.values())
            await self._unload_where(lambda each: each.id in replaced)

    async def _take_back(
        self, before: Mapping[EngineClient, set[str]], loaded: Mapping[EngineClient, str]
    ) -> None:
        changes = [
            (client.address, client, UnloadAdapter(adapter=adapter))
            for client, adapter in loaded.items()
            if client.is_up and adapter not in before[client]
        ]
        try:
            await _apply(changes, {})
        except TandemError as error:
            log.warning("adapter.not_unloaded", reason=error.message)

    async def _unload(self, name: str) -> None:
        async with self._lock:
            if not any(_ids(client, name) for client in self._up().values()):
                raise AdapterNotFound(name)
            await self._unload_where(lambda each: each.name == name)

    async def _unload_where(self, is_gone: Callable[[LoadedAdapter], bool]) -> None:
        while changes := [
            (node, client, UnloadAdapter(adapter=each.id))
            for node, client in self._up().items()
            for each in client.load.adapters
            if is_gone(each)
        ]:
            await _apply(changes, {})


def _ids(client: EngineClient, name: str) -> set[str]:
    return {each.id for each in client.load.adapters if each.name == name}


def _require_equal(name: str, path: str, ids: Mapping[str, str]) -> None:
    if len(set(ids.values())) > 1:
        found = ", ".join(f"{node} has {adapter}" for node, adapter in ids.items())
        raise InvalidRequest(
            f"the files of adapter {name!r} in {path} differ: {found}; copy the same files to every node"
        )


async def _apply(changes: Sequence[_Change], done: dict[EngineClient, str]) -> None:
    """Apply changes at once, and wait for all. A node that is lost meanwhile has no adapters.

    Args:
        done: Filled with the adapter's id by node, also if a change fails.

    Raises:
        TandemError: The first failure, with the node's role and URL.
    """
    answers = await asyncio.gather(*(_answer(*each) for each in changes), return_exceptions=True)
    for (_, client, _), answer in zip(changes, answers, strict=True):
        if isinstance(answer, str):
            done[client] = answer
    for (_, client, _), answer in zip(changes, answers, strict=True):
        is_lost = isinstance(answer, PeerLost) and client.lost.is_set()
        if isinstance(answer, BaseException) and not is_lost:
            raise answer


async def _answer(node: str, client: EngineClient, change: ChangeAdapter) -> str:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await client.change_adapter(change)
    except TimeoutError as error:
        raise NoNodeAvailable(f"{node}: no answer in {TIMEOUT_S:g} s") from error
    except TandemError as error:
        info = error.info()
        raise error_from_info(
            msgspec.structs.replace(info, message=f"{node}: {info.message}")
        ) from error


async def load_missing(node: str, client: EngineClient, others: Sequence[EngineClient]) -> None:
    """Load the adapters on a node that all the others have, and that it lacks.

    Raises:
        TandemError: An adapter could not be loaded; all others are.
    """
    first, *rest = others
    changes = [
        LoadAdapter(name=each.name, path=each.path, digest=each.digest, in_place=True)
        for each in first.load.adapters
        if all(other.load.has_adapter(each.id) for other in rest)
        if not client.load.has_adapter(each.id)
    ]
    await _apply([(node, client, each) for each in changes], {})
