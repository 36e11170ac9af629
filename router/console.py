"""The console: `GET /overview`, for all edge workers, and the page at `/` that draws it.

The page's files hold nothing of the cluster and are open without a key. The page fetches `/overview` with the key that
its user enters.
"""

import asyncio
import math
import time
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from tandem.frontend.middleware import json_response
from tandem.router.control import Link
from tandem.router.observer import KEEP_S, Observer
from tandem.router.overview import Overview, after, merged
from tandem.wire.errors import InvalidRequest

OVERVIEW_ROUTE = "/overview"
ROOT_ROUTE, FILES_ROUTE = "/", "/page/"
PAGE, INDEX = Path(__file__).parent / "page", "index.html"
MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Asked for each time, and answered with 304: a router that was upgraded shows its own page.
    "Cache-Control": "no-cache",
    # The page loads nothing from elsewhere, runs no script that is not a file of ours, and stands in no frame.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class OverviewApi:
    """Answers for one edge worker.

    Args:
        link: Asks the other workers; None where there are none.
    """

    def __init__(self, observer: Observer, link: Link | None = None) -> None:
        self._observer, self._link = observer, link
        self._asking = asyncio.Lock()
        self._merged: Overview | None = None
        self._merged_at = -math.inf

    def routes(self) -> list[web.RouteDef]:
        """Return those that clients reach."""
        return [web.get(OVERVIEW_ROUTE, self.show)]

    async def show(self, request: web.Request) -> web.Response:
        """Show the whole router; with `?after=UNIX_S` only requests that ended since then.

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

    async def _whole(self) -> Overview:
        if self._link is None:
            return self._observer.overview()
        async with self._asking:  # however many look, the other workers are asked once
            if self._merged is None or time.monotonic() - self._merged_at >= KEEP_S:
                others = await self._link.ask_others("overview")
                self._merged = merged(
                    self._observer.overview(),
                    [msgspec.json.decode(answer, type=Overview) for answer in others.given],
                    others.silent,
                )
                self._merged_at = time.monotonic()
            return self._merged


class PageFiles:
    """All files of the page, and the routes they are at.

    Attributes:
        paths: Where they are: these routes need no key.
    """

    def __init__(self) -> None:
        found = sorted(file for file in PAGE.iterdir() if file.suffix in MEDIA_TYPES)
        self._files = {
            ROOT_ROUTE if file.name == INDEX else FILES_ROUTE + file.name: file for file in found
        }
        self.paths = frozenset(self._files)

    def routes(self) -> list[web.RouteDef]:
        """Return one for each file."""
        return [web.get(path, _handler(file)) for path, file in self._files.items()]


def _handler(file: Path) -> Handler:
    headers = HEADERS | {"Content-Type": f"{MEDIA_TYPES[file.suffix]}; charset=utf-8"}

    async def show(_request: web.Request) -> web.StreamResponse:
        # It has an ETag, and answers a request that names that with 304.
        return web.FileResponse(file, headers=headers)

    return show
