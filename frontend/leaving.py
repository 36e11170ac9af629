"""A server that is about to end, and still serves: who balances takes it out, and connections move away.

```
 serving ──leave──▶ leaving: /health is 503, each answer closes its connection ──▶ listens no more, drains
```

Balancers hear of an end late: until then new connections still come here, and each of them must be served.
"""

from aiohttp import hdrs, web

from tandem.frontend.backend import Health
from tandem.frontend.edge import EDGE

LEAVING = Health(is_serving=False, detail="about to end: send what is new to another")


def leave(app: web.Application) -> None:
    """Say to everyone who asks that this server is about to end."""
    app[EDGE].is_leaving = True


async def send_away(request: web.Request, response: web.StreamResponse) -> None:
    """Have the client connect anew for its next request, once the server is leaving."""
    if request.app[EDGE].is_leaving:
        response.headers[hdrs.CONNECTION] = "close"
        response.force_close()
