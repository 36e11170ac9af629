"""Requests as they wait for a node: told when one comes up, and ended when somebody aborts them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from tandem.wire.ids import RequestId


class WaitAborted(Exception):
    """Somebody ended a request while no attempt at it ran."""


class Waiter:
    """One request, which may have to wait.

    Args:
        waiting: Those that wait now, in the order in which they began to.
    """

    def __init__(self, waiting: "dict[Waiter, None]") -> None:
        self._waiting = waiting
        self._woken = asyncio.Event()
        self._is_aborted = False

    @override
    def __repr__(self) -> str:
        return f"<Waiter {'aborted' if self._is_aborted else 'waiting'}>"

    def check(self) -> None:
        """Return if the request may go on.

        Raises:
            WaitAborted: It was ended.
        """
        if self._is_aborted:
            raise WaitAborted

    async def before(self, deadline: float) -> bool:
        """Wait for a change from now on; False when none came before the loop's `deadline`."""
        self._woken.clear()
        self._waiting[self] = None
        try:
            async with asyncio.timeout_at(deadline):
                await self._woken.wait()
        except TimeoutError:
            return False
        finally:
            del self._waiting[self]
        return True

    def wake(self) -> None:
        """Say that something changed."""
        self._woken.set()

    def abort(self) -> None:
        """End the request, at once if it waits."""
        self._is_aborted = True
        self.wake()


class Waiters:
    """The requests of one edge worker, of which `len` wait now."""

    def __init__(self) -> None:
        self._waiters: dict[RequestId, Waiter] = {}
        # In order: who waits longest looks first, and what a simulation does follows from its seed alone.
        self._waiting: dict[Waiter, None] = {}

    @override
    def __repr__(self) -> str:
        return f"<Waiters {len(self)} of {len(self._waiters)} requests>"

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def entered(self, request_id: RequestId) -> Iterator[Waiter]:
        """Know a request inside the block, whether it waits or not: it may be aborted at any time."""
        waiter = self._waiters[request_id] = Waiter(self._waiting)
        try:
            yield waiter
        finally:
            if self._waiters.get(request_id) is waiter:
                del self._waiters[request_id]

    def tell(self) -> None:
        """Have everyone that waits look again: a node came up."""
        for waiter in self._waiting:
            waiter.wake()

    def abort(self, request_id: str) -> bool:
        """End one request unless an attempt at it runs. False if it is not known."""
        waiter = self._waiters.get(RequestId(request_id))
        if waiter is not None:
            waiter.abort()
        return waiter is not None
