"""Web pages: which may use the server (CORS), and what all others must not do.

A browser sends the requests of every page that its user visits, also to servers that only the user reaches. Without
API keys such a page could run requests, flush caches and make a node connect to any host.

```
 a page of an origin that --cors-allow-origin lists   everything; the browser asks first: Fetch standard, section 3.3
 the server's own page                                everything
 any other page                                       GET, HEAD and OPTIONS, whose answers the browser hides from it
 a page whose name resolves to this machine           nothing (DNS rebinding): its Host header is that name
```

Only a loopback listener checks `Host`: behind other listeners it may be a service's or a proxy's name.
"""

import socket
from collections.abc import Callable
from functools import lru_cache
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from tandem.frontend.http.edge import Edge
from tandem.frontend.options import HttpOptions
from tandem.wire.errors import TandemError
from tandem.wire.hosts import is_address

# Methods that change nothing here.
_SAFE_METHODS = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})
# What browsers report for the server's own pages and for the user.
_OWN_SITES = frozenset({"same-origin", "none"})
# Domains that nobody can register: RFC 6761, RFC 6762, and ICANN's decision of July 2024.
_LOCAL_DOMAINS = (".localhost", ".local", ".internal")
# The length of the longest host name.
_MAX_SHOWN_CHARS = 253


class PageRefused(TandemError, code="origin_not_allowed", status=403):
    """A web page of a different origin sent the request."""


class HostRefused(TandemError, code="host_not_allowed", status=403):
    """The request to a loopback address has a `Host` header that does not name this machine."""


def refuse_pages(edge: Edge) -> Callable[[web.Request], None]:
    """Return a check that rejects requests of other origins' pages. For servers without API keys."""
    http = edge.options.http
    # HTTP/1.0 has no Host header.
    names = frozenset({"", "localhost", socket.gethostname().lower(), *http.allowed_hosts})

    def check(request: web.Request) -> None:
        host = request.headers.get(hdrs.HOST, "")
        if edge.is_loopback_only and not _is_local(host, names):
            raise HostRefused(
                f"the Host header is {host[:_MAX_SHOWN_CHARS]!r}, which is not a name of this machine: a web page may "
                "have made it resolve to this server. Use localhost, or start the server with --allowed-host HOST or "
                "--api-key"
            )
        is_refused = request.method not in _SAFE_METHODS and _is_foreign(request, host)
        if is_refused and _allowed(request, http) is None:
            origin = request.headers.get(hdrs.ORIGIN, "")[:_MAX_SHOWN_CHARS]
            raise PageRefused(
                f"a web page of the origin {origin!r} sent this request: start the server with --cors-allow-origin "
                "ORIGIN, or with --api-key, which the page then has to send"
            )

    return check


@lru_cache(maxsize=64)  # parsing takes 2 µs, and clients send few different names
def _is_local(host: str, names: frozenset[str]) -> bool:
    """Return whether a `Host` header names this machine."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:  # unbalanced brackets
        return False
    # A page cannot make an address resolve to this machine.
    return name in names or name.endswith(_LOCAL_DOMAINS) or is_address(name)


def _is_foreign(request: web.Request, host: str) -> bool:
    """Return whether a page of a different origin sent the request. Only browsers send these headers."""
    if (site := request.headers.get("Sec-Fetch-Site")) is not None:
        return site not in _OWN_SITES
    # Without TLS, browsers send the first header to loopback addresses only.
    origin = request.headers.get(hdrs.ORIGIN)
    return origin is not None and origin.partition("://")[2].lower() != host.lower()


def answer_preflight(request: web.Request, http: HttpOptions) -> web.Response | None:
    """Answer the CORS preflight request of a browser. None: it is no preflight request, or its origin is not allowed."""
    if request.method != hdrs.METH_OPTIONS or not _allowed(request, http):
        return None
    if hdrs.ACCESS_CONTROL_REQUEST_METHOD not in request.headers:
        return None
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, HEAD, POST, PUT, DELETE",
        hdrs.ACCESS_CONTROL_MAX_AGE: "7200",  # Chromium's upper limit
    }
    # Allow every requested header: the server uses no cookies.
    if names := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = names
    return web.Response(status=204, headers=headers)


def allow_origin(request: web.Request, response: web.StreamResponse, http: HttpOptions) -> None:
    """Let a page of an allowed origin read the answer."""
    if "*" not in http.cors_origins:
        response.headers[hdrs.VARY] = hdrs.ORIGIN  # caches must store one answer per origin
    if allowed := _allowed(request, http):
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed


def _allowed(request: web.Request, http: HttpOptions) -> str | None:
    """Return the origin to allow. None: no browser sent the request, or its origin is not allowed."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None:
        return None
    if "*" in http.cors_origins:
        return "*"
    return origin if origin in http.cors_origins else None
