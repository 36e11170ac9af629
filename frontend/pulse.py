"""What an app does a few times a second: see how late it is, and tell Prometheus what it counted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from tandem.frontend.edge import EDGE
from tandem.frontend.metrics import FrontendMetrics

# A worker that is killed takes what it counted since the last with it.
INTERVAL_S = 0.5


async def pulse(app: web.Application) -> AsyncIterator[None]:
    """Beat from the app's start to its end; for `cleanup_ctx`."""
    beating = asyncio.create_task(_beat(app[EDGE].metrics))
    yield
    beating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await beating


async def _beat(metrics: FrontendMetrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        metrics.loop_lag.observe(max(0.0, loop.time() - due_s))
        metrics.gather()
