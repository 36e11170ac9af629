"""Bodies of HTTP requests: bytes to a checked model, or one short sentence on what is wrong.

Holds the base of every body and the translation of pydantic's errors. What each API's body has is
in `frontend/native_body.py` and `frontend/openai_body.py`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import pydantic_core
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)

from tandem.wire.errors import InvalidRequest

BodyT = TypeVar("BodyT", bound="Body")
T = TypeVar("T")
# A list that is refused for its first wrong entry: naming all of a million takes many seconds.
Many: TypeAlias = Annotated[list[T], FailFast()]

# Many times what any API has; a body is copied for each of its prompts.
MAX_FIELDS = 1000
# Lists, objects and their fields in all, counted before they are parsed: 30 MiB of `[]` would take
# seconds of the loop and a GB. Brackets and colons within texts count too: no context holds a text
# with so many.
MAX_PARTS = 500_000

# How people say what pydantic's error types say.
_SENTENCES = {
    "missing": "is missing",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
}


# Of the waiting, higher ones go first; what is beyond cannot be compared in 32 bits.
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
# As long as an id of a request: a salt is a tenant's name or a hash.
CacheSalt = Annotated[str, Field(max_length=256)]


class Body(BaseModel):
    """Base of bodies: strict types, unknown fields ignored, null the same as absent."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return the names by which clients may send its fields."""
        found: set[str] = set()
        for name, field in cls.model_fields.items():
            match field.validation_alias:
                case AliasChoices(choices=choices):
                    found.update(map(str, choices))
                case alias:
                    found.add(name if alias is None else str(alias))
        return frozenset(found)


def read_json(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`. NaN and infinities are read, to be refused by name.

    Raises:
        InvalidRequest: It is empty, not JSON, no object, or one of too many fields or parts.
    """
    if not data.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    if len(data) > MAX_PARTS and sum(map(data.count, (b"{", b"[", b":"))) > MAX_PARTS:
        raise InvalidRequest(f"the body has more than {MAX_PARTS} lists, objects and fields")
    try:
        value = pydantic_core.from_json(data)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    if len(value) > MAX_FIELDS:
        raise InvalidRequest(f"the body has {len(value)} fields; at most {MAX_FIELDS} may be")
    return value


def validate(body_class: type[BodyT], data: Mapping[str, object], prefix: str = "") -> BodyT:
    """Return `data` as a body.

    Args:
        prefix: Put before the field's name in an error, such as `sampling_params`.

    Raises:
        InvalidRequest: A field is wrong; the sentence names it.
    """
    try:
        return body_class.model_validate(data)
    except ValidationError as error:
        raise InvalidRequest(_sentence(error, prefix)) from error


def _sentence(error: ValidationError, prefix: str) -> str:
    """Name the first wrong field and what it must be."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in (prefix, *first["loc"]) if part != "")
    template = _SENTENCES.get(first["type"])
    said = template.format(**first.get("ctx", {})) if template else first["msg"]
    return f"{field}: {said.removeprefix('Value error, ')}" if field else said
