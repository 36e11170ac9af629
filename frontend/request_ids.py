"""The id of a request: from its body, else from its header `X-Request-Id`, else ours.

```
 body: rid, request_id ─┐
 X-Request-Id: abc ─────┴▶ abc_<number> ──▶ ids of its generations, and what /abort_request ends
 answer ◀── X-Request-Id: abc
```
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from aiohttp import web
from pydantic import AliasChoices, Field

from tandem.wire.generation import RequestId, new_request_id

HEADER = "X-Request-Id"
MAX_ID_CHARS = 256
# Leaves room for the number behind it.
_MAX_HEADER_CHARS = 240
NAMES = AliasChoices("rid", "request_id")
GivenId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]

ANSWERED_ID: web.RequestKey[str] = web.RequestKey("answered_id", str)


def with_id(request: web.Request, data: dict[str, Any]) -> dict[str, Any]:
    """Return a body that has the id of the request's header, unless it has an id of its own."""
    given = _given(request.headers)
    if not given or any(data.get(str(name)) is not None for name in NAMES.choices):
        return data
    # Proxies and agents send several requests with one id: the number keeps these apart.
    return {**data, "rid": part_id(given, secrets.randbits(32))}


def ids_of(request_id: str, count: int) -> list[RequestId]:
    """Return the ids of a request's generations: its own, numbered if there are several."""
    if count == 1:
        return [RequestId(request_id)]
    return [part_id(request_id, index) for index in range(count)]


def part_id(request_id: str, index: int) -> RequestId:
    """Return the id of one part of a request that has several."""
    return RequestId(f"{request_id}_{index}")


def is_part(part: str, request_id: str) -> bool:
    """Return whether `part_id` made `part` of this id, or of a part of it."""
    numbers = part.removeprefix(f"{request_id}_")
    return numbers != part and all(number.isdigit() for number in numbers.split("_"))


def note_ids(request: web.Request, ids: Sequence[RequestId]) -> None:
    """Note the ids of a request's generations, for the header of its answer."""
    request[ANSWERED_ID] = ids[0] if len(ids) == 1 else ids[0].removesuffix("_0")


async def answer_id(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request's id to the head of its answer."""
    known = _given(request.headers) or request.get(ANSWERED_ID, "")
    response.headers[HEADER] = known if _fits(known) else new_request_id()


def _given(headers: Mapping[str, str]) -> str:
    """Return the client's id; empty if there is none, or none that could be an id."""
    given = headers.get(HEADER, "")
    return given if _fits(given) and len(given) <= _MAX_HEADER_CHARS else ""


def _fits(text: str) -> bool:
    """Return whether an id may stand in a header: one of a body may be any text."""
    return bool(text) and text.isascii() and text.isprintable()
