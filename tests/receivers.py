"""Token receivers for tests of backends."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from tandem.wire.messages import TokenDelta


class Receiver:
    """Passes every delta on. It rejects ordinary tokens, so that they arrive as deltas."""

    def __init__(self, on_delta: Callable[[TokenDelta], None] = lambda _: None) -> None:
        self._on_delta = on_delta
        self.has_room, self.is_ended = True, False

    def take(self, delta: TokenDelta) -> None:
        self._on_delta(delta)
        self.is_ended = delta.finish is not None

    def take_ordinary(self, _token_ids) -> bool:
        return False

    async def drain(self) -> None:
        self.has_room = True


async def deltas(backend, request, **fields) -> AsyncGenerator[TokenDelta, None]:
    """Yield the deltas of a request. Closing the generator cancels the request."""
    arrived: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
    running = asyncio.create_task(backend.generate(request, Receiver(arrived.put_nowait), **fields))
    running.add_done_callback(lambda _: arrived.put_nowait(None))
    try:
        while (delta := await arrived.get()) is not None:
            yield delta
        await running
    finally:
        running.cancel()
        await asyncio.wait({running})
