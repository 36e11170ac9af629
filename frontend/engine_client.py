"""One engine's inbox as an asyncio process sees it: an edge worker, or a node's own HTTP.

```
 generate ──▶ TokenStream ──take──▶ ... ──▶ finish │ failure │ closed early (one Cancel)
                  ▲ one message per step, spread in one pass
 engine ═════ EngineClient.run ═════▶ lost: PeerLost in every stream
```

Holds streams of token ids by request and attempt. Knows nothing of text, of pairs or of replay.
"""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

import msgspec
from typing_extensions import override

from telemetry.log import get_logger
from wire.channel import AsyncLink
from wire.errors import InvalidRequest, PeerLost, TandemError, error_from_info
from wire.ids import Epoch, RequestId
from wire.keys import ChannelKey
from wire.messages import (
    Cancel,
    Finish,
    FlushCache,
    FromEngine,
    NodeLoad,
    Ping,
    Pong,
    RequestFailed,
    StartColocated,
    StartDecode,
    StartPrefill,
    ToEngine,
    TokenBatch,
    TokenDelta,
)

log = get_logger(__name__)

# The engine gives an edge up after 2 s of silence: three pings may be late.
PING_INTERVAL_S = 0.5
# Until the first answer, ask often: a node becomes usable as soon as its engine is.
FIRST_PING_INTERVAL_S = 0.05

Start = StartPrefill | StartDecode | StartColocated
StreamKey = tuple[RequestId, int]


class TokenStream:
    """The tokens of one attempt at one engine, as an async iterator; also taken one by one.

    What waits for a slow reader is merged into one delta, so that its memory is the ids (and the
    log-probabilities, where they are wanted) and no more. A context manager: leaving it early cancels the attempt at the engine.

    Args:
        wake: Set whenever something arrives. Give two streams the same event to wait for both.
    """

    def __init__(self, client: "EngineClient", start: Start, wake: asyncio.Event | None) -> None:
        self.key: StreamKey = (start.request.request_id, start.attempt)
        self._client = client
        self._wake = wake or asyncio.Event()
        self._waiting: deque[TokenDelta] = deque()
        self._failure: TandemError | None = None
        self._next_index = start.request.num_prior_tokens
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """Whether more may arrive."""
        return self._is_open

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be taken, but maybe a failure."""
        return not self._waiting

    def take(self) -> TokenDelta | None:
        """Return what arrived since the last call, or None when nothing did.

        Raises:
            TandemError: The attempt failed, and everything that arrived before was taken.
        """
        if self._waiting:
            return self._waiting.popleft()
        if self._failure is not None:
            raise self._failure
        return None

    def put(self, delta: TokenDelta) -> None:
        """Add what the engine sent; a delta that continues the waiting one is merged into it."""
        self._next_index = delta.index + len(delta.token_ids)
        if self._waiting and (merged := _merged(self._waiting[-1], delta)) is not None:
            self._waiting[-1] = merged
        else:
            self._waiting.append(delta)
        if delta.finish is not None:
            self.forget()
        self._wake.set()

    def fail(self, error: TandemError) -> None:
        """End the stream with an error, after what already arrived."""
        self._failure = error
        self.forget()
        self._wake.set()

    def abort(self) -> None:
        """Cancel the attempt; its reader sees a finish of reason `abort`."""
        self.close()
        request_id, attempt = self.key
        finish = Finish(reason="abort")
        self.put(
            TokenDelta(
                request_id=request_id,
                attempt=attempt,
                index=self._next_index,
                token_ids=[],
                finish=finish,
            )
        )

    def forget(self) -> None:
        """Take nothing more from the engine and do not cancel: its part is done."""
        self._is_open = False
        self._client.forget(self)

    def close(self) -> None:
        """Cancel the attempt unless it ended. Safe to call twice."""
        if self._is_open:
            self.forget()
            self._client.cancel(*self.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        while (delta := self.take()) is None:
            if not self._is_open:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return delta


def _merged(last: TokenDelta, delta: TokenDelta) -> TokenDelta | None:
    """Return both as one, made of `last`'s own lists; None when `delta` does not continue it."""
    if last.index + len(last.token_ids) != delta.index or last.finish is not None:
        return None
    changes: dict[str, object] = {}
    if delta.prompt_logprobs:
        if not last.prompt_logprobs:
            changes["prompt_index"] = delta.prompt_index
        elif last.prompt_index + len(last.prompt_logprobs) != delta.prompt_index:
            return None
        last.prompt_logprobs.extend(delta.prompt_logprobs)
    last.token_ids.extend(delta.token_ids)
    last.logprobs.extend(delta.logprobs)
    if delta.finish is not None:
        changes["finish"] = delta.finish
    if delta.cached_tokens > last.cached_tokens:
        changes["cached_tokens"] = delta.cached_tokens
    return msgspec.structs.replace(last, **changes) if changes else last


class EngineClient:
    """Sends requests to one life of one engine and spreads what it answers.

    Its owner runs `run` in a task group; everything else may be called while that runs.

    Args:
        address: Of the engine's inbox, such as `tcp://10.0.0.3:41234` or `ipc:///path`.
        key: The cluster's, when its links are authenticated.
        epoch: The life that is meant; None takes the first that answers.

    Attributes:
        load: What the engine last said of itself.
        answered: Set at its first answer.
        lost: Set when it was lost or `stop` was called; the client is of no use any more.
    """

    def __init__(
        self, address: str, key: ChannelKey | None = None, epoch: Epoch | None = None
    ) -> None:
        self.address = address
        self.load = NodeLoad()
        self.answered = asyncio.Event()
        self.lost = asyncio.Event()
        self._epoch = epoch
        self._streams: dict[StreamKey, TokenStream] = {}
        self._key = key
        self._link: AsyncLink[FromEngine] | None = None

    @override
    def __repr__(self) -> str:
        state = "lost" if self.lost.is_set() else "up" if self.is_up else "silent"
        return f"<EngineClient {self.address} {state} num_streams={len(self._streams)}>"

    @property
    def is_up(self) -> bool:
        """Whether the engine has answered and was not lost since."""
        return self.answered.is_set() and not self.lost.is_set()

    @property
    def num_streams(self) -> int:
        """Attempts that have neither ended nor been closed."""
        return len(self._streams)

    async def run(self) -> None:
        """Hold the link until the engine is lost or `stop` is called, then fail what is open."""
        # Opened here, so that a client whose `run` was never reached leaves no socket behind.
        self._link = link = AsyncLink[FromEngine](self.address, FromEngine, self._key)
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = [
                    tasks.create_task(self._receive(link)),
                    tasks.create_task(self._ping()),
                    tasks.create_task(self._watch(link)),
                ]
                await self.lost.wait()
                for task in serving:
                    task.cancel()
        finally:
            self._lose("this process is closing the link")
            link.close()

    def stop(self) -> None:
        """Make `run` return. Open streams end with `PeerLost`."""
        self._lose("its link was closed")

    def generate(self, start: Start, wake: asyncio.Event | None = None) -> TokenStream:
        """Start one attempt and return its stream. The caller closes it.

        Raises:
            PeerLost: The engine cannot be reached now; nothing was started.
            MessageTooLarge: The prompt is larger than a message may be.
            InvalidRequest: This request id and attempt are running already.
        """
        if self.lost.is_set():
            raise self._peer_lost("it is gone")
        stream = TokenStream(self, start, wake)
        if stream.key in self._streams:
            raise InvalidRequest(f"request id {start.request.request_id!r} is in use")
        self._send(start)
        self._streams[stream.key] = stream
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
            del self._streams[stream.key]

    def _send(self, message: ToEngine) -> None:
        if self._link is None:
            raise PeerLost(f"the engine at {self.address} is not connected yet")
        self._link.send(message)

    async def _receive(self, link: AsyncLink[FromEngine]) -> None:
        while True:
            self._dispatch(await link.receive())

    def _dispatch(self, message: FromEngine) -> None:
        self._epoch = self._epoch or message.epoch
        if message.epoch != self._epoch:
            self._lose("it restarted")
            return
        match message:
            case TokenBatch(deltas=deltas):
                for delta in deltas:
                    if stream := self._streams.get((delta.request_id, delta.attempt)):
                        stream.put(delta)
            case RequestFailed(request_id=request_id, attempt=attempt, error=info):
                if stream := self._streams.get((request_id, attempt)):
                    stream.fail(error_from_info(info))
            case Pong(load=load):
                self.load = load
                self.answered.set()

    async def _ping(self) -> None:
        while True:
            try:
                self._send(Ping())
            except PeerLost:
                log.debug("engine.unreachable", address=self.address)
            is_known = self.answered.is_set()
            await asyncio.sleep(PING_INTERVAL_S if is_known else FIRST_PING_INTERVAL_S)

    async def _watch(self, link: AsyncLink[FromEngine]) -> None:
        await link.wait_lost()
        self._lose("its connection broke")

    def _lose(self, reason: str) -> None:
        self.lost.set()
        for stream in list(self._streams.values()):
            stream.fail(self._peer_lost(reason))

    def _peer_lost(self, reason: str) -> PeerLost:
        return PeerLost(f"the engine at {self.address} was lost: {reason}")
