"""The id of a request: from its body, else from its `X-Request-Id` header, else generated.

```
 body: rid, request_id ─┐
 X-Request-Id: abc ─────┴▶ abc_<number> ──▶ ids of its generations, which /abort_request accepts
 answer ◀── X-Request-Id: abc                    └──▶ abc_<number>-<random>: the id that the nodes get
```

Several requests may use one id, even at the same time. The id that the nodes get is unique.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta

from tandem.wire.generation import RequestId, new_request_id

HEADER = "X-Request-Id"
MAX_ID_CHARS = 256
# Leaves room for the number appended to it.
_MAX_HEADER_CHARS = 240
NAMES = ("rid", "request_id")
RequestIdField = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]

RESPONSE_ID: web.RequestKey[str] = web.RequestKey("response_id", str)


def with_header_id(request: web.Request, data: dict[str, Any]) -> dict[str, Any]:
    """Return the body with the id from the request's header, unless the body already has an id."""
    header_id = _header_id(request.headers)
    if not header_id or any(data.get(name) is not None for name in NAMES):
        return data
    # Proxies and agents send several requests with one id; the number gives each answer a different id.
    return {**data, "rid": part_id(header_id, secrets.randbits(32))}


def unique_id(client_id: str) -> RequestId:
    """Return a unique id for this process and the nodes. It begins with the client's id, which makes logs searchable."""
    return RequestId(f"{client_id}-{secrets.token_hex(8)}")


def ids_of(request_id: str, count: int) -> list[str]:
    """Return the ids of a request's generations: the request's id, numbered if there are several."""
    if count == 1:
        return [request_id]
    return [part_id(request_id, index) for index in range(count)]


def part_id(request_id: str, index: int) -> str:
    """Return the id of one generation of a request that has several."""
    return f"{request_id}_{index}"


def is_part(part: str, request_id: str) -> bool:
    """Return whether `part` is `request_id` with one or more numbers appended by `part_id`."""
    numbers = part.removeprefix(f"{request_id}_")
    return numbers != part and all(number.isdigit() for number in numbers.split("_"))


def record_ids(request: web.Request, ids: Sequence[str]) -> None:
    """Record the request's id, from its generations' ids, for the header of its answer."""
    request[RESPONSE_ID] = ids[0] if len(ids) == 1 else ids[0].removesuffix("_0")


def response_id(request: web.Request) -> str:
    """Return the id in the header of the request's answer."""
    request_id = _header_id(request.headers) or request.get(RESPONSE_ID, "")
    if not _is_header_safe(request_id):
        request_id = request[RESPONSE_ID] = new_request_id()
    return request_id


def _header_id(headers: Mapping[str, str]) -> str:
    """Return the id in the client's header. Empty if the header is absent or not a valid id."""
    header_id = headers.get(HEADER, "")
    is_valid = _is_header_safe(header_id) and len(header_id) <= _MAX_HEADER_CHARS
    return header_id if is_valid else ""


def _is_header_safe(text: str) -> bool:
    """Return whether an id can be sent in a header. An id from a body may be any text."""
    return bool(text) and text.isascii() and text.isprintable()
