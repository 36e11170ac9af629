"""Who asks and how long they wait: what a request's head says of the generations in its body.

How long is said in one of these headers; the least counts, and the server's own `request_timeout_s`:

```
 X-Request-Timeout-Ms              by people
 X-Envoy-Expected-Rq-Timeout-Ms    by Envoy, of itself
 X-Stainless-Read-Timeout, X-Stainless-Timeout    seconds, by OpenAI's clients, of themselves
```
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from tandem.frontend import timings
from tandem.frontend.edge import EDGE
from tandem.frontend.generation import Generation
from tandem.frontend.middleware import key_of
from tandem.frontend.tracing import TRACE
from tandem.wire.errors import InvalidRequest

# Enough to tell keys apart, and nothing to guess them from: keys are long.
CLIENT_DIGITS = 8
TIMEOUT_MS = "X-Request-Timeout-Ms"
# Set by software for itself: what cannot be read there is nobody's mistake here.
_OTHERS_S = {
    "X-Envoy-Expected-Rq-Timeout-Ms": 0.001,
    "X-Stainless-Read-Timeout": 1.0,
    "X-Stainless-Timeout": 1.0,
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Attributes:
        client: Short name of the key; empty where no key is asked for.
        deadline: When it is not worth starting any more, by the loop's clock; None: always.
        arrived: When the head of its request was read, by `time.perf_counter`.
        wants_timings: Whether it asked to be told where the time went.
    """

    client: str
    deadline: float | None
    arrived: float
    wants_timings: bool


CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)


@web.middleware
async def note_caller(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Note who asks, behind the check of keys and before the body is waited for.

    Raises:
        InvalidRequest: It says how long it waits, and that is no number.
    """
    arrived = time.perf_counter()
    http = request.app[EDGE].options.http
    wait_s = wait_of(request.headers)
    if http.request_timeout_s:
        wait_s = min(http.request_timeout_s, math.inf if wait_s is None else wait_s)
    deadline = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
    client = client_of(key_of(request)) if http.api_keys else ""
    wants_timings = request.headers.get(timings.HEADER, "").lower() in {"1", "true"}
    request[CALLER] = Caller(client, deadline, arrived, wants_timings)
    return await handler(request)


def asked_by(request: web.Request, generations: Sequence[Generation]) -> list[Generation]:
    """Return the generations of a request as asked by its caller, with the time that is left now."""
    caller, trace = request[CALLER], request.get(TRACE)
    left_s = None
    if caller.deadline is not None:
        left_s = caller.deadline - asyncio.get_running_loop().time()
    return [
        replace(
            generation,
            request=generation.request
            if left_s is None and not caller.client
            else msgspec.structs.replace(
                generation.request, client=caller.client, deadline_s=left_s
            ),
            timings=timings.Timings(caller.arrived, is_wanted=caller.wants_timings),
            trace=trace,
        )
        for generation in generations
    ]


def client_of(key: bytes) -> str:
    """Return the short name of a key, which may be logged."""
    return hashlib.sha256(key).hexdigest()[:CLIENT_DIGITS]


def wait_of(headers: Mapping[str, str]) -> float | None:
    """Return how many seconds a client waits, by the headers; None where none says.

    Raises:
        InvalidRequest: What it says itself is no number.
    """
    waits = [
        seconds * unit_s
        for name, unit_s in _OTHERS_S.items()
        if (seconds := _number(headers.get(name, ""))) is not None
    ]
    if (given := headers.get(TIMEOUT_MS)) is not None:
        own_ms = _number(given)
        if own_ms is None:
            raise InvalidRequest(f"{TIMEOUT_MS}: must be milliseconds, a number over 0")
        waits.append(own_ms / 1000)
    return min(waits, default=None)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None
