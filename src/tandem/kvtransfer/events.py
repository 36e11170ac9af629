"""Events that agents report to their roles, and the merging of the reports of a room's members.

Each event names its room, and a room's last event ends the room. A member of a room is a link of one rank, or
a rank of one node. An agent merges the reports of its links; a node merges those of its ranks' agents.

```
 open     every member does its part of the hand-off, and none failed
 ending   a member failed or the role aborted; the other members end too, and may still write
 over     every member reported its last event: no write can be in flight
```

The role receives the room's last event once every member has reported its own. The room succeeds only if every
member did. If one member fails, the others end too, because all members share the same pages.

This module also holds the histograms of hand-off times of both ends.
"""

import time
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
class RoomGranted:
    """Decode granted pages; it already holds the first `have_tokens` tokens of the prompt."""

    room: Room
    have_tokens: int


@dataclass(frozen=True, slots=True)
class PushDone:
    """Last: all KV is in decode's memory, and decode is notified. Prefill's pages may be reused."""

    room: Room
    pushed_bytes: int


@dataclass(frozen=True, slots=True)
class RoomReleased:
    """Last: the room ended without landing. Prefill's pages may be reused.

    Attributes:
        error: The cause; None if the role itself aborted the room.
    """

    room: Room
    error: TandemError | None = None


SenderEvent = RoomGranted | PushDone | RoomReleased

# ── decode ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RoomLanded:
    """Last: the granted pages hold the prompt, and the checksums match. The role owns the pages.

    Attributes:
        prompt: Prefill's id of the prompt; 0: none.
    """

    room: Room
    first_token: int
    seed: int
    cached_tokens: int
    first_logprobs: TokenLogprobs | None = None
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class RoomFailed:
    """Last: the hand-off failed, and no write can arrive. The pages may be reused."""

    room: Room
    error: TandemError


@dataclass(frozen=True, slots=True)
class RoomLost:
    """The hand-off failed, and a write may still arrive: quarantine the pages. `RoomSafe` follows."""

    room: Room
    error: TandemError


@dataclass(frozen=True, slots=True)
class RoomSafe:
    """Last, after `RoomLost` or a withdrawal: no write can arrive any more. The pages may be reused."""

    room: Room


ReceiverEvent = RoomLanded | RoomFailed | RoomLost | RoomSafe

# ── rooms ────────────────────────────────────────────────────────────────────────────────────────

E = TypeVar("E", SenderEvent, ReceiverEvent)
LAST = (PushDone, RoomReleased, RoomLanded, RoomFailed, RoomSafe)
BAD = (RoomReleased, RoomFailed, RoomLost, RoomSafe)


@dataclass(eq=False, slots=True)
class OpenRoom(Generic[E]):
    """The merged state of one room's members.

    Attributes:
        num_members: May grow, but only before the new member reports its first event.
        num_granted: Members that reported `RoomGranted`.
        last: The last event of each finished member.
        ending_since_s: When the room failed or was aborted; the remaining members end too. None: neither.
        error: The first error that a member reported; None if the role aborted the room.
    """

    num_members: int
    num_granted: int = 0
    last: dict[int, E] = field(default_factory=dict)
    ending_since_s: float | None = None
    error: TandemError | None = None

    @property
    def is_ending(self) -> bool:
        """Whether the room has failed or was aborted."""
        return self.ending_since_s is not None

    @property
    def is_over(self) -> bool:
        """Whether every member has reported its last event."""
        return len(self.last) == self.num_members


class OpenRooms(ABC, Generic[E]):
    """The rooms that a role has opened and not yet seen end. Use on the role's thread only.

    After a role cancels a room, it receives only the room's last event.

    Args:
        end: Ends a room on all its members; called at most once per room.
        wake: Called after each report.
    """

    def __init__(
        self,
        end: Callable[[Room, TandemError | None], None],
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end, self._wake, self._clock = end, wake, clock
        self._rooms: dict[Room, OpenRoom[E]] = {}
        self._reports: deque[tuple[int, int, E]] = deque()

    def open(self, room: Room, num_members: int = 1) -> None:
        """Register a new room."""
        self._rooms[room] = OpenRoom(num_members)

    def cancel(self, room: Room, error: TandemError | None) -> None:
        """End a room on all members; no-op when it is over."""
        if (known := self._rooms.get(room)) is not None:
            known.error = None
            if not known.is_ending:
                known.ending_since_s = self._clock()
                self._end(room, error)

    def ending_s(self) -> float:
        """Return the seconds since the first unfinished room failed or was aborted; 0: none. Thread-safe.

        The pages of such a room may still be read or written.
        """
        since = [room.ending_since_s for room in list(self._rooms.values())]
        return max((self._clock() - each for each in since if each is not None), default=0.0)

    def report(self, member: int, num_members: int, event: E) -> None:
        """Queue a member's event and wake the role. Any thread may call it."""
        self._reports.append((member, num_members, event))
        self._wake()

    def events(self) -> Iterator[E]:
        """Yield the merged events, oldest first. If the caller stops early, the other reports stay queued."""
        for _ in range(len(self._reports)):
            member, num_members, event = self._reports.popleft()
            if (room := self._rooms.get(event.room)) is not None:
                room.num_members = num_members
            if (merged := self.apply(member, event)) is not None:
                yield merged

    def apply(self, member: int, event: E) -> E | None:
        """Apply a member's event; return the event for the role, if any."""
        room = self._rooms.get(event.room)
        if room is None or member in room.last:
            # This is a bug. An exception here would fail every request of the role.
            log.error("kv_room.unexpected_report", member=member, report=str(event))
            return None
        is_first_failure = isinstance(event, BAD) and not room.is_ending
        if is_first_failure:
            room.ending_since_s, room.error = self._clock(), getattr(event, "error", None)
        room.num_granted += isinstance(event, RoomGranted)
        if isinstance(event, LAST):
            room.last[member] = event
        if room.is_over:
            del self._rooms[event.room]
        elif is_first_failure:
            self._end(event.room, room.error)
        return self._outcome(room, event, is_first_failure=is_first_failure)

    @abstractmethod
    def _outcome(self, room: OpenRoom[E], event: E, *, is_first_failure: bool) -> E | None:
        """Return the role's event, if any. `is_first_failure`: with this event the room starts to end."""


class PushRooms(OpenRooms[SenderEvent]):
    """The rooms of a role at prefill."""

    @override
    def _outcome(
        self, room: OpenRoom[SenderEvent], event: SenderEvent, *, is_first_failure: bool
    ) -> SenderEvent | None:
        if isinstance(event, RoomGranted):
            is_all = room.num_granted == room.num_members
            return event if is_all and not room.is_ending else None
        if not room.is_over:
            return None
        if room.is_ending:
            return RoomReleased(event.room, room.error)
        pushed = [each.pushed_bytes for each in room.last.values() if isinstance(each, PushDone)]
        return PushDone(event.room, sum(pushed))


class LandRooms(OpenRooms[ReceiverEvent]):
    """The rooms of a role at decode. The role receives member 0's `RoomLanded`, which has the most fields."""

    @override
    def _outcome(
        self, room: OpenRoom[ReceiverEvent], event: ReceiverEvent, *, is_first_failure: bool
    ) -> ReceiverEvent | None:
        if is_first_failure:
            kind = RoomFailed if room.is_over else RoomLost
            return kind(event.room, room.error or PeerLost("prefill gave the request up"))
        if not room.is_over:
            return None
        return RoomSafe(event.room) if room.is_ending else room.last[0]


# ── times ────────────────────────────────────────────────────────────────────────────────────────

# Bounds, from one page within a machine to a long prompt over a slow network, or a queue for pages.
_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
    *(0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)


@dataclass(eq=False)
class SenderTimes:
    """Times of a prefill agent's hand-offs. Its control thread writes, any thread may read.

    Attributes:
        bootstrap_seconds: From the request to the grant of its pages.
        push_seconds: From the first `push` of a room until the room has landed. Rooms without any
            pushed bytes are left out.
        push_exposed_seconds: The part of `push_seconds` after the last chunk was computed.
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
        granted_seconds: From a grant to the prompt in its pages. The pages are unusable until then.
        num_lost_links: Prefill nodes whose link broke or fell silent.
    """

    granted_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    num_lost_links: int = 0
