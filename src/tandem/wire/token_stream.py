"""The tokens of one attempt on one engine, from the link to the task that reads them.

```
 open ──put (finish)──▶ ended     ──fail──▶ failed     ──close, abort──▶ cancelled, once
```

While the reader waits, it may install a tap. Ordinary tokens then go to the client directly from the link's
callback, which saves the 20 µs of waking a task.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, Self

import msgspec

from tandem.wire.errors import TandemError
from tandem.wire.generation import Finish, RequestId
from tandem.wire.messages import StartColocated, StartDecode, StartPrefill, TokenDelta

Start = StartPrefill | StartDecode | StartColocated
StreamKey = tuple[RequestId, int]


class Tap(Protocol):
    """Accepts ordinary tokens without a queue."""

    def take_ordinary(self, token_ids: Sequence[int]) -> bool:
        """Accept the next tokens. False: rejected; yield them as a delta instead."""


class StreamTap(Protocol):
    """Accepts ordinary tokens with their index, without a queue."""

    def take_ordinary_at(self, index: int, token_ids: Sequence[int]) -> bool:
        """Accept the tokens from `index` on. False: rejected; queue them instead."""


class TokenStream:
    """The tokens of one attempt on one engine. `read` yields deltas as they arrive; `take` returns a queued one.

    Queued deltas are merged, so that a slow reader costs memory for ids and log-probabilities only. Leaving the
    `with` block of an open stream cancels the attempt.

    Args:
        wake: Event to set when a delta or failure arrives. Two streams may share one.
        forget: Called once the stream accepts nothing more, to remove it from the client.
        cancel: Called to cancel the attempt on the engine.

    Attributes:
        key: Request id and attempt.
        number: Stream id on the link.
        is_open: Whether more tokens may arrive.
        failure: Error of the attempt; None: it has not failed.
        tap: Direct path to the client. Set only while the reader waits and nothing is queued; removed when it
            rejects a token.
    """

    # With thousands of streams, cache misses dominate the time per token: keep the object small.
    __slots__ = (
        "_cancel",
        "_forget",
        "_next_index",
        "_waiting",
        "_wake",
        "failure",
        "is_open",
        "key",
        "number",
        "tap",
    )

    def __init__(
        self,
        start: Start,
        wake: asyncio.Event | None,
        *,
        forget: "Callable[[TokenStream], None]",
        cancel: Callable[[RequestId, int], None],
    ) -> None:
        self.key: StreamKey = (start.request.request_id, start.attempt)
        self.number = start.stream
        self.tap: StreamTap | None = None
        self._forget, self._cancel = forget, cancel
        self._wake = wake or asyncio.Event()
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

    def detach_reader(self) -> None:
        """Stop setting the reader's event."""
        self._wake = asyncio.Event()

    def take_all(self) -> list[TokenDelta]:
        """Return all queued deltas, even if the attempt failed."""
        waiting, self._waiting = self._waiting, deque()
        return list(waiting)

    def put_ordinary(self, index: int, token_ids: Sequence[int]) -> None:
        """Queue ordinary tokens that no tap accepted."""
        self.put(self._delta(index, list(token_ids)))

    def put(self, delta: TokenDelta) -> None:
        """Queue a delta, merged with the last one if it directly follows it."""
        self.tap = None
        self._next_index = delta.index + len(delta.token_ids)
        if self._waiting and (merged := _merged(self._waiting[-1], delta)) is not None:
            self._waiting[-1] = merged
        else:
            self._waiting.append(delta)
        if delta.finish is not None:
            self.forget()
        self._wake.set()

    def fail(self, error: TandemError) -> None:
        """End the stream with an error, which is raised after the queued deltas."""
        self.tap = None
        self.failure = error
        self.forget()
        self._wake.set()

    def abort(self) -> None:
        """Cancel the attempt. Its reader gets a finish with reason `abort`."""
        self.close()
        # The index does not count tokens that the tap accepted; no reader needs it for an abort.
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
        self.tap = None
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

    async def read(self, tap: Tap | None = None) -> AsyncGenerator[TokenDelta, None]:
        """Yield deltas until the attempt ends, except ordinary tokens that `tap` accepted.

        Raises:
            TandemError: The attempt failed.
        """
        may_tap = False
        while True:
            while (delta := self.take()) is not None:
                yield delta
                may_tap = tap is not None and bool(may_tap or delta.token_ids)
            if not self.is_open:
                return
            if tap is not None and may_tap:
                self.tap = _InOrder(tap, self._next_index)
            self._wake.clear()
            await self._wake.wait()
            self.tap = None


class _InOrder:
    """Passes tokens to a tap if they are the next in order."""

    __slots__ = ("_next_index", "_tap")

    def __init__(self, tap: Tap, next_index: int) -> None:
        self._tap, self._next_index = tap, next_index

    def take_ordinary_at(self, index: int, token_ids: Sequence[int]) -> bool:
        if index != self._next_index or not self._tap.take_ordinary(token_ids):
            return False
        self._next_index += len(token_ids)
        return True


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
