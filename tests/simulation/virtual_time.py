"""An asyncio event loop whose time is a number: it jumps to whatever is due next, and nothing waits.

Everything of a simulated cluster runs in one such loop: asyncio tasks of routers, and callbacks that
stand for the passes of nodes' loops, for threads and for frames on their way. No descriptor is watched.
"""

import asyncio
from asyncio.base_events import BaseEventLoop


class Stuck(AssertionError):
    """Everything waits, and nothing is due at any time."""


class _NoDescriptors:
    """Where a real loop would sleep until a socket is readable."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list:
        if timeout is None:
            raise Stuck("every task waits, and nothing is due")
        self._loop.now_s += timeout
        return []


class VirtualLoop(BaseEventLoop):
    """Runs what is due at once, and sleeps by adding to `now_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._selector = _NoDescriptors(self)

    def time(self) -> float:
        return self.now_s

    def _process_events(self, event_list: list) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        """Called to interrupt a sleep from another thread, of which there are none."""


def run_in_virtual_time(main):
    """Run `main(loop)`, a coroutine function, to its end and return what it returns."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main(loop))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(_settled(loop))
        loop.close()


async def _settled(loop):
    others = asyncio.all_tasks(loop) - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
