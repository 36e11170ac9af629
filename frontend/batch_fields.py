"""Fields of a body that hold for all its prompts, or, as lists, one entry for each.

Holds how such a body becomes a row for each prompt, and the three fields of routers of SGLang's kind,
which both APIs take.
"""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from tandem.frontend.backend import Bootstrap
from tandem.frontend.body import Body, BodyT, validate
from tandem.wire.errors import InvalidRequest


def _one_or_more(kind: str) -> WithJsonSchema:
    """Describe what is checked by hand: a scalar for one prompt or all, a list for a batch."""
    return WithJsonSchema({"anyOf": [{"type": kind}, {"type": "array", "items": {"type": kind}}]})


_IDS = {"type": "array", "items": {"type": "integer"}}
Ids = Annotated[Any, WithJsonSchema({"anyOf": [_IDS, {"type": "array", "items": _IDS}]})]
Strings = Annotated[Any, _one_or_more("string")]
Integers = Annotated[Any, _one_or_more("integer")]
Booleans = Annotated[Any, _one_or_more("boolean")]
Objects = Annotated[Any, _one_or_more("object")]


class BootstrappedBody(Body):
    """A body to which a router of SGLang's kind may add where the other half of a request is."""

    bootstrap_host: Strings = None
    bootstrap_port: Integers = None
    bootstrap_room: Integers = None


class _BootstrapRow(Body):
    """The same for one prompt."""

    bootstrap_host: Annotated[str, Field(min_length=1, max_length=255)]
    bootstrap_port: Annotated[int | None, Field(ge=1, le=65535)] = None
    bootstrap_room: Annotated[int, Field(ge=0, lt=2**63)]


def bootstraps(
    body: BootstrappedBody, count: int, *, is_batch: bool, n: int
) -> list[Bootstrap | None]:
    """Return where the other half of each prompt is; None for all when no router chose.

    Args:
        n: Generations of each prompt, which must be one where a router chose: a room is for one.

    Raises:
        InvalidRequest: A field is wrong or missing, or two generations share a room.
    """
    if body.bootstrap_host is None and body.bootstrap_room is None:
        return [None] * count
    checked = rows(_BootstrapRow, body, count, is_batch=is_batch)
    if len({row.bootstrap_room for row in checked}) < count or n > 1:
        raise InvalidRequest("bootstrap_room: each generation needs a room of its own, and n is 1")
    return [
        Bootstrap(row.bootstrap_host, row.bootstrap_port, row.bootstrap_room) for row in checked
    ]


def rows(row_class: type[BodyT], body: Body, count: int, *, is_batch: bool) -> list[BodyT]:
    """Return the fields of `row_class` for each prompt: a scalar holds for all, a list for each.

    Raises:
        InvalidRequest: A list has not one entry for each prompt, or an entry is wrong.
    """
    names = list(row_class.model_fields)
    columns = [_column(getattr(body, name), count, name, is_batch=is_batch) for name in names]
    return [
        validate(row_class, dict(zip(names, values, strict=True)))
        for values in zip(*columns, strict=True)
    ]


def _column(value: object, count: int, name: str, *, is_batch: bool) -> list[object]:
    if not isinstance(value, list):
        return [value] * count
    if not is_batch or len(value) != count:
        raise InvalidRequest(f"{name}: must have one entry for each of {count} prompts")
    return value
