"""One engine's inbox as an asyncio process sees it: an edge worker, or a node's own HTTP.

```
 generate ──▶ TokenStream ──take──▶ ... ──▶ finish │ failure │ closed early (one Cancel)
                  ▲ one message per step, spread in one pass
 engine ═════ EngineClient.run ═════▶ lost: PeerLost in every stream
```

Holds streams of token ids by request and attempt. Knows nothing of text, of pairs or of replay.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
from typing_extensions import override

from tandem.frontend.token_runs import Run, Runs
from tandem.frontend.token_stream import Start, StreamKey, TokenStream
from tandem.telemetry.log import get_logger
from tandem.wire.async_link import AsyncLink
from tandem.wire.errors import InvalidRequest, PeerLost, TandemError, error_from_info
from tandem.wire.heartbeat import DEFAULT_HEARTBEAT, Heartbeat
from tandem.wire.ids import Epoch, RequestId
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
)

log = get_logger(__name__)

# Until the first answer, ask often: a node becomes usable as soon as its engine is.
FIRST_PING_INTERVAL_S = 0.05
# A name that is not resolved, or a descriptor that is not free, may be later.
REOPEN_INTERVAL_S = 1.0
# Whoever waits for a silent engine looks this often whether it spoke.
_LOOK_INTERVAL_S = 0.05


class PrefixFollower(Protocol):
    """Who wants to know what an engine has in its prefix cache, and in the tiers behind it."""

    @property
    def position(self) -> int:
        """Up to where it knows the cache."""
        ...

    @property
    def tier_positions(self) -> dict[str, int]:
        """Up to where it knows each tier that the engine told of."""
        ...

    def heard(self, load: NodeLoad) -> None:
        """Take note of which tiers there are."""
        ...

    def take(self, report: CacheReport) -> None:
        """Take note of what changed since."""
        ...


class EngineClient:
    """Sends requests to one life of one engine and spreads what it answers.

    Its owner runs `run` in a task group; everything else may be called while that runs.

    Args:
        address: Of the engine's inbox, such as `tcp://10.0.0.3:41234` or `ipc:///path`.
        key: The cluster's, when its links are authenticated.
        epoch: The life that is meant; None takes the first that answers.
        heartbeat: How often the engine hears of us, and the link is looked at.
        on_change: Called when `load` or `is_up` has changed.
        prefixes: Told what the engine has cached; None does not ask.
        wants_measures: Have the engine tell what it counts for operators.

    Attributes:
        load: What the engine last said of itself.
        measured: What it counted and timed, where that is wanted and once it has said so.
        answered: Set at its first answer.
        lost: Set when it was lost or `stop` was called; the client is of no use any more.
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
        """Seconds since the engine last spoke; infinitely many before it has."""
        return asyncio.get_running_loop().time() - self._heard_at

    @property
    def num_streams(self) -> int:
        """Attempts that have neither ended nor been closed."""
        return len(self._streams)

    @property
    def refusal(self) -> str:
        """Why there is no link, or the engine's port would not have us; empty where it did, or was not reached."""
        return self._unopened if self._link is None else self._link.refusal

    async def run(self) -> None:
        """Hold the link until the engine is lost or `stop` is called, then fail what is open."""
        # Opened here, so that a client whose `run` was never reached leaves no socket behind.
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(self._serve())
                await self.lost.wait()
                serving.cancel()
        finally:
            self._lose("this process is closing the link")
            if self._link is not None:
                self._link.close()

    async def _serve(self) -> None:
        self._link = link = await self._open()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive(link))
            tasks.create_task(self._ping())
            tasks.create_task(self._watch(link))

    async def _open(self) -> AsyncLink[FromEngine]:
        while True:
            try:
                return await AsyncLink[FromEngine].open(
                    self.address, FromEngine, self._key, self._heartbeat
                )
            except PeerLost as error:
                if self._unopened != error.message:
                    log.warning("engine.no_link", address=self.address, reason=error.message)
                self._unopened = error.message
                await asyncio.sleep(REOPEN_INTERVAL_S)

    async def is_alive(self) -> bool:
        """Tell whether the engine lives, where it was silent lately: when it speaks, or its link is lost.

        One that computes for long says nothing meanwhile. It has the benefit of the doubt once a link that
        was cut off would have been lost.
        """
        loop, beat = asyncio.get_running_loop(), self._heartbeat
        deadline = loop.time() + beat.interval_s + beat.timeout_s
        while not self.lost.is_set():
            now = loop.time()
            if now - self._heard_at < 2 * beat.interval_s or now >= deadline:
                return True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_INTERVAL_S):
                    await self.lost.wait()
        return False

    def stop(self, failure: Callable[[], TandemError] | None = None) -> None:
        """Make `run` return. Each open stream ends with a `failure`, or else with `PeerLost`."""
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
        stream = TokenStream(self, start, wake)
        if stream.key in self._streams:
            raise InvalidRequest(f"request id {start.request.request_id!r} is in use")
        self._send(start)
        self._streams[stream.key] = self._by_number[stream.number] = stream
        return stream

    def abort(self, request_id: str) -> bool:
        """End every attempt of a request with reason `abort`. False if there is none."""
        streams = [stream for key, stream in self._streams.items() if key[0] == request_id]
        for stream in streams:
            stream.abort()
        return bool(streams)

    def flush_cache(self) -> None:
        """Drop the engine's idle cached pages, before whatever is started next from here.

        Raises:
            PeerLost: The engine cannot be reached now.
        """
        self._send(FlushCache())

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Tell the engine that nobody reads this attempt. A lost engine has forgotten it already."""
        try:
            self._send(Cancel(request_id=request_id, attempt=attempt))
        except PeerLost as error:
            log.debug("engine.cancel_unsent", address=self.address, reason=error.message)

    def forget(self, stream: TokenStream) -> None:
        """Stop routing tokens to a stream. Called by the stream."""
        if self._streams.get(stream.key) is stream:
            del self._streams[stream.key], self._by_number[stream.number]

    def _send(self, message: ToEngine) -> None:
        if self._link is None:
            raise PeerLost(f"the engine at {self.address} is not connected yet")
        self._link.send(message)

    async def _receive(self, link: AsyncLink[FromEngine]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            messages = await link.receive()
            self._heard_at = loop.time()
            self._take(messages)

    def _take(self, messages: Sequence[FromEngine]) -> None:
        """Spread what arrived together."""
        # Most often one step. A process that falls behind finds several, and makes one event of them.
        runs = Runs() if len(messages) > 1 else None
        for message in messages:
            self._dispatch(message, runs)
        if runs is not None:
            self._put_runs(runs.take_all())

    def _dispatch(self, message: FromEngine, runs: Runs | None) -> None:
        self._epoch = self._epoch or message.epoch
        if message.epoch != self._epoch:
            self._lose("it restarted")
            return
        match message:
            case TokenBatch(deltas=deltas):
                columns = zip(message.streams, message.indexes, message.token_ids, strict=False)
                if runs is None:
                    self._put_ordinary(columns)
                else:
                    self._put_runs(runs.add(columns))
                for delta in deltas:
                    if stream := self._stream(delta.request_id, delta.attempt, runs):
                        stream.put(delta)
            case RequestFailed(request_id=request_id, attempt=attempt, error=info):
                if stream := self._stream(request_id, attempt, runs):
                    stream.fail(error_from_info(info))
            case Pong(load=load):
                self._heard_load(load)
            case CacheReport() if self._prefixes is not None:
                self._prefixes.take(message)
            case CacheReport():
                pass
            case Measured():
                self.measured = message

    def _heard_load(self, load: NodeLoad) -> None:
        self.load = load
        if self._prefixes is not None:
            self._prefixes.heard(load)
        self.answered.set()
        self._on_change()

    def _stream(self, request_id: RequestId, attempt: int, runs: Runs | None) -> TokenStream | None:
        """Return a stream, with the tokens that waited for it put in."""
        stream = self._streams.get((request_id, attempt))
        if stream is not None and runs is not None:
            self._put_runs(runs.take(stream.number))
        return stream

    def _put_ordinary(self, columns: Iterable[tuple[int, int, int]]) -> None:
        """Put single tokens, as (stream, index, id), into their streams."""
        find = self._by_number.get
        for number, index, token_id in columns:
            stream = find(number)
            if stream is not None:
                try:
                    stream.put_ordinary(index, (token_id,))
                except Exception as error:
                    log.exception("stream.failed", request_id=stream.key[0])
                    _fail(stream, error)

    def _put_runs(self, runs: Iterable[Run]) -> None:
        for number, index, token_ids in runs:
            if (stream := self._by_number.get(number)) is not None:
                try:
                    stream.put_ordinary(index, token_ids)
                except Exception as error:
                    log.exception("stream.failed", request_id=stream.key[0])
                    _fail(stream, error)

    async def _ping(self) -> None:
        while True:
            try:
                self._send(self._question())
            except PeerLost:
                log.debug("engine.unreachable", address=self.address)
            interval_s = self._heartbeat.interval_s
            if not self.answered.is_set():
                interval_s = min(interval_s, FIRST_PING_INTERVAL_S)
            await asyncio.sleep(interval_s)

    def _question(self) -> Ping:
        known = self._prefixes
        if known is None:
            return Ping(wants_measures=self._wants_measures)
        return Ping(
            prefix_position=known.position,
            tier_positions=known.tier_positions,
            wants_measures=self._wants_measures,
        )

    async def _watch(self, link: AsyncLink[FromEngine]) -> None:
        await link.wait_lost()
        self._lose("its connection broke")

    def _lose(self, reason: str, failure: Callable[[], TandemError] | None = None) -> None:
        self.lost.set()
        self._on_change()
        for stream in list(self._streams.values()):
            stream.fail(failure() if failure else self._peer_lost(reason))

    def _peer_lost(self, reason: str) -> PeerLost:
        return PeerLost(f"the engine at {self.address} was lost: {reason}")


def _fail(stream: TokenStream, error: Exception) -> None:
    """End a stream whose tokens met a bug: the others go on. The top of what a token runs through."""
    stream.close()  # the engine knows nothing of it
    # No fault of the engine. And no retry: nobody knows how much of them the client was sent.
    stream.fail(TandemError(f"this server failed with its tokens: {type(error).__name__}"))
