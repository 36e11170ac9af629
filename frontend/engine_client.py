"""The client of one engine's inbox, in an edge worker or in a node's own HTTP process.

```
 generate ──▶ TokenStream ──take──▶ ... ──▶ finish │ failure │ closed early (one Cancel)
                  ▲ one message per step, spread in one pass
 engine ═════ EngineClient.run ═════▶ lost: PeerLost in every stream
```

It holds streams of token ids by request and attempt, without text, pairs or replay.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from typing_extensions import override

from tandem.frontend.token_stream import Start, StreamKey, TokenStream
from tandem.telemetry.log import get_logger
from tandem.wire.async_link import AsyncLink
from tandem.wire.channel import DEFAULT_HEARTBEAT, Heartbeat
from tandem.wire.errors import InvalidRequest, PeerLost, TandemError, error_from_info
from tandem.wire.generation import Epoch, RequestId
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import (
    CacheReport,
    Cancel,
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

log = get_logger(__name__)

# Until the first answer, ask often: a node becomes usable as soon as its engine is.
FIRST_PING_INTERVAL_S = 0.05
# Moments in an interval at which clients ping.
BEAT_MOMENTS = 8
# Pings at every beat after the last stream ended.
IDLE_PINGS = 2
# A name may resolve later, and a file descriptor may become free.
REOPEN_INTERVAL_S = 1.0
# `is_alive` polls a silent engine this often.
_LOOK_INTERVAL_S = 0.05


class PrefixFollower(Protocol):
    """Follows an engine's prefix cache, and the tiers behind it."""

    @property
    def position(self) -> int:
        """The last change of the cache that was reported."""

    @property
    def tier_positions(self) -> dict[str, int]:
        """The last change of each tier that was reported."""

    def heard(self, load: NodeLoad) -> None:
        """Note which tiers there are."""

    def take(self, report: CacheReport) -> None:
        """Note what changed since."""


class EngineClient:
    """Sends requests to one life of one engine and spreads its answers over their streams.

    The owner runs `run` in a task group. Other methods may be called while it runs.

    Args:
        address: The engine's inbox, such as `tcp://10.0.0.3:41234` or `ipc:///path`.
        key: The cluster's key, when its links are authenticated.
        epoch: The engine's life. None: the first that answers.
        heartbeat: How often to ping the engine and check the link.
        on_change: Called when `load` or `is_up` has changed.
        prefixes: Gets the engine's cache reports. None: do not ask for them.
        wants_measures: Ask the engine for its counters and timings.

    Attributes:
        load: The engine's last report of its load.
        measured: Its last report of counters and timings, if asked for.
        answered: Set at its first answer.
        lost: Set when the engine was lost or `stop` was called. The client cannot be used again.
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
        self._heard_at = -math.inf
        self._streams: dict[StreamKey, TokenStream] = {}
        self._by_number: dict[int, TokenStream] = {}
        self._numbers = itertools.count(1)
        self._key = key
        self._prefixes = prefixes
        self._link: AsyncLink[FromEngine] | None = None
        self._next_beat: asyncio.TimerHandle | None = None
        self._num_idle_beats = 0
        self._unopened = ""

    @override
    def __repr__(self) -> str:
        state = "lost" if self.lost.is_set() else "up" if self.is_up else "silent"
        return f"<EngineClient {self.address} {state} num_streams={len(self._streams)}>"

    @property
    def is_up(self) -> bool:
        """Whether the engine has answered and was not lost since."""
        return self.answered.is_set() and not self.lost.is_set()

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's last message; infinite before its first."""
        return asyncio.get_running_loop().time() - self._heard_at

    @property
    def num_streams(self) -> int:
        """Attempts that have neither ended nor been closed."""
        return len(self._streams)

    @property
    def refusal(self) -> str:
        """Why the link could not be opened, or the engine's port rejected it; else empty."""
        return self._unopened if self._link is None else self._link.refusal

    async def run(self) -> None:
        """Hold the link until the engine is lost or `stop` is called, then fail the open streams."""
        # The link is opened here: a client whose `run` was never reached leaves no socket behind.
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(self._serve())
                await self.lost.wait()
                serving.cancel()
        finally:
            self._lose("this process is closing the link")
            if self._next_beat is not None:
                self._next_beat.cancel()
            if self._link is not None:
                self._link.close()

    async def _serve(self) -> None:
        self._link = link = await self._open()
        self._beat()
        await link.wait_lost()
        self._lose("its connection broke")

    async def _open(self) -> AsyncLink[FromEngine]:
        while True:
            try:
                return await AsyncLink[FromEngine].open(
                    self.address, FromEngine, self._take, self._key, self._heartbeat
                )
            except PeerLost as error:
                if self._unopened != error.message:
                    log.warning("engine.no_link", address=self.address, reason=error.message)
                self._unopened = error.message
                await asyncio.sleep(REOPEN_INTERVAL_S)

    async def is_alive(self) -> bool:
        """Wait until the engine sends something (True) or its link is lost (False).

        An engine in a long computation sends nothing. It counts as alive once a link that was cut off
        would have been lost.
        """
        loop, beat = asyncio.get_running_loop(), self._heartbeat
        deadline = loop.time() + beat.interval_s + beat.timeout_s
        while not self.lost.is_set():
            if self.silent_s < 2 * beat.interval_s or loop.time() >= deadline:
                return True
            await asyncio.sleep(_LOOK_INTERVAL_S)
        return False

    def stop(self, failure: Callable[[], TandemError] | None = None) -> None:
        """Make `run` return. Each open stream fails with `failure()`, by default with `PeerLost`."""
        self._lose("its link was closed", failure)

    def generate(self, start: Start, wake: asyncio.Event | None = None) -> TokenStream:
        """Start one attempt and return its stream. The caller closes it.

        Raises:
            PeerLost: The engine cannot be reached now; nothing was started.
            MessageTooLarge: The prompt is larger than a message may be.
            InvalidRequest: This request id and attempt are running already.
        """
        if self.lost.is_set():
            raise self._peer_lost("it is gone")
        start = msgspec.structs.replace(start, stream=next(self._numbers))
        stream = TokenStream(start, wake, forget=self._forget, cancel=self.cancel)
        if stream.key in self._streams:
            raise InvalidRequest(f"request id {start.request.request_id!r} is in use")
        self._send(start)
        self._num_idle_beats = 0
        self._streams[stream.key] = self._by_number[stream.number] = stream
        return stream

    def abort(self, request_id: str) -> bool:
        """End every attempt of a request with reason `abort`. False if there is none."""
        streams = [stream for key, stream in self._streams.items() if key[0] == request_id]
        for stream in streams:
            stream.abort()
        return bool(streams)

    def flush_cache(self) -> None:
        """Drop the engine's idle cached pages, before the next request of this client starts.

        Raises:
            PeerLost: The engine cannot be reached now.
        """
        self._send(FlushCache())

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Cancel an attempt at the engine. A lost engine has forgotten it already."""
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
        """Spread messages that arrived together over the streams.

        Most often there is one message, of one step. A process that falls behind finds several, and
        merges the tokens of each stream into one run: the client gets one event of them.
        """
        self._heard_at = asyncio.get_running_loop().time()
        runs: Runs | None = {} if len(messages) > 1 else None
        for message in messages:
            self._epoch = self._epoch or message.epoch
            if message.epoch != self._epoch:
                self._lose("it restarted")
                return
            match message:
                case TokenBatch():
                    self._spread(message, runs)
                case RequestFailed():
                    if stream := self._behind_its_run(message, runs):
                        stream.fail(error_from_info(message.error))
                case Pong():
                    self.load = message.load
                    if self._prefixes is not None:
                        self._prefixes.heard(message.load)
                    self.answered.set()
                    self._on_change()
                case CacheReport():
                    if self._prefixes is not None:
                        self._prefixes.take(message)
                case Measured():
                    self.measured = message
        for stream, (index, token_ids) in (runs or {}).items():
            give(stream, index, token_ids)

    def _spread(self, batch: TokenBatch, runs: "Runs | None") -> None:
        find = self._by_number.get
        for number, index, token_id in zip(
            batch.streams, batch.indexes, batch.token_ids, strict=False
        ):
            if (stream := find(number)) is None:
                continue
            if runs is None:
                give(stream, index, (token_id,))
                continue
            run = runs.get(stream)
            if run is not None and run[0] + len(run[1]) == index:
                run[1].append(token_id)
            else:
                runs[stream] = (index, [token_id])
                if run is not None:
                    give(stream, *run)
        for delta in batch.deltas:
            if found := self._behind_its_run(delta, runs):
                found.put(delta)

    def _behind_its_run(
        self, message: TokenDelta | RequestFailed, runs: "Runs | None"
    ) -> TokenStream | None:
        """Return the stream of a message, once the tokens that waited for it are in it."""
        stream = self._streams.get((message.request_id, message.attempt))
        if stream is not None and runs and (run := runs.pop(stream, None)) is not None:
            give(stream, *run)
        return stream

    def _beat(self) -> None:
        """Ask the engine for its load after each interval; after every other one when there was nothing to do."""
        self._num_idle_beats = 0 if self._streams else self._num_idle_beats + 1
        # The first ones tell the engine that its last answers were read.
        if (
            self._num_idle_beats <= IDLE_PINGS
            or self._num_idle_beats % 2
            or not self.answered.is_set()
        ):
            try:
                self._send(self._question())
            except PeerLost:
                log.debug("engine.unreachable", address=self.address)
        loop, interval_s = asyncio.get_running_loop(), self._heartbeat.interval_s
        if not self.answered.is_set():
            interval_s = min(interval_s, FIRST_PING_INTERVAL_S)
        # A little sooner, at a moment that is the same for all: with hundreds of links the loop and libzmq's I/O
        # thread wake up for many pings at once.
        due = loop.time() + interval_s
        self._next_beat = loop.call_at(due - due % (interval_s / BEAT_MOMENTS), self._beat)

    def _question(self) -> Ping:
        known = self._prefixes
        if known is None:
            return Ping(wants_measures=self._wants_measures)
        return Ping(
            prefix_position=known.position,
            tier_positions=known.tier_positions,
            wants_measures=self._wants_measures,
        )

    def _lose(self, reason: str, failure: Callable[[], TandemError] | None = None) -> None:
        self.lost.set()
        self._on_change()
        for stream in list(self._streams.values()):
            stream.fail(failure() if failure else self._peer_lost(reason))

    def _peer_lost(self, reason: str) -> PeerLost:
        return PeerLost(f"the engine at {self.address} was lost: {reason}")


Runs = dict[TokenStream, tuple[int, list[int]]]
"""Ordinary tokens of several steps: for each stream the index of the first, and the ids."""


def give(stream: TokenStream, index: int, token_ids: Sequence[int]) -> None:
    """Give ordinary tokens to the tap, or queue them if it is closed or rejects them.

    A bug on their way to the client ends their stream alone.
    """
    try:
        if (tap := stream.tap) is None or not tap.take_ordinary_at(index, token_ids):
            stream.put_ordinary(index, token_ids)
    except Exception as error:
        log.exception("stream.failed", request_id=stream.key[0])
        stream.close()  # the engine does not know of the bug
        # Not retried: the client may have some of these tokens already.
        stream.fail(TandemError(f"this server failed with its tokens: {type(error).__name__}"))
