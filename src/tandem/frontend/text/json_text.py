"""JSON of clients, without NaN and infinities, and no deeper than recursive functions can process."""

from typing import Any

import msgspec

MAX_DEPTH = 200
_CONTAINERS = frozenset({dict, list})


def decode(text: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is not valid JSON, or has more than `MAX_DEPTH` levels.
    """
    try:
        value = msgspec.json.decode(text)
        if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
            _check_depth(value)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return value


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        level = [
            each
            for part in level
            for each in (part.values() if type(part) is dict else part)
            if type(each) in _CONTAINERS
        ]
        depth += 1
        if depth > MAX_DEPTH:
            raise RecursionError(f"it has more than {MAX_DEPTH} levels")
