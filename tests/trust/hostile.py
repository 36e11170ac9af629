"""Messages of the right shape with values that nobody honest would send, made from the types themselves."""

from collections.abc import Mapping
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from msgspec import inspect

Any_ = st.SearchStrategy[Any]

# Whatever these tests do, they do for every example. `make properties` tries thousands.
FUZZ = settings(suppress_health_check=list(HealthCheck))

INTEGERS = [0, 1, 2, 3, -1, 7, 16, 17, 255, 65535, 65536]
INTEGERS += [2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
FLOATS = [0.0, 1.0, -1.0, 0.5, 1e-320, 1e308, -1e308, float("inf"), float("-inf"), float("nan")]
STRINGS = [
    "",
    "a",
    "b",
    "127.0.0.1",
    "*",
    "\0",
    "../..",
    "[::1",
    "tcp://127.0.0.1",
    "é" * 40,
    "x" * 5000,
]
# Small enough that thousands are tried; the limits on large ones have tests of their own.
MOST_ITEMS = 5


def frames_of(union: Any, hints: Mapping[str, Any_] | None = None) -> Any_:
    """Return frames of one direction of a link: messages of every kind, and bytes that are none.

    Args:
        hints: What fields of these names hold most of the time, so that much gets past the first check.
    """
    return _values(inspect.type_info(union), hints or {}).map(msgspec.msgpack.encode) | st.binary(
        max_size=60
    )


def _values(kind: inspect.Type, hints: Mapping[str, Any_]) -> Any_:
    match kind:
        case inspect.IntType():
            return st.sampled_from(INTEGERS)
        case inspect.FloatType():
            return st.sampled_from(FLOATS)
        case inspect.StrType():
            return st.sampled_from(STRINGS)
        case inspect.BytesType():
            return st.binary(max_size=60)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.UnionType(types=types):
            return st.one_of(*(_values(each, hints) for each in types))
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            items = _values(item, hints)
            return st.lists(items, max_size=MOST_ITEMS) | items.map(lambda one: [one] * 300)
        case inspect.TupleType(item_types=items_):
            return st.tuples(*(_values(each, hints) for each in items_))
        case inspect.DictType(key_type=keys, value_type=values_):
            return st.dictionaries(_values(keys, hints), _values(values_, hints), max_size=3)
        case inspect.StructType():
            return _structs(kind, hints)
        case _:
            raise AssertionError(f"no hostile values for {kind}")


def _structs(kind: inspect.StructType, hints: Mapping[str, Any_]) -> Any_:
    fields = {}
    for field in kind.fields:
        value = _values(field.type, hints)
        if (hint := hints.get(field.encode_name)) is not None:
            # Seven times out of eight: with all fields hostile, all would end at the first.
            value = st.integers(0, 7).flatmap(lambda n, h=hint, v=value: v if n == 0 else h)
        fields[field.encode_name] = value
    if kind.array_like:
        return st.tuples(*fields.values())
    tag = {} if kind.tag is None else {kind.tag_field: st.just(kind.tag)}
    optional = {f.encode_name for f in kind.fields if not f.required}
    required = {name: value for name, value in fields.items() if name not in optional}
    return st.fixed_dictionaries(tag | required, optional={name: fields[name] for name in optional})
