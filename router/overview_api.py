"""`GET /overview`: what the page and `tandem top` draw. With several edge workers it is of all of them.

```
 client ─▶ any worker ─▶ its own ─┬─▶ merged, kept for a quarter of a second ─▶ ?after=UNIX_S
                      siblings' ──┘
```
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from tandem.frontend.middleware import json_response
from tandem.router.observer import KEEP_S, Observer
from tandem.router.overview import Overview, after, merged
from tandem.wire.errors import InvalidRequest

OVERVIEW_ROUTE = "/overview"


class Answers(Protocol):
    """What the other workers said, and which did not."""

    @property
    def given(self) -> Sequence[dict[str, Any]]:
        """The overviews."""

    @property
    def silent(self) -> Sequence[int]:
        """Indices."""


class OverviewApi:
    """Answers for one edge worker.

    Attributes:
        ask_siblings: Asks the other workers for theirs; None where there are none.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.ask_siblings: Callable[[], Awaitable[Answers]] | None = None
        self._asking = asyncio.Lock()
        self._merged: Overview | None = None
        self._merged_at = -math.inf

    def routes(self) -> list[web.RouteDef]:
        """Return those that clients reach."""
        return [web.get(OVERVIEW_ROUTE, self.show)]

    async def show(self, request: web.Request) -> web.Response:
        """Show the whole router; with `?after=UNIX_S` only requests and events since then.

        Raises:
            InvalidRequest: `after` is no time.
        """
        try:
            since = float(request.query.get("after", "0"))
        except ValueError:
            raise InvalidRequest("after: must be a Unix time in seconds") from None
        return json_response(
            after(await self._whole(), since), headers={"Cache-Control": "no-store"}
        )

    async def show_own(self, request: web.Request) -> web.Response:
        """Show this worker alone."""
        return json_response(self._observer.overview())

    async def _whole(self) -> Overview:
        if self.ask_siblings is None:
            return self._observer.overview()
        async with self._asking:  # however many look, siblings are asked once
            if self._merged is None or time.monotonic() - self._merged_at >= KEEP_S:
                others = await self.ask_siblings()
                self._merged = merged(
                    self._observer.overview(),
                    [msgspec.convert(answer, Overview) for answer in others.given],
                    others.silent,
                )
                self._merged_at = time.monotonic()
            return self._merged
