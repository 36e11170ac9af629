"""Follows the prefix cache of a stock engine by the KV events that it publishes.

```
 engine ── PUB ─────▶ KvEventSubscriber ── batches ──▶ CacheFollower ──▶ journal, in the names of routers
        ◀─ ROUTER ──▶
```

Batches are numbered from 0. PUB drops batches for a slow subscriber, and the engine keeps its latest batches for
replay. Every replay begins with the last applied batch: if the engine returns different bytes for it, or nothing, the
engine has restarted. If batches cannot be replayed, the set starts again empty.

Events are maps, or arrays in older versions, which omit defaults at the end. Unknown fields and events are ignored.
Clients must not set vLLM's `kv_cache_report_mode` to `full`: it reports blocks again, as if copies of them were added.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import xxhash
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from tandem.telemetry.log import get_logger
from tandem.wire.channel import DEFAULT_HEARTBEAT, configure, tcp_address
from tandem.wire.errors import PeerLost
from tandem.wire.events.cached import CachedBlocks
from tandem.wire.hosts import resolve
from tandem.wire.prefixes import PrefixJournal

log = get_logger(__name__)

# SGLang publishes its load on the same socket, with its own numbers.
LOAD_TOPIC = b"load"
# Number of the message that ends a replay.
END_NUMBER = (-1).to_bytes(8, "big", signed=True)
NUMBER_BYTES = 8
# The last batch before a pause may be lost, which no later one reveals.
IDLE_S = 2.0
# vLLM polls for replay requests every 0.1 s.
REPLAY_TIMEOUT_S = 5.0
RECONNECT_S = 0.5
# Limit of one replay in memory; the rest is requested again, at most this many times.
MAX_REPLAY_BYTES = 64 << 20
MAX_REPLAYS = 16

BlockHash = int | bytes
# Number and payload.
Batch = tuple[int, bytes]


class Stored(msgspec.Struct):
    """`BlockStored` of both engines: the fields that are used, and those before them in the order of arrays."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    cache_salt: str | None = None


class Removed(msgspec.Struct):
    """`BlockRemoved`."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(msgspec.Struct):
    """`AllBlocksCleared`."""


_EVENTS: dict[str, type[Stored | Removed | Cleared]] = {
    "BlockStored": Stored,
    "BlockRemoved": Removed,
    "AllBlocksCleared": Cleared,
}
_MALFORMED = (
    msgspec.MsgspecError,
    RecursionError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
)


class CacheFollower:
    """The prefixes that one rank of an engine has cached. No I/O.

    Attributes:
        data_parallel_rank: Rank of the engine, by its last batch; None: not reported.
        num_malformed: Messages so far that were not in the format.
    """

    def __init__(self) -> None:
        self.data_parallel_rank: int | None = None
        self.num_malformed = 0
        self._cached = CachedBlocks()
        self._next, self._last_digest = 0, 0
        self._last_published = -1

    @property
    def journal(self) -> PrefixJournal:
        """Changes of the cached prefixes, for routers."""
        return self._cached.journal

    @property
    def replay_from(self) -> int:
        """Number of the batch with which the next replay must begin."""
        return max(self._next - 1, 0)

    def take(self, number: int, payload: bytes) -> bool:
        """Apply a published batch; return False if batches before it may be missing."""
        is_later = number > self._last_published
        self._last_published = number
        if not is_later or number > self._next:
            return False
        if number == self._next:
            self._apply(number, payload)
        return True

    def take_replay(self, batches: Sequence[Batch]) -> bool:
        """Apply consecutive batches from `replay_from` on; return False if a replay is needed again."""
        if self._next and not self._continues(batches):
            self.restart()
            if not batches or batches[0][0]:
                return (
                    False  # the engine has batches from 0 on, or its oldest are not in this replay
                )
        for number, payload in batches:
            if not self._next:
                self._next = number  # the oldest that the engine has kept
            if number > self._next:
                return False
            if number == self._next:
                self._apply(number, payload)
        return True

    def restart(self, number: int = 0) -> None:
        """Start again with an empty set at this batch."""
        self._cached.on_cleared()
        self._next, self._last_digest = number, 0
        self._last_published = -1

    def skip_malformed(self, reason: object) -> None:
        """Count a message that is not in the format, and log the first one."""
        self.num_malformed += 1
        if self.num_malformed == 1:
            log.warning(
                "kv_events.malformed", reason=str(reason), effect="cached prefixes are forgotten"
            )

    def _continues(self, batches: Sequence[Batch]) -> bool:
        """Return whether a replay begins with the last applied batch, that is, whether the engine has not restarted."""
        if not batches:
            return False
        number, payload = batches[0]
        return number == self._next - 1 and _digest(payload) == self._last_digest

    def _apply(self, number: int, payload: bytes) -> None:
        self._next, self._last_digest = number + 1, _digest(payload)
        try:
            batch = msgspec.msgpack.decode(payload, type=list[Any])
            self.data_parallel_rank = msgspec.convert(
                batch[2] if len(batch) > 2 else None, int | None
            )
            for event in _events(batch[1]):
                self._apply_event(event)
        except _MALFORMED as error:
            self.skip_malformed(error)
            self._cached.on_cleared()  # a removal may be lost

    def _apply_event(self, event: Stored | Removed | Cleared) -> None:
        if isinstance(event, Cleared):
            self._cached.on_cleared()
        elif event.medium not in (None, "GPU") or event.locality == "REMOTE" or event.ownership:
            return  # a tier behind the cache
        elif isinstance(event, Removed):
            self._cached.on_removed(event.block_hashes, event.group_idx)
        elif _has_name(event):
            self._cached.on_stored(event)


def _digest(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def _events(events: list[Any]) -> Iterator[Stored | Removed | Cleared]:
    """Yield the known events of a batch.

    Raises:
        MsgspecError, LookupError, TypeError, ValueError: An event is not in the format.
    """
    for event in events:
        if isinstance(event, dict):
            kind, fields = _EVENTS.get(event["type"]), event
        else:
            kind = _EVENTS.get(event[0])
            names = () if kind is None else kind.__struct_fields__
            fields = dict(zip(names, event[1:], strict=False))
        if kind is not None:
            yield msgspec.convert(fields, kind)


def _has_name(event: Stored) -> bool:
    """Return whether the blocks can be named, with SGLang's salt in vLLM's place."""
    if event.lora_id is not None and event.lora_name is None:
        return False  # older versions number adapters
    if not all(isinstance(token, int) for token in event.token_ids[:1]):
        return False  # SGLang publishes pairs of tokens for some draft models
    if event.cache_salt and event.parent_block_hash is None:
        adapter = [] if event.lora_name is None else [event.lora_name]
        event.extra_keys = [[*adapter, event.cache_salt]]
    return True


class KvEventSubscriber:
    """Keeps a `CacheFollower` up to date over ZMQ.

    Args:
        endpoint: Where the rank publishes, such as `tcp://10.0.0.7:5557`.
        replay_endpoint: Where it replays; empty: nowhere.
        topic: Topic of the batches; empty: any.
        idle_s: Seconds without a batch after which the engine is asked for newer ones.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str = "", topic: str = "", idle_s: float = IDLE_S
    ) -> None:
        self.follower, self._idle_s = CacheFollower(), idle_s
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self._topic, self._reason = topic.encode(), ""

    async def run(self) -> None:
        """Follow the engine until cancelled. While it is unreachable, try to connect."""
        while True:
            try:
                # Each connection has its own socket, so that a restarted engine's batches follow no older ones.
                address = await _address(self._endpoint)
                with open_socket(zmq.SUB) as sub:
                    events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
                    with sub.get_monitor_socket(events) as monitor:
                        sub.setsockopt(zmq.SUBSCRIBE, self._topic)
                        sub.connect(address)
                        try:
                            await self._follow(sub, monitor)
                        finally:
                            # Before the monitor closes: libzmq's thread would block when it reports to nobody.
                            sub.disable_monitor()
            except (PeerLost, zmq.ZMQError) as error:
                if str(error) != self._reason:
                    self._reason = str(error)
                    log.warning(
                        "kv_events.not_connected", endpoint=self._endpoint, reason=self._reason
                    )
            except Exception:  # without this, routers would use the set as it is now for ever
                log.exception("kv_events.failed", endpoint=self._endpoint)
                self.follower.restart()
            await asyncio.sleep(RECONNECT_S)

    async def _follow(self, sub: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        """Take batches until the connection is lost."""
        poller = zmq.asyncio.Poller()
        poller.register(sub, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        is_connected = False
        while True:
            ready = dict(await poller.poll(int(self._idle_s * 1000)))
            if monitor in ready:
                event = await recv_monitor_message(monitor)
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    return
                is_connected = True
                if not await self._replay():
                    self.follower.restart()  # it may have restarted
            elif sub in ready:
                await self._take(await sub.recv_multipart())
            elif is_connected:
                await self._replay()

    async def _take(self, frames: list[bytes]) -> None:
        if frames[0] == LOAD_TOPIC:
            return
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            self.follower.skip_malformed(f"a message with {len(frames)} frames")
            return
        number = int.from_bytes(frames[1], "big", signed=True)
        if number < 0:
            self.follower.skip_malformed(f"batch {number}")
        # A replay contains this batch, unless an engine published it that has restarted since.
        elif not self.follower.take(number, frames[2]) and not await self._replay():
            self.follower.restart(number)
            self.follower.take(number, frames[2])

    async def _replay(self) -> bool:
        """Bring the follower up to date; return whether the engine replayed all that it has kept."""
        for _ in range(MAX_REPLAYS):
            batches, is_whole = await self._request_replay(self.follower.replay_from)
            if not batches and not is_whole:
                return False
            if self.follower.take_replay(batches) and is_whole:
                return True
        return False

    async def _request_replay(self, first: int) -> tuple[list[Batch], bool]:
        """Return the replayed batches from this number on, and whether these are all."""
        batches: list[Batch] = []
        if not self._replay_endpoint:
            return batches, False
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                # Each replay has its own socket, so that it gets no answers to an earlier one.
                address = await _address(self._replay_endpoint)
                with open_socket(zmq.DEALER) as dealer:
                    dealer.connect(address)
                    await dealer.send_multipart([b"", first.to_bytes(NUMBER_BYTES, "big")])
                    num_bytes = 0
                    while num_bytes < MAX_REPLAY_BYTES:
                        # Some versions put the topic before the number.
                        *_, number, payload = await dealer.recv_multipart()
                        if number == END_NUMBER:
                            return batches, True
                        batches.append((int.from_bytes(number, "big"), payload))
                        num_bytes += len(payload)
        except (TimeoutError, PeerLost, zmq.ZMQError):
            pass  # the caller continues with what has arrived
        except ValueError as error:
            self.follower.skip_malformed(error)
        return batches, False


def open_socket(kind: int) -> zmq.asyncio.Socket:
    """Return a socket that receives messages of several frames, for which `wire.channel` has no link."""
    context = zmq.asyncio.Context.shadow(zmq.Context.instance())
    sock = context.socket(kind)
    configure(sock, None, DEFAULT_HEARTBEAT, is_server=False)
    # With IMMEDIATE, libzmq discards its queue when the connection is lost. If a part of a message was read by then, it
    # aborts this process.
    sock.setsockopt(zmq.IMMEDIATE, 0)
    return sock


async def _address(endpoint: str) -> str:
    """Return an endpoint with its host name resolved, which libzmq would do in the thread that serves all sockets."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return tcp_address(await asyncio.to_thread(resolve, host), port)
