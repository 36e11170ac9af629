"""The tokens of one attempt at one engine, from its link to the task that waits for them.

```
 open ──put (finish)──▶ ended     ──fail──▶ failed     ──close, abort──▶ cancelled, once
```

While its reader waits, it may leave a tap open. Ordinary tokens then reach the client in the call that
brought them: waking a task costs 20 µs.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, Self

import msgspec

from tandem.frontend.backend import Tap
from tandem.wire.errors import TandemError
from tandem.wire.generation import Finish, RequestId
from tandem.wire.messages import StartColocated, StartDecode, StartPrefill, TokenDelta

Start = StartPrefill | StartDecode | StartColocated
StreamKey = tuple[RequestId, int]


class StreamTap(Protocol):
    """Takes ordinary tokens at once."""

    def take_ordinary_at(self, index: int, token_ids: Sequence[int]) -> bool:
        """Take the tokens from `index` on. False: queue them."""


class TokenStream:
    """The tokens of one attempt at one engine. `read` yields them, `take` returns them one by one.

    Deltas that wait for a slow reader are merged into one, which bounds their memory to ids and
    log-probabilities. Leaving the stream's `with` block early cancels the attempt at the engine.

    Args:
        wake: Set whenever something arrives. Two streams may share one event.
        forget: Stops the client from putting more into the stream.
        cancel: Tells the engine that nobody reads this attempt.

    Attributes:
        number: The stream's short name on its link.
        is_open: Whether more may arrive.
        failure: What the attempt failed with.
        tap: Open only while the reader waits and nothing is queued. A token that it rejects closes it.
    """

    # With thousands of streams a token's time is that of fetching what it touches from memory.
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
        """Whether no delta is queued. There may be a failure."""
        return not self._waiting

    def take(self) -> TokenDelta | None:
        """Return the next delta, or None when nothing is queued.

        Raises:
            TandemError: The attempt failed, and every delta before that was taken.
        """
        if self._waiting:
            return self._waiting.popleft()
        if self.failure is not None:
            raise self.failure
        return None

    def mute(self) -> None:
        """Stop waking the reader."""
        self._wake = asyncio.Event()

    def take_late(self) -> list[TokenDelta]:
        """Return every queued delta, even of an attempt that failed."""
        waiting, self._waiting = self._waiting, deque()
        return list(waiting)

    def put_ordinary(self, index: int, token_ids: Sequence[int]) -> None:
        """Queue tokens that no tap took."""
        self.put(self._delta(index, list(token_ids)))

    def put(self, delta: TokenDelta) -> None:
        """Queue a delta, merged into the last one if it continues that."""
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
        """End the stream with an error, behind the queued deltas."""
        self.tap = None
        self.failure = error
        self.forget()
        self._wake.set()

    def abort(self) -> None:
        """Cancel the attempt. Its reader sees a finish of reason `abort`."""
        self.close()
        # Tokens that went through the tap are not counted in the index. No reader needs it here.
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
        """Take nothing more from the engine, without cancelling: its part is over."""
        self.tap = None
        self.is_open = False
        self._forget(self)

    def close(self) -> None:
        """Cancel the attempt unless it ended. Safe to call twice."""
        if self.is_open:
            self.forget()
            self._cancel(*self.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    async def read(self, tap: Tap | None = None) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas until the end, without the ordinary tokens that `tap` took.

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
    """Gives a tap tokens in order only."""

    __slots__ = ("_next_index", "_tap")

    def __init__(self, tap: Tap, next_index: int) -> None:
        self._tap, self._next_index = tap, next_index

    def take_ordinary_at(self, index: int, token_ids: Sequence[int]) -> bool:
        if index != self._next_index or not self._tap.take_ordinary(token_ids):
            return False
        self._next_index += len(token_ids)
        return True


def _merged(last: TokenDelta, delta: TokenDelta) -> TokenDelta | None:
    """Return both deltas as one, reusing the lists of `last`. None: `delta` does not continue it."""
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
