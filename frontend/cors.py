"""Which web pages may use the server from a browser; see the Fetch standard, section 3.3.

Off unless an operator names origins: then any page that a user opens could use the server with
what the user's machine can reach.
"""

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

# How long a browser keeps the answer to its question; Chromium's upper limit.
_MAX_AGE_S = "7200"
_METHODS = "GET, HEAD, POST, PUT"

OnPrepare = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


def answer_preflight(origins: Sequence[str]) -> Middleware:
    """Return a middleware that answers a browser's question before a request of a page."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_question = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if request.method != hdrs.METH_OPTIONS or not is_question or not _allowed(request, origins):
            return await handler(request)
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
            hdrs.ACCESS_CONTROL_MAX_AGE: _MAX_AGE_S,
        }
        # The page's own: there is none that the server would not take, and cookies are not used.
        if asked := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked
        return web.Response(status=204, headers=headers)

    return answer


def tell_origin(origins: Sequence[str]) -> OnPrepare:
    """Return what puts into each answer's head whether a page may read it."""

    async def tell(request: web.Request, response: web.StreamResponse) -> None:
        if "*" not in origins:
            response.headers[hdrs.VARY] = hdrs.ORIGIN  # caches keep the answers apart
        if allowed := _allowed(request, origins):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed

    return tell


def _allowed(request: web.Request, origins: Sequence[str]) -> str | None:
    """Return what to answer the page that asks; None where it is no page, or not one of them."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None:
        return None
    if "*" in origins:
        return "*"
    return origin if origin in origins else None
