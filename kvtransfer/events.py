"""What the agents report to their roles, and how the reports of a room's members become one.

Each event names its room; the last of a room's events ends it. A member of a room is a link of one rank, or
a rank of one node: an agent makes one room of its links, and a node one room of its ranks' agents.

```
 open     every member does its part of the hand-off, and none failed
 ending   the room failed at a member or was given up; the others end it too, and one may still write
 over     every member reported its last event: no write of any can be under way
```

The role receives the last event when every member has reported its own. It is a good one only if all of
theirs were. A member that failed makes the others end as well, since the pages are the same on all.

Also how long hand-offs take, as the agent of each end sees them, for operators.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from typing_extensions import override

from tandem.telemetry.histogram import Histogram
from tandem.telemetry.log import get_logger
from tandem.wire.errors import PeerLost, TandemError
from tandem.wire.generation import Room, TokenLogprobs

log = get_logger("kvtransfer.events")

# ── prefill ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Granted:
    """Decode granted pages; it already holds the first `have_tokens` tokens of the prompt."""

    room: Room
    have_tokens: int


@dataclass(frozen=True, slots=True)
class PushDone:
    """Last: all KV is in decode's memory, and decode has been notified. The own pages may be reused."""

    room: Room
    pushed_bytes: int


@dataclass(frozen=True, slots=True)
class Released:
    """Last: the room ended without landing. The own pages may be reused.

    Attributes:
        error: Why; None when the role itself aborted it.
    """

    room: Room
    error: TandemError | None = None


SenderEvent = Granted | PushDone | Released

# ── decode ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Landed:
    """Last: the granted pages hold the prompt, and the checksums agree. They are the role's."""

    room: Room
    first_token: int
    seed: int
    cached_tokens: int
    first_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Last: the pages hold nothing of use, and no write can arrive. They may be reused."""

    room: Room
    error: TandemError


@dataclass(frozen=True, slots=True)
class Lost:
    """The hand-off failed, and a write may still arrive: quarantine the pages. `Safe` follows."""

    room: Room
    error: TandemError


@dataclass(frozen=True, slots=True)
class Safe:
    """Last, after `Lost` or a withdrawal: no write can arrive any more. The pages may be reused."""

    room: Room


ReceiverEvent = Landed | Failed | Lost | Safe

# ── rooms ────────────────────────────────────────────────────────────────────────────────────────

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

    def has_ended(self, member: int) -> bool:
        """Whether this member has reported its last event."""
        return member in self._ended

    @abstractmethod
    def hear(self, member: int, event: E) -> list[E]:
        """Take what a member reports that has not ended; return what the role is to receive."""

    def _end(self, member: int) -> bool:
        """Note the last event of a member; return whether it was the last of all."""
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
            case Safe():
                self._fail(None)
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
        wake: Called whenever something is reported.
    """

    def __init__(
        self,
        end: Callable[[Room, TandemError | None], None],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._end, self._wake = end, wake
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
        self._wake()

    def events(self) -> Iterator[E]:
        """Yield what became of queued reports, oldest first. An error of the reader loses no other."""
        for _ in range(len(self._reports)):
            member, num_members, event = self._reports.popleft()
            if (fan_in := self._fan_ins.get(event.room)) is not None:
                fan_in.num_members = num_members
            yield from self.hear(member, event)

    def hear(self, member: int, event: E) -> list[E]:
        """Take what a member reports; return what the role is to receive."""
        fan_in = self._fan_ins.get(event.room)
        if fan_in is None or fan_in.has_ended(member):
            # Only a bug reports this. Raised here, it would fail every request of the role.
            log.error("kv_room.unexpected_report", member=member, report=str(event))
            return []
        was_ending = fan_in.is_ending
        told = fan_in.hear(member, event)
        if fan_in.is_over:
            del self._fan_ins[event.room]
        elif fan_in.is_ending and not was_ending:
            self._end(fan_in.room, fan_in.error)
        return told


# ── times ────────────────────────────────────────────────────────────────────────────────────────

# From a page within one machine to a long prompt over a slow network, or a queue for pages.
_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
    *(0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)


@dataclass(eq=False)
class SenderTimes:
    """Times of a prefill agent's hand-offs. Its control thread writes, any thread may read.

    Attributes:
        bootstrap_seconds: From the request to the grant of its pages.
        push_seconds: From when the first pages of a room could be pushed to the end of its last
            write. Rooms of which decode had everything are left out.
        push_exposed_seconds: The part of it behind the last chunk, when nothing is computed beside it.
        num_lost_links: Decode nodes whose link broke or fell silent.
    """

    bootstrap_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    push_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    push_exposed_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    num_lost_links: int = 0


@dataclass(eq=False)
class ReceiverTimes:
    """Times of a decode agent's hand-offs. Its control thread writes, any thread may read.

    Attributes:
        granted_seconds: From a grant to the prompt in its pages. Until then they are of no use.
        num_lost_links: Prefill nodes whose link broke or fell silent.
    """

    granted_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    num_lost_links: int = 0
