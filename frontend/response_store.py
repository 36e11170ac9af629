"""The conversations of stored responses, by which `previous_response_id` continues one. In memory, and bounded.

Each edge worker keeps its own, and asks the others for those that it does not have. A restart forgets all.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from tandem.wire.errors import TandemError

MAX_BYTES = 64 << 20
# Of one conversation. A longer one is not kept.
MAX_ENTRY_BYTES = 4 << 20


class ResponseNotFound(TandemError, code="response_not_found", status=404):
    """No response of this id is kept for the client's key."""

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"response {response_id!r} is not kept here: it was not stored, was dropped for newer ones, or the server "
            "restarted; send the whole conversation as input"
        )


class Stored(msgspec.Struct, frozen=True):
    """A response, as its client got it, and the messages up to its end."""

    response: msgspec.Raw
    messages: list[dict[str, Any]]


class Wanted(msgspec.Struct, frozen=True):
    """What one edge worker asks another.

    Attributes:
        owner: Digest of the client's key: nobody gets another key's responses.
    """

    owner: str
    response_id: str
    action: Literal["get", "delete"] = "get"


# Returns the entry of another edge worker, or None.
AskOthers = Callable[[Wanted], Awaitable[bytes | None]]


class ResponseStore:
    """Keeps the newest conversations up to `max_bytes` in all.

    Attributes:
        ask_others: Where else to look; None where this is the only edge worker.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.ask_others: AskOthers | None = None
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._entries: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def put(self, owner: str, response_id: str, stored: Stored) -> None:
        """Keep a response, unless it is too long; drop the oldest ones for it."""
        entry = msgspec.json.encode(stored)
        if len(entry) > min(MAX_ENTRY_BYTES, self._max_bytes):
            return
        self._take(owner, response_id)
        self._entries[owner, response_id] = entry
        self._num_bytes += len(entry)
        while self._num_bytes > self._max_bytes:
            self._take(*next(iter(self._entries)))

    async def find(self, wanted: Wanted) -> Stored:
        """Return a response that this or another edge worker keeps; delete it where that is wanted.

        Raises:
            ResponseNotFound: None does.
        """
        entry = self.own(wanted)
        if entry is None and self.ask_others is not None:
            entry = await self.ask_others(wanted)
        if entry is None:
            raise ResponseNotFound(wanted.response_id)
        return msgspec.json.decode(entry, type=Stored)

    def own(self, wanted: Wanted) -> bytes | None:
        """Return a response that this edge worker keeps, and do with it what is wanted."""
        if wanted.action == "delete":
            return self._take(wanted.owner, wanted.response_id)
        key = (wanted.owner, wanted.response_id)
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def _take(self, owner: str, response_id: str) -> bytes | None:
        entry = self._entries.pop((owner, response_id), None)
        self._num_bytes -= len(entry or b"")
        return entry
