"""The worker side of the connector: an agent of kvtransfer in each rank of vLLM, without vLLM.

A step goes: `follow` the orders, `wrote` for each layer while the forward runs, `saved` after it, then `results`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

import torch
from typing_extensions import override

from tandem.kvtransfer.bootstrap import SenderEnd
from tandem.kvtransfer.checksum import Verify
from tandem.kvtransfer.events import Failed, Granted, Landed, Lost, PushDone
from tandem.kvtransfer.push_room import PageRun, Wrote
from tandem.kvtransfer.receiver import DecodeAgent, ReceiverTimeouts
from tandem.kvtransfer.sender import PrefillAgent, SenderTimeouts
from tandem.kvtransfer.sharding import Shard
from tandem.kvtransfer.transports.base import Transport, TransportConfig
from tandem.kvtransfer.transports.registry import names_of, transports
from tandem.vllm.caches import Blocks, Caches
from tandem.vllm.halves import First, Grant, Orders, Reports
from tandem.wire.channel import Waker, tcp_address, wait
from tandem.wire.errors import Aborted, ErrorInfo, TransferRefused
from tandem.wire.generation import Room, new_epoch
from tandem.wire.keys import cluster_key


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffConfig:
    """What `kv_connector_extra_config` may hold.

    Attributes:
        role: The half of this node.
        fingerprint: Equal at both ends exactly when their KV is interchangeable.
        adapters: A name of what the LoRA adapters contain, which becomes part of the fingerprint.
        bootstrap_port: Of a prefill's first rank; the ranks after it, stage by stage, have the ports after it.
        push_granularity: When prefill pushes: with each layer, or after each forward.
    """

    role: Literal["prefill", "decode"]
    fingerprint: str
    adapters: str = ""
    host: str = "127.0.0.1"
    bootstrap_port: int = 8998
    transfer_backend: str = "auto"
    transfer_interface: str = ""
    transfer_directory: str = ""
    push_granularity: Literal["layer", "chunk"] = "layer"
    verify_kv: Verify = "sample"
    grant_timeout_s: float = 300.0
    landed_timeout_s: float = 600.0
    is_insecure: bool = False


@dataclass(frozen=True, slots=True)
class Rank:
    """The place of a worker in its node. It is linked to the workers of the same stage of the other half.

    Attributes:
        number, count: In its stage, whose ranks share the heads.
        stage: Of the pipeline; each has layers of its own.
    """

    number: int
    count: int
    stage: int = 0

    @property
    def first_port(self) -> int:
        """Number of ports that the stages before have."""
        return self.stage * self.count

    @property
    def shard(self) -> Shard:
        """The part of each block that the worker holds."""
        return Shard(self.number, self.count, self.count)


@dataclass(slots=True)
class Results:
    """The requests whose transfers ended since the last step; a failed one is among the received as well."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerHalf(ABC):
    """One rank's agent, as the connector uses it. Only the worker's thread calls it.

    Attributes:
        waker: Rung whenever `results` has something.
    """

    def __init__(self) -> None:
        self.waker = Waker()
        self._reports = Reports()

    @abstractmethod
    def follow(self, orders: Orders) -> None:
        """Begin a step."""

    def wrote(self, layer_name: str) -> None:  # noqa: B027 - decode writes nothing
        """Take note that the forward has written a layer of the step's pages."""

    def saved(self) -> None:  # noqa: B027 - decode writes nothing
        """Take note that the forward has written all layers."""

    @abstractmethod
    def results(self, finished: set[str], *, wait_s: float = 0.0) -> Results:
        """Return what ended.

        Args:
            finished: Requests that ended at the scheduler since the last call.
            wait_s: How long to wait for news, where there is nothing else to do.
        """

    def take_reports(self) -> Reports | None:
        """Return what the scheduler side has to hear, if anything."""
        reports, self._reports = self._reports, Reports()
        return reports or None

    @abstractmethod
    def close(self) -> None:
        """Close all links."""

    def _wait(self, wait_s: float) -> None:
        if wait_s:
            wait([], wait_s, self.waker)


class PrefillWorker(WorkerHalf):
    """Pushes the blocks of prompts.

    Attributes:
        agent: The rank's agent.
    """

    def __init__(self, config: HandOffConfig, caches: Caches, rank: Rank) -> None:
        super().__init__()
        self._caches = caches
        layers = config.push_granularity == "layer" and caches.region.device == "cpu"
        self._pushes_layers = layers and bool(caches.indexes)
        first = config.bootstrap_port and config.bootstrap_port + rank.first_port
        others = tuple(range(first + 1, first + rank.count))
        self.agent = PrefillAgent(
            tcp_address(config.host, first and first + rank.number),
            SenderEnd(
                new_epoch(),
                config.fingerprint,
                caches.layout,
                caches.region,
                _transports(config, caches),
                rank_ports=others if rank.number == 0 else (),
                shard=rank.shard,
            ),
            waker=self.waker,
            key=cluster_key(config.host, is_insecure=config.is_insecure),
            timeouts=SenderTimeouts(grant_s=config.grant_timeout_s),
            verify=config.verify_kv,
        )
        self._ids: dict[Room, str] = {}  # of rooms that are not over
        self._rooms: dict[str, Room] = {}
        self._finished: set[str] = set()  # at the scheduler, while the room is not over
        self._over: set[str] = set()  # the room, while the request is not finished
        self._orders = Orders()
        self._wrote: Wrote = _ignore
        self._num_written = 0

    @override
    def follow(self, orders: Orders) -> None:
        self._orders = orders
        for request_id, room in orders.expected:
            if room in self._ids:
                self._reports.failed[request_id] = _room_in_use(room)
                self._over.add(request_id)
                continue
            self._ids[room], self._rooms[request_id] = request_id, room
            self.agent.expect(room)
        for each in orders.last_pushes:
            self.agent.push(each.room, each.page_ids, each.first_page)
        for room, first in orders.computed:
            self.agent.finish(room, first.token, 0, first.num_cached, prompt=first.prompt)
        for request_id in orders.given_up:
            if request_id in self._rooms:
                self.agent.abort(self._rooms[request_id], Aborted("prefill gave it up"))
        self._num_written = 0
        if self._pushes_layers and orders.pushes:
            runs = [PageRun(each.room, each.page_ids, each.first_page) for each in orders.pushes]
            self._wrote = self.agent.push_by_layer(runs)

    @override
    def wrote(self, layer_name: str) -> None:
        # A model that computes layers in another order than they lie in pushes all of them at the end.
        if self._orders.pushes and self._caches.indexes.get(layer_name) == self._num_written:
            self._wrote(self._num_written)
            self._num_written += 1

    @override
    def saved(self) -> None:
        pushes, self._orders, self._wrote = self._orders.pushes, Orders(), _ignore
        if pushes and self._caches.region.device != "cpu":
            torch.cuda.current_stream().synchronize()
        for each in pushes:
            self.agent.push(each.room, each.page_ids, each.first_page)

    @override
    def results(self, finished: set[str], *, wait_s: float = 0.0) -> Results:
        self._finished |= finished & self._rooms.keys()
        sent = self._over & finished
        self._over -= sent
        if not sent:
            self._wait(wait_s)
        for event in self.agent.events():
            if (request_id := self._ids.get(event.room)) is None:
                continue
            if isinstance(event, Granted):
                self._reports.granted[request_id] += 1
                continue
            del self._ids[event.room], self._rooms[request_id]
            if isinstance(event, PushDone):
                self._reports.handed_off[request_id] += 1
                self._reports.moved_bytes += event.pushed_bytes
            elif event.error is not None:
                self._reports.failed[request_id] = event.error.info()
            if request_id in self._finished:
                self._finished.remove(request_id)
                sent.add(request_id)
            else:
                self._over.add(request_id)
        return Results(sent=sent)

    @override
    def close(self) -> None:
        self.agent.close()
        self._caches.region.close()


class DecodeWorker(WorkerHalf):
    """Receives the blocks of prompts.

    Attributes:
        agent: The rank's agent.
    """

    def __init__(self, config: HandOffConfig, caches: Caches, rank: Rank) -> None:
        super().__init__()
        self._region = caches.region
        self.agent = DecodeAgent(
            epoch=new_epoch(),
            fingerprint=config.fingerprint,
            layout=caches.layout,
            region=caches.region,
            transports=_transports(config, caches),
            waker=self.waker,
            key=cluster_key(config.host, is_insecure=config.is_insecure),
            timeouts=ReceiverTimeouts(landed_s=config.landed_timeout_s),
            verify=config.verify_kv,
            shard=rank.shard,
        )
        self._first_port = rank.first_port
        self._page_bytes, self._page_size = caches.layout.page_bytes, caches.layout.page_size
        self._grants: dict[Room, Grant] = {}  # of rooms that are not over
        self._rooms: dict[str, Room] = {}
        self._refused: set[str] = set()

    @override
    def follow(self, orders: Orders) -> None:
        for each in orders.grants:
            if each.room in self._grants:
                # What landed would land in the blocks of the other request.
                self._refuse(each)
                continue
            self._grants[each.room] = each
            if each.request_id:
                self._rooms[each.request_id] = each.room
            held = each.num_held * self._page_size
            port = each.port + self._first_port
            self.agent.request(each.room, each.host, port, each.page_ids, held)
        for request_id in orders.given_up:
            if (room := self._rooms.get(request_id)) is not None:
                self.agent.withdraw(room)

    def _refuse(self, grant: Grant) -> None:
        if grant.request_id:
            self._reports.failed[grant.request_id] = _room_in_use(grant.room)
            self._refused.add(grant.request_id)

    @override
    def results(self, finished: set[str], *, wait_s: float = 0.0) -> Results:
        refused, self._refused = self._refused, set()
        if not refused:
            self._wait(wait_s)
        results = Results(received=set(refused), failed=refused)
        for event in self.agent.events():
            if (grant := self._grants.get(event.room)) is None:
                continue
            if not (request_id := grant.request_id):
                if not isinstance(event, Lost):
                    del self._grants[event.room]
                continue
            if isinstance(event, Lost | Failed):
                self._reports.failed[request_id] = event.error.info()
            if isinstance(event, Lost):
                continue  # a write may still arrive: vLLM keeps the blocks until `Safe`
            del self._rooms[request_id], self._grants[event.room]
            results.received.add(request_id)
            if isinstance(event, Landed) and event.prompt in (grant.prompt, 0):
                self._reports.landed[request_id] = First(event.first_token, event.cached_tokens)
                self._reports.moved_bytes += len(grant.page_ids) * self._page_bytes
            else:
                if isinstance(event, Landed):
                    error = TransferRefused(f"room {event.room} brought another prompt")
                    self._reports.failed[request_id] = error.info()
                results.failed.add(request_id)
        return results

    @override
    def close(self) -> None:
        self.agent.close()
        self._region.close()


def make_worker(
    config: HandOffConfig, memory: torch.Tensor, blocks: Blocks, rank: Rank
) -> WorkerHalf:
    """Return the agent of one rank around vLLM's blocks, which lie in the storage of `memory`.

    Raises:
        ConfigInvalid: The blocks, the port or the transport cannot be used; the message says what to do.
    """
    names = names_of(config.transfer_backend, memory.device.type)
    is_shared = config.role == "decode" and "shm" in names
    caches = Caches(memory, blocks, is_shared=is_shared)
    make = PrefillWorker if config.role == "prefill" else DecodeWorker
    return make(config, caches, rank)


def _transports(config: HandOffConfig, caches: Caches) -> list[Transport]:
    told = TransportConfig(
        host=config.host,
        interface=config.transfer_interface,
        directory=config.transfer_directory,
    )
    return transports(config.transfer_backend, told, caches.region.device)


def _room_in_use(room: Room) -> ErrorInfo:
    return TransferRefused(f"room {room} is in use: each request needs one of its own").info()


def _ignore(_layer: int) -> None:
    """No layers are pushed one by one."""
