"""The tokens of one attempt at one engine, on their way from the link to whoever reads them.

```
 open ──put (finish)──▶ ended     ──fail──▶ failed     ──close, abort──▶ cancelled, once
```

Two ways lead out. Everything can be taken by the reader, a task that wakes for it: 20 µs and more.
While the reader has taken all and waits for more, it may leave a tap open, through which ordinary
tokens run at once, in the call that brought them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol, Self

import msgspec

from tandem.frontend.backend import Tap
from tandem.wire.errors import TandemError
from tandem.wire.generation import Finish
from tandem.wire.ids import RequestId
from tandem.wire.messages import StartColocated, StartDecode, StartPrefill, TokenDelta

Start = StartPrefill | StartDecode | StartColocated
StreamKey = tuple[RequestId, int]


class StreamTap(Protocol):
    """Takes ordinary tokens at once."""

    def take_ordinary_at(self, index: int, token_ids: Sequence[int]) -> bool:
        """Take tokens from `index` on, or say no to have them put into the stream."""
        ...


class StreamOwner(Protocol):
    """Whoever puts into streams what an engine sends; see `EngineClient`."""

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Tell the engine that nobody reads this attempt."""
        ...

    def forget(self, stream: "TokenStream") -> None:
        """Put nothing more into a stream."""
        ...


class TokenStream:
    """The tokens of one attempt at one engine, as an async iterator; also taken one by one.

    What waits for a slow reader is merged into one delta, so that its memory is the ids (and the
    log-probabilities, where they are wanted) and no more. A context manager: leaving it early cancels the attempt at the engine.

    Args:
        wake: Set whenever something arrives. Give two streams the same event to wait for both.

    Attributes:
        number: The stream's short name on its link.
        tap: Open only while the reader waits and has taken all; closed by whatever it did not take.
    """

    # With thousands of streams a token's time is that of fetching what it touches from memory.
    __slots__ = (
        "_client",
        "_failure",
        "_is_open",
        "_next_index",
        "_waiting",
        "_wake",
        "key",
        "number",
        "tap",
    )

    def __init__(self, client: StreamOwner, start: Start, wake: asyncio.Event | None) -> None:
        self.key: StreamKey = (start.request.request_id, start.attempt)
        self.number = start.stream
        self.tap: StreamTap | None = None
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
    def failure(self) -> TandemError | None:
        """What the attempt failed with."""
        return self._failure

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

    def mute(self) -> None:
        """Wake nobody any more. What arrives can still be taken, by `take_late`."""
        self._wake = asyncio.Event()

    def take_late(self) -> list[TokenDelta]:
        """Return what arrived since the last call, whether or not the attempt has failed."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def put_ordinary(self, index: int, token_ids: Sequence[int]) -> None:
        """Add tokens of which there is nothing more to say, through the tap if it takes them."""
        if self.tap is not None and self.tap.take_ordinary_at(index, token_ids):
            return
        request_id, attempt = self.key
        self.put(
            TokenDelta(
                request_id=request_id, attempt=attempt, index=index, token_ids=list(token_ids)
            )
        )

    def put(self, delta: TokenDelta) -> None:
        """Add what the engine sent; a delta that continues the waiting one is merged into it."""
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
        """End the stream with an error, after what already arrived."""
        self.tap = None
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
                # Or earlier: what went through the tap is not counted here. Of an abort nobody asks.
                index=self._next_index,
                token_ids=[],
                finish=finish,
            )
        )

    def forget(self) -> None:
        """Take nothing more from the engine and do not cancel: its part is done."""
        self.tap = None
        self._is_open = False
        self._client.forget(self)

    def close(self) -> None:
        """Cancel the attempt unless it ended. Safe to call twice."""
        if self._is_open:
            self.forget()
            self._client.cancel(*self.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncGenerator[TokenDelta, None]:
        return self.read()

    async def read(self, tap: Tap | None = None) -> AsyncGenerator[TokenDelta, None]:
        """Yield what arrives until the end, but for what `tap` takes; see `Backend.generate`.

        Raises:
            TandemError: The attempt failed.
        """
        may_tap = False
        while True:
            while (delta := self.take()) is not None:
                yield delta
                may_tap = tap is not None and bool(may_tap or delta.token_ids)
            if not self._is_open:
                return
            if tap is not None and may_tap:
                self.tap = _InOrder(tap, self._next_index)
            self._wake.clear()
            await self._wake.wait()
            self.tap = None


class _InOrder:
    """Lets a tap have tokens in order only."""

    __slots__ = ("_next_index", "_tap")

    def __init__(self, tap: Tap, next_index: int) -> None:
        self._tap, self._next_index = tap, next_index

    def take_ordinary_at(self, index: int, token_ids: Sequence[int]) -> bool:
        """See `StreamTap`."""
        if index != self._next_index or not self._tap.take_ordinary(token_ids):
            return False
        self._next_index += len(token_ids)
        return True


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
    last.phases.extend(delta.phases)
    if delta.finish is not None:
        changes["finish"] = delta.finish
    if delta.cached_tokens > last.cached_tokens:
        changes["cached_tokens"] = delta.cached_tokens
        changes["cached_by_tier"] = delta.cached_by_tier
    return msgspec.structs.replace(last, **changes) if changes else last
