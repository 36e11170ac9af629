"""Who may change the cluster: add, remove, drain or turn a node.

```
 the cluster has a secret      who bears the key derived from it (`wire.keys.operator_key`)
 it has none, but API keys     whose key was checked, as for every route
 it has neither                who asks from this machine, but no web page
```
"""

from functools import wraps

from aiohttp import web
from aiohttp.typedefs import Handler

from frontend.edge import EDGE
from frontend.middleware import bears
from wire.errors import TandemError, Unauthorized
from wire.keys import is_loopback


class Forbidden(TandemError):
    """Who asks may not change the cluster."""

    code = "forbidden"
    status = 403


def operators_only(handler: Handler) -> Handler:
    """Return the handler of a route that changes the cluster, for those who may.

    Raises:
        Unauthorized: The operator's key is missing or wrong.
        Forbidden: There is no key, and the request comes from another machine.
    """

    @wraps(handler)
    async def check(request: web.Request) -> web.StreamResponse:
        options = request.app[EDGE].options
        if options.operator_key:
            if not bears(request, options.operator_key):
                raise Unauthorized(
                    "this changes the cluster: send its operator key, which `tandem operator-key` "
                    "prints where TANDEM_CLUSTER_KEY is set, as 'Authorization: Bearer KEY'"
                )
        elif not options.http.api_keys and not _is_of_this_machine(request):
            raise Forbidden(
                "this changes the cluster, which has no secret: ask from its own machine and not from "
                "a web page, or set TANDEM_CLUSTER_KEY"
            )
        return await handler(request)

    return check


def _is_of_this_machine(request: web.Request) -> bool:
    # A browser on this machine asks for whatever page it shows, and says so.
    return is_loopback(request.remote or "") and "Origin" not in request.headers
