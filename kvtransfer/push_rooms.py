"""The rooms of a prefill agent, with their parts. No sockets, no threads."""

from collections import Counter

from tandem.kvtransfer.bootstrap import DecodeLink
from tandem.kvtransfer.parts import Part
from tandem.kvtransfer.push_room import PushParts, PushRoom
from tandem.kvtransfer.session import SenderState
from tandem.wire.ids import Room


class PushRooms:
    """Knows a room until the last of its parts is over.

    All but `states` belongs to one thread.
    """

    def __init__(self) -> None:
        self._rooms: dict[Room, PushParts] = {}
        self._parts: dict[Part, PushRoom] = {}  # those that are not over

    def states(self) -> Counter[SenderState]:
        """Return how many parts are in each state."""
        return Counter(entry.session.state for entry in list(self._parts.values()))

    def room(self, room: Room) -> PushParts | None:
        """Return a room, unless it is over."""
        return self._rooms.get(room)

    def part(self, part: Part) -> PushRoom | None:
        """Return a part, unless it is over."""
        return self._parts.get(part)

    def parts(self) -> list[tuple[Part, PushRoom]]:
        """Return all parts that are not over."""
        return list(self._parts.items())

    def expect(self, room: Room, now_s: float, deadline_s: float) -> list[Part]:
        """The role asked for a room: return its parts.

        Args:
            deadline_s: Of those that nobody granted yet.
        """
        entry = self._rooms.setdefault(room, PushParts(room))
        entry.expect(now_s)
        # All of them before any moves: the room is forgotten with its last part.
        for part in entry.parts:
            if part not in self._parts:
                self._parts[part] = PushRoom(deadline_s)
        return entry.parts

    def grant_fault(self, part: Part, link: DecodeLink) -> str:
        """Return why a part cannot be granted over this link, or an empty string."""
        room, entry = self._rooms.get(part.room), self._parts.get(part)
        if entry is not None and entry.grant is not None:
            return "this room is granted already"
        if room is None or not room.is_spread:
            return ""
        if len(room.parts) != link.num_parts:
            return "this room is granted by a node of another size"
        if entry is None and room.is_expected and not room.has_ended:
            return "this room is over"
        return ""

    def granted(self, part: Part, link: DecodeLink, deadline_s: float) -> PushRoom:
        """Return a part that is granted now, over this link.

        Args:
            deadline_s: If the role has not asked for the room yet.
        """
        self._spread(part.room, link)
        return self._parts.get(part) or self._parts.setdefault(part, PushRoom(deadline_s))

    def end(self, part: Part) -> None:
        """A part is over."""
        self._parts.pop(part, None)
        if not any(each in self._parts for each in self._rooms[part.room].parts):
            del self._rooms[part.room]

    def _spread(self, room: Room, link: DecodeLink) -> None:
        """Make the parts of a room, once it is known of how many ranks decode is."""
        entry = self._rooms.setdefault(room, PushParts(room))
        if entry.is_spread:
            return
        first = self._parts.get(Part(room, 0))
        for part in entry.spread(link.num_parts):
            if first is not None:  # the role asked for the room already
                self._parts[part] = first.twin()
