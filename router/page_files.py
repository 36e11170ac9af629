"""The page at `/`: static files, which hold nothing of the cluster and so are open to whoever asks.

What the page shows it fetches from `/overview`, with the key that its user gives it.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from aiohttp import web
from aiohttp.typedefs import Handler

ROOT_ROUTE, FILES_ROUTE = "/", "/page/"
INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# It loads nothing from elsewhere, runs no script that is not a file of ours, and stands in no frame.
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, read when the worker starts."""

    path: str
    body: bytes
    media_type: str

    @property
    def etag(self) -> str:
        """Changes when the file does."""
        return f'"{hashlib.sha256(self.body).hexdigest()[:20]}"'


class PageFiles:
    """All files of the page, and the routes they are at."""

    def __init__(self) -> None:
        self._files = list(_read(files("tandem.router") / "page"))

    @property
    def paths(self) -> frozenset[str]:
        """Where they are: these routes need no key."""
        return frozenset(file.path for file in self._files)

    def routes(self) -> list[web.RouteDef]:
        """Return one for each file."""
        return [web.get(file.path, _handler(file)) for file in self._files]


def _read(directory: Traversable) -> Iterator[PageFile]:
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name):
        media_type = MEDIA_TYPES.get("." + entry.name.rpartition(".")[2])
        if media_type is not None:
            path = ROOT_ROUTE if entry.name == INDEX else FILES_ROUTE + entry.name
            yield PageFile(path, entry.read_bytes(), media_type)


def _handler(file: PageFile) -> Handler:
    headers = {
        "ETag": file.etag,
        # Asked for each time, and answered with 304: a router that was upgraded shows its own page.
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    async def show(request: web.Request) -> web.Response:
        if file.etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=file.body, content_type=file.media_type, charset="utf-8", headers=headers
        )

    return show
