"""The tokens of one attempt on one engine, from the link to their receiver.

```
 open ──put (finish)──▶ ended     ──fail──▶ failed     ──close, abort──▶ cancelled, once
```

Tokens travel from the link to the client's connection by function calls within the link's callback. The request's task
wakes only to drain a full connection, to replace a failed attempt, or to end the request.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import msgspec

from tandem.wire.errors import TandemError
from tandem.wire.generation import Finish, RequestId
from tandem.wire.messages import StartColocated, StartDecode, StartPrefill, TokenDelta

Start = StartPrefill | StartDecode | StartColocated
StreamKey = tuple[RequestId, int]


class TokenReceiver(Protocol):
    """Receives the tokens of one generation, each index once and in order."""

    @property
    def has_room(self) -> bool:
        """Whether it accepts tokens now. If not, await `drain`."""

    @property
    def is_ended(self) -> bool:
        """Whether it needs no more tokens: it has received the last one, or its text has ended."""

    def take(self, delta: TokenDelta) -> None:
        """Accept the next delta."""

    def take_ordinary(self, token_ids: Sequence[int]) -> bool:
        """Accept ordinary tokens: only ids, neither the first nor the last. False: pass them to `take`."""

    async def drain(self) -> None:
        """Wait until the receiver has room.

        Raises:
            ConnectionError: The client has disconnected.
        """


class DirectReceiver(Protocol):
    """Accepts ordinary tokens directly, with the index of the first."""

    def take_ordinary_at(self, index: int, token_ids: Sequence[int]) -> bool:
        """Accept the tokens from `index` on. False: rejected; queue them instead."""


class TokenStream:
    """The tokens of one attempt on one engine.

    Queued deltas are merged, so that a slow receiver costs memory for ids and log-probabilities only. Leaving the
    `with` block of an open stream cancels the attempt.

    Args:
        on_change: Called when `take` has a new delta or failure. Must not raise.
        forget: Called once the stream accepts nothing more, to remove it from the client.
        cancel: Called to cancel the attempt on the engine.

    Attributes:
        key: Request id and attempt.
        number: Stream id on the link.
        is_open: Whether more tokens may arrive.
        failure: Error of the attempt; None: it has not failed.
        direct: Accepts ordinary tokens while nothing is queued. Set by the caller of `take`; cleared by `put`, `fail` and
            `forget`.
    """

    # With thousands of streams, cache misses dominate the time per token: keep the object small.
    __slots__ = (
        "_cancel",
        "_forget",
        "_next_index",
        "_on_change",
        "_waiting",
        "direct",
        "failure",
        "is_open",
        "key",
        "number",
    )

    def __init__(
        self,
        start: Start,
        on_change: Callable[[], None],
        *,
        forget: "Callable[[TokenStream], None]",
        cancel: Callable[[RequestId, int], None],
    ) -> None:
        self.key: StreamKey = (start.request.request_id, start.attempt)
        self.number = start.stream
        self.direct: DirectReceiver | None = None
        self._forget, self._cancel = forget, cancel
        self._on_change = on_change
        self._waiting: deque[TokenDelta] = deque()
        self.failure: TandemError | None = None
        self._next_index = start.request.num_prior_tokens
        self.is_open = True

    @property
    def is_empty(self) -> bool:
        """Whether no delta is queued. The attempt may have failed all the same."""
        return not self._waiting

    def take(self) -> TokenDelta | None:
        """Return the next delta, or None if nothing is queued.

        Raises:
            TandemError: The attempt failed, and all earlier deltas were taken.
        """
        if self._waiting:
            return self._waiting.popleft()
        if self.failure is not None:
            raise self.failure
        return None

    def ignore_changes(self) -> None:
        """Stop calling `on_change`."""
        self._on_change = _ignore

    def take_all(self) -> list[TokenDelta]:
        """Return all queued deltas, even if the attempt failed."""
        waiting, self._waiting = self._waiting, deque()
        return list(waiting)

    def put_ordinary(self, index: int, token_ids: Sequence[int]) -> None:
        """Queue ordinary tokens."""
        self.put(self._delta(index, list(token_ids)))

    def put(self, delta: TokenDelta) -> None:
        """Queue a delta, merged with the last one if it directly follows it."""
        self.direct = None
        self._next_index = delta.index + len(delta.token_ids)
        if self._waiting and (merged := _merged(self._waiting[-1], delta)) is not None:
            self._waiting[-1] = merged
        else:
            self._waiting.append(delta)
        if delta.finish is not None:
            self.forget()
        self._on_change()

    def fail(self, error: TandemError) -> None:
        """End the stream with an error, which is raised after the queued deltas."""
        self.direct = None
        self.failure = error
        self.forget()
        self._on_change()

    def abort(self) -> None:
        """Cancel the attempt. `take` then returns a finish with reason `abort`."""
        self.close()
        # The index does not count tokens that `direct` accepted; an abort does not need it.
        self.put(self._delta(self._next_index, [], Finish(reason="abort")))

    def _delta(self, index: int, token_ids: list[int], finish: Finish | None = None) -> TokenDelta:
        request_id, attempt = self.key
        return TokenDelta(
            request_id=request_id,
            attempt=attempt,
            index=index,
            token_ids=token_ids,
            finish=finish,
        )

    def forget(self) -> None:
        """Accept no more messages from the engine. Does not cancel the attempt."""
        self.direct = None
        self.is_open = False
        self._forget(self)

    def close(self) -> None:
        """Cancel the attempt unless it has ended. Safe to call twice."""
        if self.is_open:
            self.forget()
            self._cancel(*self.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


def _ignore() -> None:
    """Do nothing."""


class SoleStream:
    """The stream of a generation that has only one. After the first token, ordinary tokens go directly to the receiver."""

    def __init__(self, stream: TokenStream, receiver: TokenReceiver) -> None:
        self._stream, self._receiver = stream, receiver
        self._has_begun = False

    def take(self) -> TokenDelta | None:
        """Return the next delta, or None. Raises `TandemError` if the attempt failed."""
        delta = self._stream.take()
        if delta is not None:
            self._has_begun = self._has_begun or bool(delta.token_ids)
        elif self._has_begun and self._stream.is_open:
            self._stream.direct = self
        return delta

    def take_ordinary_at(self, _index: int, token_ids: Sequence[int]) -> bool:
        """Pass tokens to the receiver. The engine sends each index once and in order."""
        return self._receiver.take_ordinary(token_ids)


class Relay:
    """Passes deltas to a receiver as they arrive.

    Args:
        wake: Wakes the task that awaits `run`.
    """

    def __init__(self, receiver: TokenReceiver, wake: asyncio.Event | None = None) -> None:
        self._receiver, self._wake = receiver, wake or asyncio.Event()
        self._next: Callable[[], TokenDelta | None] = _nothing
        self._error: Exception | None = None

    async def run(self, next_delta: Callable[[], TokenDelta | None]) -> None:
        """Return when the receiver has ended.

        Args:
            next_delta: Returns the next delta for the receiver, or None if none has arrived.

        Raises:
            ConnectionError: The client has disconnected.
            Exception: Raised by `next_delta` or the receiver, or passed to `fail`.
        """
        receiver, self._next, self._error = self._receiver, next_delta, None
        try:
            self._pass_on()
            while not receiver.is_ended:
                if self._error is not None:
                    raise self._error
                if receiver.has_room:
                    await self._wake.wait()
                else:
                    await receiver.drain()
                self._wake.clear()
                if self._error is None:
                    self._pass_on()
        finally:
            # Streams refer to the relay. This breaks the cycle, so that no request needs the garbage collector.
            self._next, self._error = _nothing, None

    def fail(self, error: Exception) -> None:
        """Make `run` raise `error`, unless it raises an earlier one."""
        self._error = self._error or error
        self._wake.set()

    def on_change(self) -> None:
        """Pass new deltas to the receiver. Streams call this from the link's callback."""
        if self._error is not None:
            return
        try:
            self._pass_on()
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self.fail(error)
        if self._receiver.is_ended or not self._receiver.has_room:
            self._wake.set()

    def _pass_on(self) -> None:
        receiver = self._receiver
        while receiver.has_room and (delta := self._next()) is not None:
            receiver.take(delta)
            if receiver.is_ended:
                return


def _nothing() -> None:
    """Return None."""


def _merged(last: TokenDelta, delta: TokenDelta) -> TokenDelta | None:
    """Return both deltas as one, reusing the lists of `last`. None: `delta` does not directly follow it."""
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
    last.phases.extend(delta.phases)
    if delta.finish is not None:
        changes["finish"] = delta.finish
    if delta.cached_tokens > last.cached_tokens:
        changes["cached_tokens"] = delta.cached_tokens
        changes["cached_by_tier"] = delta.cached_by_tier
    return msgspec.structs.replace(last, **changes) if changes else last
