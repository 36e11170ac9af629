"""The client of one engine, in an edge worker or in a node's own HTTP process.

```
 generate ──▶ TokenStream ──take──▶ ... ──▶ finish │ failure │ closed early (one Cancel)
                  ▲ one message per step, distributed in one pass
 engine ═════ EngineClient.run ═════▶ lost: PeerLost in every stream
```

It holds streams of token ids by request and attempt. Text, pairing and replay are the callers' part.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from typing_extensions import override

from tandem.telemetry.log import get_logger
from tandem.wire.async_link import AsyncLink
from tandem.wire.channel import DEFAULT_HEARTBEAT, Heartbeat
from tandem.wire.errors import InvalidRequest, PeerLost, TandemError, error_from_info
from tandem.wire.generation import Epoch, RequestId
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import (
    AdapterChanged,
    CacheReport,
    Cancel,
    ChangeAdapter,
    FlushCache,
    FromEngine,
    Measured,
    NodeLoad,
    Ping,
    Pong,
    RequestFailed,
    ToEngine,
    TokenBatch,
    TokenDelta,
)
from tandem.wire.token_stream import Start, StreamKey, TokenStream

log = get_logger(__name__)

# Until the first answer, ping often: a node becomes usable as soon as its engine is.
FIRST_PING_INTERVAL_S = 0.05
# Slots per interval in which all clients of a process send their pings.
PING_SLOTS = 8
# Number of pings at the full rate after the last stream has ended.
IDLE_PINGS = 2
# Interval of attempts to open the link: a name may resolve later, and a file descriptor may become free.
REOPEN_INTERVAL_S = 1.0
# Interval of the checks of `is_alive`.
_POLL_INTERVAL_S = 0.05


class PrefixFollower(Protocol):
    """Mirrors an engine's prefix cache and the tiers behind it."""

    @property
    def position(self) -> int:
        """Last reported change of the cache."""

    @property
    def tier_positions(self) -> dict[str, int]:
        """Last reported change of each tier."""

    def set_tiers(self, load: NodeLoad) -> None:
        """Record which tiers exist."""

    def take(self, report: CacheReport) -> None:
        """Apply a report of changes."""


class EngineClient:
    """Sends requests to one life of one engine and distributes its answers to their streams.

    The owner runs `run` in a task group. Other methods may be called while it runs.

    Args:
        address: ZMQ address of the engine, such as `tcp://10.0.0.3:41234` or `ipc:///path`.
        key: Key of the cluster; None: links are not authenticated.
        epoch: Epoch that the engine must have; None: that of its first message.
        heartbeat: Intervals of pings and of link checks.
        on_change: Called when `load` or `is_up` has changed.
        prefixes: Receiver of the engine's cache reports; None: request no reports.
        wants_measures: Whether to request the engine's counters and timings.

    Attributes:
        load: Last reported load.
        measured: Last reported counters and timings, if requested.
        answered: Set at the first `Pong`.
        lost: Set when the engine is lost or `stop` was called. The client cannot be used again.
    """

    def __init__(
        self,
        address: str,
        key: ChannelKey | None = None,
        epoch: Epoch | None = None,
        heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
        on_change: Callable[[], None] = lambda: None,
        *,
        prefixes: PrefixFollower | None = None,
        wants_measures: bool = False,
    ) -> None:
        self.address = address
        self.load = NodeLoad()
        self.measured: Measured | None = None
        self._wants_measures = wants_measures
        self.answered = asyncio.Event()
        self.lost = asyncio.Event()
        self._epoch, self._heartbeat = epoch, heartbeat
        self._on_change = on_change
        self._received_at_s = -math.inf
        self._streams: dict[StreamKey, TokenStream] = {}
        self._by_number: dict[int, TokenStream] = {}
        self._numbers = itertools.count(1)
        self._changes: dict[int, asyncio.Future[AdapterChanged]] = {}
        self._key = key
        self._prefixes = prefixes
        self._link: AsyncLink[FromEngine] | None = None
        self._next_ping: asyncio.TimerHandle | None = None
        self._num_idle_intervals = 0
        self._open_failure = ""

    @override
    def __repr__(self) -> str:
        state = "lost" if self.lost.is_set() else "up" if self.is_up else "silent"
        return f"<EngineClient {self.address} {state} num_streams={len(self._streams)}>"

    @property
    def is_up(self) -> bool:
        """Whether the engine has answered and is not lost."""
        return self.answered.is_set() and not self.lost.is_set()

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's last message; infinite before its first."""
        return asyncio.get_running_loop().time() - self._received_at_s

    @property
    def num_streams(self) -> int:
        """Number of open attempts."""
        return len(self._streams)

    @property
    def refusal(self) -> str:
        """Why the link could not be opened or failed its handshake; else empty."""
        return self._open_failure if self._link is None else self._link.refusal

    async def run(self) -> None:
        """Open the link and keep it until the engine is lost or `stop` is called; then fail the open streams."""
        # The link is opened here so that a client that never ran leaves no socket behind.
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(self._serve())
                await self.lost.wait()
                serving.cancel()
        finally:
            self._lose("this process is closing the link")
            if self._next_ping is not None:
                self._next_ping.cancel()
            if self._link is not None:
                self._link.close()

    async def _serve(self) -> None:
        self._link = link = await self._open()
        self._ping()
        await link.wait_lost()
        self._lose("its connection broke")

    async def _open(self) -> AsyncLink[FromEngine]:
        while True:
            try:
                return await AsyncLink[FromEngine].open(
                    self.address, FromEngine, self._take, self._key, self._heartbeat
                )
            except PeerLost as error:
                if self._open_failure != error.message:
                    log.warning("engine.no_link", address=self.address, reason=error.message)
                self._open_failure = error.message
                await asyncio.sleep(REOPEN_INTERVAL_S)

    async def is_alive(self) -> bool:
        """Wait until the engine sends something (True) or its link is lost (False).

        An engine in a long computation sends nothing. It counts as alive after the time in which a broken link
        would have been detected.
        """
        loop, heartbeat = asyncio.get_running_loop(), self._heartbeat
        deadline = loop.time() + heartbeat.interval_s + heartbeat.timeout_s
        while not self.lost.is_set():
            if self.silent_s < 2 * heartbeat.interval_s or loop.time() >= deadline:
                return True
            await asyncio.sleep(_POLL_INTERVAL_S)
        return False

    def stop(self, failure: Callable[[], TandemError] | None = None) -> None:
        """Make `run` return and fail each open stream with `failure()`, by default with `PeerLost`."""
        self._lose("its link was closed", failure)

    def generate(self, start: Start, on_change: Callable[[], None]) -> TokenStream:
        """Start one attempt and return its stream. The caller closes it.

        Args:
            on_change: Called when the stream has a new delta or failure. Must not raise.

        Raises:
            PeerLost: The engine is not connected; nothing was started.
            MessageTooLarge: The prompt exceeds the size limit of a message.
            InvalidRequest: This attempt of this request id is already running.
        """
        if self.lost.is_set():
            raise self._peer_lost("its link is closed")
        start = msgspec.structs.replace(start, stream=next(self._numbers))
        stream = TokenStream(start, on_change, forget=self._forget, cancel=self.cancel)
        if stream.key in self._streams:
            raise InvalidRequest(f"request id {start.request.request_id!r} is in use")
        self._send(start)
        self._num_idle_intervals = 0
        self._streams[stream.key] = self._by_number[stream.number] = stream
        return stream

    def abort(self, request_id: str) -> bool:
        """Cancel all attempts of a request; their streams finish with reason `abort`. False: it has none."""
        streams = [stream for key, stream in self._streams.items() if key[0] == request_id]
        for stream in streams:
            stream.abort()
        return bool(streams)

    def flush_cache(self) -> None:
        """Evict the engine's cached pages that no request uses, before this client's next request starts.

        Raises:
            PeerLost: The engine is not connected.
        """
        self._send(FlushCache())

    async def change_adapter(self, change: ChangeAdapter) -> str:
        """Load or unload an adapter; return its id. `load` shows the change then.

        Raises:
            PeerLost: The engine is not connected, or was lost.
            TandemError: The engine rejects the change.
        """
        if self.lost.is_set():
            raise self._peer_lost("its link is closed")
        number = next(self._numbers)
        self._send(msgspec.structs.replace(change, number=number))
        answer: asyncio.Future[AdapterChanged] = asyncio.get_running_loop().create_future()
        self._changes[number] = answer
        try:
            changed = await answer
        finally:
            del self._changes[number]
        if changed.error is not None:
            raise error_from_info(changed.error)
        return changed.adapter

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Cancel an attempt on the engine. If the engine is lost, nothing is left to cancel."""
        try:
            self._send(Cancel(request_id=request_id, attempt=attempt))
        except PeerLost as error:
            log.debug("engine.cancel_unsent", address=self.address, reason=error.message)

    def _forget(self, stream: TokenStream) -> None:
        if self._streams.get(stream.key) is stream:
            del self._streams[stream.key], self._by_number[stream.number]

    def _send(self, message: ToEngine) -> None:
        if self._link is None:
            raise PeerLost(f"the engine at {self.address} is not connected yet")
        self._link.send(message)

    def _take(self, messages: Sequence[FromEngine]) -> None:
        """Distribute messages that arrived together to their streams.

        Usually this is one message, of one step. A process that has fallen behind receives several and
        merges each stream's tokens into one run, which becomes one event for the client.
        """
        self._received_at_s = asyncio.get_running_loop().time()
        runs: StreamRuns | None = {} if len(messages) > 1 else None
        for message in messages:
            self._epoch = self._epoch or message.epoch
            if message.epoch != self._epoch:
                self._lose("it restarted")
                return
            match message:
                case TokenBatch():
                    self._distribute(message, runs)
                case RequestFailed():
                    if stream := self._flushed_stream(message, runs):
                        stream.fail(error_from_info(message.error))
                case Pong():
                    self.load = message.load
                    if self._prefixes is not None:
                        self._prefixes.set_tiers(message.load)
                    self.answered.set()
                    self._on_change()
                case CacheReport():
                    if self._prefixes is not None:
                        self._prefixes.take(message)
                case Measured():
                    self.measured = message
                case AdapterChanged():
                    self._end_change(message)
        for stream, (index, token_ids) in (runs or {}).items():
            deliver(stream, index, token_ids)

    def _end_change(self, changed: AdapterChanged) -> None:
        answer = self._changes.get(changed.number)
        if answer is not None and not answer.done():
            answer.set_result(changed)

    def _distribute(self, batch: TokenBatch, runs: "StreamRuns | None") -> None:
        find = self._by_number.get
        for number, index, token_id in zip(
            batch.streams, batch.indexes, batch.token_ids, strict=False
        ):
            if (stream := find(number)) is None:
                continue
            if runs is None:
                deliver(stream, index, (token_id,))
                continue
            run = runs.get(stream)
            if run is not None and run[0] + len(run[1]) == index:
                run[1].append(token_id)
            else:
                runs[stream] = (index, [token_id])
                if run is not None:
                    deliver(stream, *run)
        for delta in batch.deltas:
            if found := self._flushed_stream(delta, runs):
                found.put(delta)

    def _flushed_stream(
        self, message: TokenDelta | RequestFailed, runs: "StreamRuns | None"
    ) -> TokenStream | None:
        """Deliver the run of a message's stream, if any, and return the stream."""
        stream = self._streams.get((message.request_id, message.attempt))
        if stream is not None and runs and (run := runs.pop(stream, None)) is not None:
            deliver(stream, *run)
        return stream

    def _ping(self) -> None:
        """Ping the engine and schedule the next ping. An idle client skips every second interval."""
        self._num_idle_intervals = 0 if self._streams else self._num_idle_intervals + 1
        # The first idle pings show the engine that its last answers were read.
        if (
            self._num_idle_intervals <= IDLE_PINGS
            or self._num_idle_intervals % 2
            or not self.answered.is_set()
        ):
            try:
                self._send(self._new_ping())
            except PeerLost:
                log.debug("engine.unreachable", address=self.address)
        loop, interval_s = asyncio.get_running_loop(), self._heartbeat.interval_s
        if not self.answered.is_set():
            interval_s = min(interval_s, FIRST_PING_INTERVAL_S)
        # Round down to a slot that all clients share: with hundreds of links the loop and libzmq's I/O thread then
        # wake up once for many pings.
        due = loop.time() + interval_s
        self._next_ping = loop.call_at(due - due % (interval_s / PING_SLOTS), self._ping)

    def _new_ping(self) -> Ping:
        prefixes = self._prefixes
        if prefixes is None:
            return Ping(wants_measures=self._wants_measures)
        return Ping(
            prefix_position=prefixes.position,
            tier_positions=prefixes.tier_positions,
            wants_measures=self._wants_measures,
        )

    def _lose(self, reason: str, failure: Callable[[], TandemError] | None = None) -> None:
        self.lost.set()
        self._on_change()
        for stream in list(self._streams.values()):
            stream.fail(failure() if failure else self._peer_lost(reason))
        for answer in self._changes.values():
            if not answer.done():
                answer.set_exception(self._peer_lost(reason))

    def _peer_lost(self, reason: str) -> PeerLost:
        return PeerLost(f"the engine at {self.address} was lost: {reason}")


StreamRuns = dict[TokenStream, tuple[int, list[int]]]
"""Ordinary tokens of several steps: per stream, the index of the first token and the ids."""


def deliver(stream: TokenStream, index: int, token_ids: Sequence[int]) -> None:
    """Pass ordinary tokens to `stream.direct`, or queue them if it is None or rejects them.

    An exception of `stream.direct` ends only this stream.
    """
    try:
        if (direct := stream.direct) is None or not direct.take_ordinary_at(index, token_ids):
            stream.put_ordinary(index, token_ids)
    except Exception as error:
        log.exception("stream.failed", request_id=stream.key[0])
        stream.close()  # the engine is still generating
        # Not retryable: the client may already have some of these tokens.
        stream.fail(TandemError(f"the server failed to process the tokens: {type(error).__name__}"))
