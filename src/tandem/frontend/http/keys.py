"""Access control: API keys for clients, the reader key for routers, the operator key for operators.

A client lists and aborts the requests of its own key only. Operators may change the cluster, flush caches, and list and
abort all requests. Whether a request counts as an operator's:

```
 cluster secret set            if it has the key derived from the secret (`tandem.wire.keys.operator_key`)
 only API keys set             never, because API keys belong to clients
 neither set                   if it comes from this machine, not through a proxy and not from a web page
```
"""

import hashlib
from collections.abc import Callable, Set
from functools import wraps

from aiohttp import web
from aiohttp.typedefs import Handler

from tandem.frontend.http.edge import EDGE
from tandem.frontend.options import FrontendOptions, read_keys
from tandem.settings.reload import ReloadedFiles
from tandem.wire.errors import TandemError, Unauthorized
from tandem.wire.keys import is_loopback

# Load balancers, supervisors and scrapers read the first three, often without a key. The last two contain
# nothing specific to this server, and browsers cannot send a key.
OPEN_ROUTES = frozenset({"/health", "/live", "/metrics", "/openapi.json", "/docs"})
# Routers fetch these from nodes.
READER_ROUTES = frozenset({"/server_info", "/tokenizer"})
# Hex digits of a key's hash: enough to distinguish keys, too few to recover one.
_CLIENT_DIGITS = 8
# Headers of requests that a proxy forwards or a web page sends. Origin alone is not enough: image requests have none.
_PROXY_HEADERS = frozenset({"origin", "sec-fetch-site", "referer", "forwarded", "via", "x-real-ip"})


class AcceptedKeys:
    """The keys that open the routes of clients: those of the options, and the operator key.

    Attributes:
        files: The key files, to be refreshed by the owner.
    """

    def __init__(self, options: FrontendOptions) -> None:
        self._options = options
        self.files = ReloadedFiles(options.http.key_files, self._load)

    def _load(self) -> None:
        keys = [*read_keys(self._options.http), *filter(None, [self._options.operator_key])]
        # Looking up a digest reveals nothing by its duration: no client can choose the digest of a wrong key.
        self._digests = frozenset(_digest(key.encode()) for key in keys)

    def __contains__(self, key: bytes) -> bool:
        return _digest(key) in self._digests


def check_key(
    accepted: AcceptedKeys, open_paths: Set[str] = frozenset(), reader_key: str = ""
) -> Callable[[web.Request], None]:
    """Return a check that rejects requests without an accepted key, except to open paths.

    Args:
        reader_key: Key that opens `READER_ROUTES` only. Empty: there is none.
    """
    reader = _digest(reader_key.encode()) if reader_key else None

    def is_reader(request: web.Request, key: bytes) -> bool:
        return request.path in READER_ROUTES and _digest(key) == reader

    def check(request: web.Request) -> None:
        is_open = request.path in OPEN_ROUTES or request.path in open_paths
        key = key_of(request)
        if not (is_open or key in accepted or is_reader(request, key)):
            raise Unauthorized("send the API key as 'Authorization: Bearer KEY'")

    return check


def key_of(request: web.Request) -> bytes:
    """Return a request's bearer token, else its `x-api-key` (Anthropic's header), or empty."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = request.headers.get("x-api-key", "")
    return key.strip().encode(errors="surrogateescape")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Forbidden(TandemError, code="forbidden", status=403):
    """The route is for operators only."""


def require_operator(request: web.Request) -> None:
    """Raise unless an operator sent this request.

    Raises:
        Unauthorized: The operator key is missing or wrong.
        Forbidden: The server has no operator key, and the request may not come from an operator.
    """
    options = request.app[EDGE].options
    if options.operator_key:
        if not has_operator_key(request):
            raise Unauthorized(
                "this route is for operators: send the operator key as 'Authorization: Bearer KEY'; "
                "`tandem operator-key` prints it where TANDEM_CLUSTER_KEY is set"
            )
    elif options.http.has_keys:
        raise Forbidden(
            "this route is for operators, and API keys are for clients: set TANDEM_CLUSTER_KEY and send the "
            "key that `tandem operator-key` prints"
        )
    elif not _is_local(request):
        raise Forbidden(
            "this route is for operators, and the cluster has no secret: set TANDEM_CLUSTER_KEY, or send the "
            "request from the server's machine, not through a proxy or from a web page"
        )


def has_operator_key(request: web.Request) -> bool:
    """Return whether a request has the operator key. False if the server has none."""
    key = request.app[EDGE].options.operator_key
    return bool(key) and _digest(key_of(request)) == _digest(key.encode())


def owner_of(request: web.Request) -> str | None:
    """Return the name of the key whose requests the sender may list and abort; None: those of all keys.

    All clients of a server without API keys have the same empty name.
    """
    return None if has_operator_key(request) else client_of(request)


def client_of(request: web.Request) -> str:
    """Return the name of a request's key: a prefix of its hash, safe to log. Empty if the server needs no key."""
    if not request.app[EDGE].options.http.has_keys:
        return ""
    return _digest(key_of(request)).hex()[:_CLIENT_DIGITS]


def operators_only(handler: Handler) -> Handler:
    """Return a handler that first calls `require_operator`."""

    @wraps(handler)
    async def check(request: web.Request) -> web.StreamResponse:
        require_operator(request)
        return await handler(request)

    return check


def _is_local(request: web.Request) -> bool:
    names = {name.lower() for name in request.headers}
    is_forwarded = not names.isdisjoint(_PROXY_HEADERS) or any(
        name.startswith("x-forwarded-") for name in names
    )
    return is_loopback(request.remote or "") and not is_forwarded
