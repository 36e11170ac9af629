"""Who may ask for what: clients by API keys, routers by the reader key, operators by theirs.

Operators may change the cluster, flush caches and end all requests. They are:

```
 the cluster has a secret      whoever sends the key derived from it (`tandem.wire.keys.operator_key`)
 it has none, but API keys     nobody: clients have API keys
 it has neither                whoever asks from this machine, through no proxy and from no web page
```
"""

import hashlib
import hmac
from collections.abc import Iterable, Set
from functools import wraps

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from tandem.frontend.anthropic_errors import ANTHROPIC_ROUTES
from tandem.frontend.edge import EDGE
from tandem.wire.errors import TandemError, Unauthorized
from tandem.wire.keys import is_loopback

# Balancers, supervisors and scrapers read the first three, often without a key. The last two are the
# same for every copy of this server, and browsers have no key to send.
OPEN_ROUTES = frozenset({"/health", "/live", "/metrics", "/openapi.json", "/docs"})
# Routers read these from nodes.
READER_ROUTES = frozenset({"/server_info", "/tokenizer"})
# Added by proxies, and by browsers for a web page: an image of one is a GET without an origin.
_OF_OTHERS = frozenset({"origin", "sec-fetch-site", "referer", "forwarded", "via", "x-real-ip"})


def check_key(
    api_keys: Iterable[str], open_paths: Set[str] = frozenset(), reader_key: str = ""
) -> Middleware:
    """Return a middleware that rejects requests without one of `api_keys`, except to open paths.

    Args:
        reader_key: Opens `READER_ROUTES` as well. Empty: none does.
    """
    accepted = [_digest(key.encode()) for key in api_keys]
    readers = [*accepted, _digest(reader_key.encode())] if reader_key else accepted

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_open = request.path in OPEN_ROUTES or request.path in open_paths
        keys = readers if request.path in READER_ROUTES else accepted
        if not is_open and not _is_one_of(key_of(request), keys):
            raise Unauthorized("send the API key as 'Authorization: Bearer KEY'")
        return await handler(request)

    return check


def key_of(request: web.Request) -> bytes:
    """Return the bearer token of a request, or empty. Anthropic's routes take `x-api-key` as well."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = request.headers.get("x-api-key", "") if request.path in ANTHROPIC_ROUTES else ""
    return key.strip().encode(errors="surrogateescape")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_one_of(given: bytes, accepted: list[bytes]) -> bool:
    # Digests have one length, and each is compared to its end. So the time does not leak where the
    # bytes differ, how long a key is, or which key came near.
    digest = _digest(given)
    return sum(hmac.compare_digest(digest, known) for known in accepted) > 0


class Forbidden(TandemError, code="forbidden", status=403):
    """The route is for operators, and the request has no operator key."""


def require_operator(request: web.Request) -> None:
    """Return if an operator sent this request.

    Raises:
        Unauthorized: The operator key is missing or wrong.
        Forbidden: There is no operator key, and the request may come from somebody else.
    """
    options = request.app[EDGE].options
    if options.operator_key:
        if not _is_one_of(key_of(request), [_digest(options.operator_key.encode())]):
            raise Unauthorized(
                "this is for operators: send the operator key, which `tandem operator-key` prints "
                "where TANDEM_CLUSTER_KEY is set, as 'Authorization: Bearer KEY'"
            )
    elif options.http.api_keys:
        raise Forbidden(
            "this is for operators, and API keys are for clients: set TANDEM_CLUSTER_KEY and send the "
            "key that `tandem operator-key` prints"
        )
    elif not _is_of_this_machine(request):
        raise Forbidden(
            "this is for operators, and the cluster has no secret: ask from its own machine, not through "
            "a proxy or from a web page, or set TANDEM_CLUSTER_KEY"
        )


def operators_only(handler: Handler) -> Handler:
    """Return a handler that rejects everyone else, as `require_operator` does."""

    @wraps(handler)
    async def check(request: web.Request) -> web.StreamResponse:
        require_operator(request)
        return await handler(request)

    return check


def _is_of_this_machine(request: web.Request) -> bool:
    names = {name.lower() for name in request.headers}
    is_of_others = not names.isdisjoint(_OF_OTHERS) or any(
        name.startswith("x-forwarded-") for name in names
    )
    return is_loopback(request.remote or "") and not is_of_others
