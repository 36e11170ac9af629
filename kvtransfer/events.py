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
LAST = (PushDone, Released, Landed, Failed, Safe)
BAD = (Released, Failed, Lost, Safe)


@dataclass(eq=False, slots=True)
class OpenRoom(Generic[E]):
    """One room over its members.

    Attributes:
        num_members: Grows before the first member that is new reports anything.
        num_granted: Members that reported `Granted`.
        last: What each member that has ended reported last.
        is_ending: The room cannot end well any more; the live members end it, too.
        error: The first that a member reported; None when the role gave the room up.
    """

    num_members: int
    num_granted: int = 0
    last: dict[int, E] = field(default_factory=dict)
    is_ending: bool = False
    error: TandemError | None = None

    @property
    def is_over(self) -> bool:
        """Whether every member has reported its last event."""
        return len(self.last) == self.num_members


class OpenRooms(ABC, Generic[E]):
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
        self._rooms: dict[Room, OpenRoom[E]] = {}
        self._reports: deque[tuple[int, int, E]] = deque()

    def open(self, room: Room, num_members: int = 1) -> None:
        """The role began with a room."""
        self._rooms[room] = OpenRoom(num_members)

    def give_up(self, room: Room, error: TandemError | None) -> None:
        """End a room on all members; no-op when it is over."""
        if (known := self._rooms.get(room)) is not None:
            was_ending, known.is_ending, known.error = known.is_ending, True, None
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
            if (room := self._rooms.get(event.room)) is not None:
                room.num_members = num_members
            if (told := self.hear(member, event)) is not None:
                yield told

    def hear(self, member: int, event: E) -> E | None:
        """Take what a member reports; return what the role is to receive, if anything."""
        room = self._rooms.get(event.room)
        if room is None or member in room.last:
            # Only a bug reports this. Raised here, it would fail every request of the role.
            log.error("kv_room.unexpected_report", member=member, report=str(event))
            return None
        is_turn = isinstance(event, BAD) and not room.is_ending
        if is_turn:
            room.is_ending, room.error = True, getattr(event, "error", None)
        room.num_granted += isinstance(event, Granted)
        if isinstance(event, LAST):
            room.last[member] = event
        if room.is_over:
            del self._rooms[event.room]
        elif is_turn:
            self._end(event.room, room.error)
        return self._outcome(room, event, is_turn=is_turn)

    @abstractmethod
    def _outcome(self, room: OpenRoom[E], event: E, *, is_turn: bool) -> E | None:
        """Return what the role receives after this event, with which the room may have begun to end."""


class PushRooms(OpenRooms[SenderEvent]):
    """The rooms of a role at prefill."""

    @override
    def _outcome(
        self, room: OpenRoom[SenderEvent], event: SenderEvent, *, is_turn: bool
    ) -> SenderEvent | None:
        if isinstance(event, Granted):
            is_all = room.num_granted == room.num_members
            return event if is_all and not room.is_ending else None
        if not room.is_over:
            return None
        if room.is_ending:
            return Released(event.room, room.error)
        pushed = [each.pushed_bytes for each in room.last.values() if isinstance(each, PushDone)]
        return PushDone(event.room, sum(pushed))


class LandRooms(OpenRooms[ReceiverEvent]):
    """The rooms of a role at decode. Of several `Landed` that of member 0 counts: it reports the most."""

    @override
    def _outcome(
        self, room: OpenRoom[ReceiverEvent], event: ReceiverEvent, *, is_turn: bool
    ) -> ReceiverEvent | None:
        if is_turn:
            kind = Failed if room.is_over else Lost
            return kind(event.room, room.error or PeerLost("prefill gave the request up"))
        if not room.is_over:
            return None
        return Safe(event.room) if room.is_ending else room.last[0]


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
