"""JSON text of clients: no NaN, no infinities, and no deeper than functions that call themselves can follow."""

import re
from typing import Any

import msgspec

MAX_DEPTH = 200
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_AS_LISTS = bytes.maketrans(b"{}", b"[]")


def decode(text: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is not valid JSON, or has more than `MAX_DEPTH` levels.
    """
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        _check_depth(text)
    return msgspec.json.decode(text)


def _check_depth(text: bytes) -> None:
    brackets = _STRINGS.sub(b"", text).translate(_AS_LISTS, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        if b"[]" not in brackets:
            break
        brackets = brackets.replace(b"[]", b"")  # removes the innermost level
    if brackets:
        raise ValueError(f"brackets do not match, or have more than {MAX_DEPTH} levels")
