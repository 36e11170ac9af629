"""Which conversation a request is a turn of, as clients and other routers' users say it.

A hint to the router, which may send the turns of one to the same nodes; so nothing here is refused.
"""

from collections.abc import Mapping
from typing import Any

# Those that clients of vLLM's and SGLang's routers send, the first that is there.
_HEADERS = ("X-Session-Id", "X-SMG-Routing-Key")
# Ours, then OpenAI's for just this, then the one it had before.
_FIELDS = ("session_id", "prompt_cache_key", "user")
# As long as an id of a request. What is longer is told apart by its beginning.
_MAX_CHARS = 256


def with_session(headers: Mapping[str, str], data: dict[str, Any]) -> dict[str, Any]:
    """Return a body in which the session that the headers name stands before any other."""
    for name in _HEADERS:
        if headers.get(name):
            return data | {"session_id": headers[name]}
    return data


def session_of(data: Mapping[str, object]) -> str:
    """Return the session that a body names, or empty."""
    for name in _FIELDS:
        value = data.get(name)
        if isinstance(value, str) and value:
            # A header may have bytes that are no text.
            return value[:_MAX_CHARS].encode(errors="replace").decode()
    return ""
