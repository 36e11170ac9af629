"""The worker side of the connector: one kvtransfer agent per vLLM rank. Imports no vLLM.

A step calls `follow`, then `on_layer_written` for each layer during the forward, `on_forward_finished`, and `results`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec
import torch
from typing_extensions import override

from tandem.kvtransfer.agents.receiver import DecodeAgent
from tandem.kvtransfer.agents.sender import PrefillAgent
from tandem.kvtransfer.agents.sender_links import SenderEnd
from tandem.kvtransfer.agents.sender_rooms import OnLayerWritten, PageRun
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.events import PushDone, RoomFailed, RoomGranted, RoomLanded, RoomLost
from tandem.kvtransfer.sharding import Shard
from tandem.kvtransfer.transports.base import Transport
from tandem.kvtransfer.transports.registry import names_of, transports
from tandem.vllm.caches import Caches, Heads, RankBlocks
from tandem.vllm.device_queue import DeviceQueue
from tandem.vllm.hand_offs import BlockGrant, FirstToken, Pages, WorkerOrders, WorkerReports
from tandem.wire.channel import Heartbeat, Waker, heartbeat_of, tcp_address, wait
from tandem.wire.errors import Aborted, ConfigInvalid, ErrorInfo, TransferRefused
from tandem.wire.generation import Room, new_epoch
from tandem.wire.hand_off import RankAddress
from tandem.wire.keys import cluster_key


class HandOffConfig(TransferConfig, frozen=True, kw_only=True):
    """The role and the fields of `kv_connector_extra_config`: the options of the transfer, and what only vLLM sets.

    Attributes:
        role: Role of this node.
        fingerprint: Hash of everything the KV depends on; must match the peer's.
        adapters: Digest of the LoRA adapters; part of the fingerprint.
        host: Address to listen on.
        heartbeat_interval_ms: Interval of heartbeats on the links between prefill and decode.
        bootstrap_port: Port of prefill's first rank; the other ranks use the ports after it: the ranks of one stage,
            then those of the next.
        query_port: Port on which prefill answers `GET /query`; 0: none.
    """

    role: Literal["prefill", "decode"]
    fingerprint: str
    adapters: str = ""
    host: str = "127.0.0.1"
    is_insecure: bool = False
    heartbeat_interval_ms: float = 500.0
    query_port: int = 0

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat of the worker's links."""
        return heartbeat_of(self.heartbeat_interval_ms)


def read_hand_off_config(
    extra: Mapping[str, object], *, role: Literal["prefill", "decode"], fingerprint: str
) -> HandOffConfig:
    """Read `kv_connector_extra_config`.

    Args:
        extra: The config.
        role: Role of this node.
        fingerprint: Fingerprint of the node, unless `extra` sets one.

    Raises:
        ConfigInvalid: A setting is unknown, of the wrong type or out of range.
    """
    settings = {"fingerprint": fingerprint, **extra, "role": role}
    known = {each.encode_name for each in msgspec.structs.fields(HandOffConfig)}
    if unknown := sorted(settings.keys() - known):
        raise ConfigInvalid(f"kv_connector_extra_config: unknown: {', '.join(unknown)}; remove it")
    try:
        config = msgspec.convert(settings, HandOffConfig)
    except msgspec.ValidationError as error:
        raise ConfigInvalid(f"kv_connector_extra_config: {error}") from error
    heartbeat_of(config.heartbeat_interval_ms)
    if config.query_port and not config.bootstrap_port:
        raise ConfigInvalid("kv_connector_extra_config: query_port needs a bootstrap_port")
    return config


@dataclass(frozen=True, slots=True)
class Rank:
    """Position of a worker in its node. It connects to the peer's workers of the same stage.

    Attributes:
        number, count: Index and number of ranks in its stage, which divide the heads.
        stage, num_stages: Index and number of pipeline stages, which divide the layers.
        hosts: IP address of the host of each rank, stage by stage; empty: all are on this host.
    """

    number: int
    count: int
    stage: int = 0
    num_stages: int = 1
    hosts: Sequence[str] = ()

    @property
    def index(self) -> int:
        """Index among all ranks of the node."""
        return self.stage * self.count + self.number

    def on_host(self) -> tuple[int, int]:
        """Return its number among the ranks of its stage on its host, and their count."""
        stage = range(self.stage * self.count, (self.stage + 1) * self.count)
        own = [
            each for each in stage if not self.hosts or self.hosts[each] == self.hosts[self.index]
        ]
        return own.index(self.index), len(own)

    def addresses(self, first_port: int) -> Sequence[RankAddress]:
        """Return the addresses of all ranks, of which only the first is known to peers. Empty if there is only one."""
        size = self.count * self.num_stages
        hosts = self.hosts or [""] * size
        others = ["" if host == hosts[0] else host for host in hosts]
        ranks = [RankAddress(first_port + each, host) for each, host in enumerate(others)]
        return ranks if size > 1 else ()

    def shard(self, heads: Heads) -> Shard:
        """Return the part of each block that the worker holds."""
        return Shard(self.number, self.count, heads.num_all)


@dataclass(slots=True)
class Results:
    """The requests whose transfers ended since the last step. A failed receive is also in `received`."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerHalf(ABC):
    """One rank's agent, as the connector uses it. Only the worker's thread calls it.

    Attributes:
        caches: The rank's blocks.
        waker: Set when `results` has something to return.
    """

    def __init__(self, caches: Caches) -> None:
        self.caches = caches
        self.waker = Waker()
        self._reports = WorkerReports()

    @abstractmethod
    def follow(self, orders: WorkerOrders) -> None:
        """Start a step: carry out the scheduler's orders."""

    def on_layer_written(self, layer_name: str) -> None:  # noqa: B027 - decode writes nothing
        """Note that the forward has written a layer of the step's pages."""

    def on_forward_finished(self) -> None:  # noqa: B027 - decode writes nothing
        """Note that the forward has written all layers."""

    @abstractmethod
    def results(self, finished: set[str], *, wait_s: float = 0.0) -> Results:
        """Return the transfers that ended since the last call.

        Args:
            finished: Requests that the scheduler has finished since the last call.
            wait_s: Maximum time to wait for an event, in seconds.
        """

    def take_reports(self) -> WorkerReports | None:
        """Return the reports for the scheduler side; None if there are none."""
        reports, self._reports = self._reports, WorkerReports()
        return reports or None

    @abstractmethod
    def close(self) -> None:
        """Close all links."""

    def _wait(self, wait_s: float) -> None:
        if wait_s:
            wait([], wait_s, self.waker)


class PrefillWorker(WorkerHalf):
    """The prefill worker: pushes the blocks of prompts.

    Args:
        queue: Runs what must wait for a forward on a device; None: the forwards run on the CPU.

    Attributes:
        agent: The rank's agent.
    """

    def __init__(
        self, config: HandOffConfig, caches: Caches, rank: Rank, queue: DeviceQueue | None = None
    ) -> None:
        super().__init__(caches)
        self._pushes_layers = config.push_granularity == "layer" and bool(caches.indexes)
        self._queue = queue
        first = config.bootstrap_port
        self.agent = PrefillAgent(
            tcp_address(config.host, first and first + rank.index),
            SenderEnd(
                new_epoch(),
                config.fingerprint,
                caches.layout,
                caches.region,
                _transports(config, caches, rank),
                ranks=() if rank.index else rank.addresses(first),
                shard=rank.shard(caches.heads),
                stage=rank.stage,
                obstacle=caches.heads.obstacle,
            ),
            waker=self.waker,
            key=cluster_key(config.host, is_insecure=config.is_insecure),
            timeouts=config.of_sender(config.heartbeat),
            verify=config.verify,
        )
        self._ids: dict[Room, str] = {}  # of open rooms
        self._rooms: dict[str, Room] = {}
        self._finished: set[str] = set()  # finished by the scheduler; the room is still open
        self._ended: set[str] = (
            set()
        )  # the room has ended; the scheduler has not finished the request
        self._orders = WorkerOrders()
        self._on_layer_written: OnLayerWritten = _ignore
        self._num_written = 0

    @override
    def follow(self, orders: WorkerOrders) -> None:
        self._orders = orders
        for request_id, room in orders.expected:
            if room in self._ids:
                self._reports.failed[request_id] = _room_in_use(room)
                self._ended.add(request_id)
                continue
            self._ids[room], self._rooms[request_id] = request_id, room
            self.agent.expect(room)
        if orders.recalled or orders.last_pushes or orders.computed:
            self._when_computed(partial(self._end_prompts, orders))
        for request_id in orders.cancelled:
            if request_id in self._rooms:
                self.agent.abort(self._rooms[request_id], Aborted("prefill cancelled the request"))
        self._num_written = 0
        if self._pushes_layers and orders.pushes:
            runs = [PageRun(each.room, each.page_ids, each.first_page) for each in orders.pushes]
            self._on_layer_written = self.agent.push_by_layer(runs)

    def _when_computed(self, call: Callable[[], None]) -> None:
        """Run a call once everything that has been queued on the device is done, in the order of these calls."""
        if self._queue is None:
            call()
        else:
            self._queue.add(call)

    def _end_prompts(self, orders: WorkerOrders) -> None:
        for room in orders.recalled:
            self.agent.recall(room)
        self._push(orders.last_pushes)
        for room, first in orders.computed.values():
            self.agent.finish(
                room,
                first.token,
                0,
                first.num_cached,
                logprobs=first.logprobs,
                prompt=first.prompt,
            )

    def _push(self, pushes: Sequence[Pages]) -> None:
        for each in pushes:
            self.agent.push(each.room, each.page_ids, each.first_page)

    @override
    def on_layer_written(self, layer_name: str) -> None:
        # Layers that are computed out of memory order are pushed after the forward.
        if self._orders.pushes and self.caches.indexes.get(layer_name) == self._num_written:
            self._when_computed(partial(self._on_layer_written, self._num_written))
            self._num_written += 1

    @override
    def on_forward_finished(self) -> None:
        pushes, self._orders, self._on_layer_written = self._orders.pushes, WorkerOrders(), _ignore
        if pushes:
            self._when_computed(partial(self._push, pushes))

    @override
    def results(self, finished: set[str], *, wait_s: float = 0.0) -> Results:
        self._finished |= finished & self._rooms.keys()
        sent = self._ended & finished
        self._ended -= sent
        if not sent:
            self._wait(wait_s)
        for event in self.agent.events():
            if (request_id := self._ids.get(event.room)) is None:
                continue
            if isinstance(event, RoomGranted):
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
                self._ended.add(request_id)
        return Results(sent=sent)

    @override
    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
        self.agent.close()
        self.caches.region.close()


class DecodeWorker(WorkerHalf):
    """The decode worker: receives the blocks of prompts.

    Attributes:
        agent: The rank's agent.
    """

    def __init__(self, config: HandOffConfig, caches: Caches, rank: Rank) -> None:
        super().__init__(caches)
        self.agent = DecodeAgent(
            epoch=new_epoch(),
            fingerprint=config.fingerprint,
            layout=caches.layout,
            region=caches.region,
            transports=_transports(config, caches, rank),
            waker=self.waker,
            key=cluster_key(config.host, is_insecure=config.is_insecure),
            timeouts=config.of_receiver(config.heartbeat),
            verify=config.verify,
            shard=rank.shard(caches.heads),
            stage=rank.stage,
        )
        self._page_bytes, self._page_size = caches.layout.page_bytes, caches.layout.page_size
        self._grants: dict[Room, BlockGrant] = {}  # of open rooms
        self._rooms: dict[str, Room] = {}
        self._refused: set[str] = set()

    @override
    def follow(self, orders: WorkerOrders) -> None:
        for each in orders.grants:
            if each.room in self._grants:
                # A second grant would send this prompt's data to the blocks of the first request.
                self._refuse(each)
                continue
            self._grants[each.room] = each
            if each.request_id:
                self._rooms[each.request_id] = each.room
            held = each.num_held * self._page_size
            self.agent.request(each.room, each.host, each.port, each.page_ids, held)
        for request_id in orders.cancelled:
            if (room := self._rooms.get(request_id)) is not None:
                self.agent.withdraw(room)

    def _refuse(self, grant: BlockGrant) -> None:
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
                if not isinstance(event, RoomLost):
                    del self._grants[event.room]
                continue
            if isinstance(event, RoomLost | RoomFailed):
                self._reports.failed[request_id] = event.error.info()
            if isinstance(event, RoomLost):
                continue  # a write may still arrive: vLLM keeps the blocks until `RoomSafe`
            del self._rooms[request_id], self._grants[event.room]
            results.received.add(request_id)
            if isinstance(event, RoomLanded) and event.prompt in (grant.prompt, 0):
                self._reports.landed[request_id] = FirstToken(
                    event.first_token, event.cached_tokens, logprobs=event.first_logprobs
                )
                self._reports.moved_bytes += len(grant.page_ids) * self._page_bytes
            else:
                if isinstance(event, RoomLanded):
                    error = TransferRefused(
                        f"room {event.room} received the KV of a different prompt"
                    )
                    self._reports.failed[request_id] = error.info()
                results.failed.add(request_id)
        return results

    @override
    def close(self) -> None:
        self.agent.close()
        self.caches.region.close()


def make_worker(
    config: HandOffConfig, memory: torch.Tensor, blocks: RankBlocks, rank: Rank
) -> WorkerHalf:
    """Make the worker of one rank, for vLLM's blocks in the storage of `memory`.

    Raises:
        ConfigInvalid: The block layout, port or transport is not usable; the message says what to do.
    """
    # Reject unsupported transports before the worker opens sockets.
    names_of(config.backend, memory.device.type, is_own_pool=False)
    caches = Caches(memory, blocks)
    if config.role == "decode":
        return DecodeWorker(config, caches, rank)
    return PrefillWorker(
        config, caches, rank, None if caches.region.device == "cpu" else DeviceQueue()
    )


def _transports(config: HandOffConfig, caches: Caches, rank: Rank) -> list[Transport]:
    number, count = rank.on_host()
    settings = config.of_transports(config.host, number, count, rank.stage)
    return transports(config.backend, settings, caches.region.device, is_own_pool=False)


def _room_in_use(room: Room) -> ErrorInfo:
    return TransferRefused(
        f"room {room} is in use; use a unique bootstrap_room for each request"
    ).info()


def _ignore(_layer: int) -> None:
    """Do nothing: layers are not pushed one by one."""
