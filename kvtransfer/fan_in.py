"""One room over several members, as one: a pure state machine. No I/O, no clock.

```
 open     every member does its part of the hand-off, and none failed
 ending   the room failed at a member or was given up; the others end it too, and one may still write
 over     every member reported its last event: no write of any can be under way
```

A member is a link of one rank, or a rank of one node. Both report the same events as the whole: an agent
makes one room of its links, and a node one room of its ranks' agents. The role receives the last event
when every member has reported its own. It is a good one only if all of theirs were. A member that failed
makes the others end as well, since the pages are the same on all.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from typing_extensions import override

from tandem.kvtransfer.events import (
    Failed,
    Granted,
    Landed,
    Lost,
    PushDone,
    ReceiverEvent,
    Released,
    Safe,
    SenderEvent,
)
from tandem.wire.errors import PeerLost, TandemError
from tandem.wire.generation import Room

E = TypeVar("E")


class RoomFanIn(ABC, Generic[E]):
    """One room over its members.

    Attributes:
        is_ending: The room cannot end well any more. Its driver ends the live members once.
        error: The first that a member reported; None when the role gave the room up before.
    """

    def __init__(self, room: Room, num_members: int = 1) -> None:
        self.room = room
        self._num_members = num_members
        self._ended: set[int] = set()
        self.is_ending = False
        self.error: TandemError | None = None

    @property
    def live_members(self) -> list[int]:
        """Members without a last event: a write may be under way there."""
        return [member for member in range(self._num_members) if member not in self._ended]

    @property
    def is_over(self) -> bool:
        """Whether every member has reported its last event."""
        return len(self._ended) == self._num_members

    def widen(self, num_members: int) -> None:
        """There are more members than was known; none of them has reported anything yet."""
        assert not self.is_over, "a room that is over has no more members"
        self._num_members = num_members

    def give_up(self) -> None:
        """The role wants an end."""
        assert not self.is_over, "a room that is over was given up"
        self.is_ending = True

    @abstractmethod
    def hear(self, member: int, event: E) -> list[E]:
        """Take what a member reports; return what the role is to receive."""

    def _end(self, member: int) -> bool:
        """Note the last event of a member; return whether it was the last of all."""
        assert member not in self._ended, f"member {member} ended twice"
        self._ended.add(member)
        return self.is_over

    def _fail(self, error: TandemError | None) -> None:
        if not self.is_ending:
            self.is_ending, self.error = True, error

    @override
    def __repr__(self) -> str:
        name, live = type(self).__name__, self.live_members
        return f"{name}({self.room}, ending={self.is_ending}, live={live}, error={self.error!r})"


class PushFanIn(RoomFanIn[SenderEvent]):
    """A room at prefill."""

    def __init__(self, room: Room, num_members: int = 1) -> None:
        super().__init__(room, num_members)
        self._granted: set[int] = set()
        self._pushed_bytes = 0

    @override
    def hear(self, member: int, event: SenderEvent) -> list[SenderEvent]:
        match event:
            case Granted():
                self._granted.add(member)
                is_all = len(self._granted) == self._num_members
                return [event] if is_all and not self.is_ending else []
            case PushDone():
                self._pushed_bytes += event.pushed_bytes
            case Released():
                self._fail(event.error)
        if not self._end(member):
            return []
        if self.is_ending:
            return [Released(self.room, self.error)]
        return [PushDone(self.room, self._pushed_bytes)]


class LandFanIn(RoomFanIn[ReceiverEvent]):
    """A room at decode. Of several `Landed` that of member 0 counts: it reports the most."""

    def __init__(self, room: Room, num_members: int = 1) -> None:
        super().__init__(room, num_members)
        self._landed: Landed | None = None

    @override
    def hear(self, member: int, event: ReceiverEvent) -> list[ReceiverEvent]:
        was_ending = self.is_ending
        match event:
            case Landed() if member == 0:
                self._landed = event
            case Failed() | Lost():
                self._fail(event.error)
            case _:
                pass
        is_over = not isinstance(event, Lost) and self._end(member)
        if self.is_ending and not was_ending:
            error = self.error or PeerLost("prefill gave the request up")
            return [Failed(self.room, error) if is_over else Lost(self.room, error)]
        if not is_over:
            return []
        if self.is_ending:
            return [Safe(self.room)]
        assert self._landed is not None
        return [self._landed]
