"""Error messages for fields: the path and the allowed values. Null fields count as absent."""

from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, field

from tandem.frontend.chat.body import Body, validate
from tandem.wire.errors import InvalidRequest


class Text(Body, tag="text"):
    text: str
    form: Literal["plain", "rich"] = "plain"


class Call(Body, tag="call"):
    form: Literal["json"]
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "bad" in self.arguments:
            raise ValueError("arguments: must be good")


class Request(Body, kw_only=True):
    parts: list[Text | Call]
    stop: str | Annotated[list[str], Meta(max_length=2)] = ""
    count: Annotated[int, Meta(ge=1)] = 1
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    choice: Literal["auto", "none"] | Text = "auto"


TEXT = {"type": "text", "text": "a"}
REFUSED = {
    "missing": ({"parts": [TEXT, {"type": "text"}]}, "b.parts.1.text: is missing"),
    "no tag": ({"parts": [{"text": "a"}]}, "b.parts.0.type: is missing"),
    "tag": (
        {"parts": [{"type": "image"}]},
        "b.parts.0.type: 'image' is not supported; use 'text', 'call'",
    ),
    "tag of another type": ({"parts": [{"type": 5}]}, "b.parts.0.type: must be 'text' or 'call'"),
    "value of this member": (
        {"parts": [TEXT | {"form": "x"}]},
        "b.parts.0.form: must be 'plain' or 'rich'",
    ),
    "value of the other member": (
        {"parts": [{"type": "call", "form": 1}]},
        "b.parts.0.form: must be 'json'",
    ),
    "a struct's own check": (
        {"parts": [{"type": "call", "form": "json", "arguments": {"bad": 1}}]},
        "b.parts.0.arguments: must be good",
    ),
    "either type": ({"stop": 5}, "b.stop: must be a string or a list"),
    "entries": ({"stop": ["a"] * 3}, "b.stop: must have at most 2 entries"),
    "bound": ({"count": 0}, "b.count: must be at least 1"),
    "integer": ({"count": 1.0}, "b.count: must be an integer"),
    "truth": ({"count": True}, "b.count: must be an integer"),
    "bound of a number": ({"share": 0}, "b.share: must be more than 0"),
    "beyond numbers": ({"share": 10**400}, "b.share: must be a finite number"),
    "key": ({"bias": {"a": 1}}, "b.bias: each key must be an integer"),
    "entry": ({"bias": {"5": "a"}}, "b.bias: each value must be a number"),
    "value or object": ({"choice": 5}, "b.choice: must be 'auto', 'none' or an object"),
    "value with our words": (
        {"parts": [TEXT | {"form": "x - at `$.a.b`"}]},
        "b.parts.0.form: must be 'plain' or 'rich'",
    ),
    "long tag with our words": (
        {"parts": [{"type": "x - at `$.a.b`" * 99}]},
        f"b.parts.0.type: {repr('x - at `$.a.b`' * 99)[:64]} is not supported; use 'text', 'call'",
    ),
    "null entry": ({"parts": [None]}, "b.parts.0: must be an object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_error_names_the_field_and_the_allowed_values(name):
    fields, sentence = REFUSED[name]
    with pytest.raises(InvalidRequest) as caught:
        validate(Request, {"parts": []} | fields, "b")
    assert str(caught.value) == sentence


def test_null_is_absent_except_in_free_form_objects():
    call = {"type": "call", "form": "json", "arguments": {"x": None}, "unknown": None}
    sent = {"parts": [TEXT | {"form": None}, call], "count": None, "choice": TEXT | {"form": None}}
    read = validate(Request, sent)
    assert read == Request(
        parts=[Text("a"), Call("json", {"x": None})], choice=Text("a", form="plain")
    )
    assert sent["parts"][0]["form"] is None  # the client's object is not changed
