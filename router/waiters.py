"""Requests that wait for a node: told when one comes up, and ended when somebody aborts them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from wire.ids import RequestId


class WaitAborted(Exception):
    """Somebody ended a request that waited for a node."""


class Waiter:
    """One request that waits."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()
        self._is_aborted = False

    @override
    def __repr__(self) -> str:
        return f"<Waiter {'aborted' if self._is_aborted else 'waiting'}>"

    async def before(self, deadline: float) -> bool:
        """Wait for a change since the last call; False when none came before the loop's `deadline`.

        Raises:
            WaitAborted: The request was ended.
        """
        try:
            async with asyncio.timeout_at(deadline):
                await self._woken.wait()
        except TimeoutError:
            return False
        self._woken.clear()
        if self._is_aborted:
            raise WaitAborted
        return True

    def wake(self) -> None:
        """Say that something changed."""
        self._woken.set()

    def abort(self) -> None:
        """End the wait."""
        self._is_aborted = True
        self.wake()


class Waiters:
    """All that wait, of one edge worker."""

    def __init__(self) -> None:
        self._waiters: dict[RequestId, Waiter] = {}

    @override
    def __repr__(self) -> str:
        return f"<Waiters {len(self._waiters)}>"

    def __len__(self) -> int:
        return len(self._waiters)

    @contextmanager
    def entered(self, request_id: RequestId) -> Iterator[Waiter]:
        """Be woken inside the block. Enter first and look then: nothing is missed between."""
        waiter = self._waiters[request_id] = Waiter()
        try:
            yield waiter
        finally:
            if self._waiters.get(request_id) is waiter:
                del self._waiters[request_id]

    def tell(self) -> None:
        """Have everyone look again: a node came up."""
        for waiter in self._waiters.values():
            waiter.wake()

    def abort(self, request_id: str) -> bool:
        """End the wait of one request. False if it does not wait."""
        waiter = self._waiters.get(RequestId(request_id))
        if waiter is not None:
            waiter.abort()
        return waiter is not None
