"""A room over several members, as one. No I/O, no clock.

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
from collections import deque
from collections.abc import Callable, Iterator
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
from tandem.wire.channel import Waker
from tandem.wire.errors import PeerLost, TandemError
from tandem.wire.generation import Room

E = TypeVar("E", SenderEvent, ReceiverEvent)


class RoomFanIn(ABC, Generic[E]):
    """One room over its members.

    Attributes:
        num_members: Grows before the first member that is new reports anything.
        is_ending: The room cannot end well any more; the live members end it, too.
        error: The first that a member reported; None when the role gave the room up.
    """

    def __init__(self, room: Room, num_members: int = 1) -> None:
        self.room, self.num_members = room, num_members
        self._ended: set[int] = set()
        self.is_ending = False
        self.error: TandemError | None = None

    @property
    def is_over(self) -> bool:
        """Whether every member has reported its last event."""
        return len(self._ended) == self.num_members

    def give_up(self) -> None:
        """The role wants an end."""
        self.is_ending, self.error = True, None

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
        name, ended = type(self).__name__, sorted(self._ended)
        return f"{name}({self.room}, ending={self.is_ending}, {ended=}, error={self.error!r})"


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
                is_all = len(self._granted) == self.num_members
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


class OpenRooms(Generic[E]):
    """The rooms that a role has begun and whose end it has not received. Belongs to the role's thread.

    A role may give a room up while events of it are queued: it then receives the last one only.

    Args:
        end: Has all members end a room; called once for each.
        waker: Rung whenever something is reported.
    """

    def __init__(
        self, end: Callable[[Room, TandemError | None], None], waker: Waker | None = None
    ) -> None:
        self._end, self._waker = end, waker
        self._fan_ins: dict[Room, RoomFanIn[E]] = {}
        self._reports: deque[tuple[int, int, E]] = deque()

    def open(self, fan_in: RoomFanIn[E]) -> None:
        """The role began with a room."""
        self._fan_ins[fan_in.room] = fan_in

    def give_up(self, room: Room, error: TandemError | None) -> None:
        """End a room on all members; no-op when it is over."""
        if (fan_in := self._fan_ins.get(room)) is not None:
            was_ending = fan_in.is_ending
            fan_in.give_up()
            if not was_ending:
                self._end(room, error)

    def report(self, member: int, num_members: int, event: E) -> None:
        """Queue what a member reports, and ring. Any thread may call it."""
        self._reports.append((member, num_members, event))
        if self._waker is not None:
            self._waker.wake()

    def events(self) -> Iterator[E]:
        """Yield what became of queued reports, oldest first. An error of the reader loses no other."""
        for _ in range(len(self._reports)):
            member, num_members, event = self._reports.popleft()
            self._fan_ins[event.room].num_members = num_members
            yield from self.hear(member, event)

    def hear(self, member: int, event: E) -> list[E]:
        """Take what a member reports; return what the role is to receive."""
        fan_in = self._fan_ins[event.room]
        was_ending = fan_in.is_ending
        told = fan_in.hear(member, event)
        if fan_in.is_over:
            del self._fan_ins[event.room]
        elif fan_in.is_ending and not was_ending:
            self._end(fan_in.room, fan_in.error)
        return told
