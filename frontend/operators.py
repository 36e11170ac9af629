"""Who counts as an operator, and may change the cluster, flush caches and end all requests.

```
 the cluster has a secret      whoever sends the key derived from it (`tandem.wire.keys.operator_key`)
 it has none, but API keys     nobody: clients have API keys
 it has neither                whoever asks from this machine, through no proxy and from no web page
```
"""

from functools import wraps

from aiohttp import web
from aiohttp.typedefs import Handler

from tandem.frontend.edge import EDGE
from tandem.frontend.middleware import bears
from tandem.wire.errors import TandemError, Unauthorized
from tandem.wire.keys import is_loopback

# Added by proxies, and by browsers for a web page.
_OF_OTHERS = frozenset({"origin", "forwarded", "via", "x-real-ip"})


class Forbidden(TandemError, code="forbidden", status=403):
    """The request is for operators, and its sender may not be one."""


def require_operator(request: web.Request) -> None:
    """Return if an operator sent this request.

    Raises:
        Unauthorized: The operator key is missing or wrong.
        Forbidden: There is no operator key, and the request may come from somebody else.
    """
    options = request.app[EDGE].options
    if options.operator_key:
        if not bears(request, options.operator_key):
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
