"""One room on all ranks, or over all links of a rank, as one: a pure state machine. No I/O, no clock.

```
 OPEN     every rank does its part of the hand-off, and none failed
 ENDING   the room failed on a rank or was given up; the others are told, and one may still write
 OVER     every rank said its last word: no write of any can be under way
```

What happened on one rank is counted by `RoomFanIn`, which turns it into the few events of the table.
What is said of ranks here holds for the links of one rank as well (`parts.py`).
The rule: the last word to the role is said when every rank has said its own, and is good only if
all of theirs were. A rank that failed makes the others end as well, since pages are the same on all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from typing_extensions import override

from tandem.wire.errors import TandemError


class GroupState(Enum):
    """Where a room is, over all ranks."""

    OPEN = "open"
    ENDING = "ending"
    OVER = "over"


class GroupEvent(Enum):
    """What changes that."""

    ALL_GRANTED = "all granted"
    """Prefill: the last rank was granted its pages."""
    ONE_FAILED = "one failed"
    """A rank said its last word and it was a bad one, or that it will be."""
    GIVEN_UP = "given up"
    """The role wants an end."""
    ALL_ENDED = "all ended"
    """The last rank said its last word."""


class GroupAction(Enum):
    """What the driver does. END goes to ranks, TELL to the role."""

    TELL_GRANTED = "tell granted"
    END_OTHERS = "end the others"
    TELL_LOST = "tell lost"
    TELL_DONE = "tell done"
    TELL_ENDED = "tell ended"


Arrow = tuple[GroupState, tuple[GroupAction, ...]]

_S, _E, _A = GroupState, GroupEvent, GroupAction

TRANSITIONS: Mapping[GroupState, Mapping[GroupEvent, Arrow]] = {
    _S.OPEN: {
        _E.ALL_GRANTED: (_S.OPEN, (_A.TELL_GRANTED,)),
        _E.ONE_FAILED: (_S.ENDING, (_A.END_OTHERS, _A.TELL_LOST)),
        _E.GIVEN_UP: (_S.ENDING, (_A.END_OTHERS,)),
        _E.ALL_ENDED: (_S.OVER, (_A.TELL_DONE,)),
    },
    _S.ENDING: {
        _E.ALL_GRANTED: (_S.ENDING, ()),  # the grant crossed with the end
        _E.ONE_FAILED: (_S.ENDING, ()),
        _E.GIVEN_UP: (_S.ENDING, ()),
        _E.ALL_ENDED: (_S.OVER, (_A.TELL_ENDED,)),
    },
    _S.OVER: {},
}


@dataclass(slots=True)
class _Rank:
    is_granted: bool = False
    has_ended: bool = False


class RoomFanIn:
    """One room over all ranks.

    Each method returns what to do, in order.

    Attributes:
        error: The first that a rank gave; None when the role gave the room up before.
    """

    def __init__(self, num_ranks: int) -> None:
        self._ranks = [_Rank() for _ in range(num_ranks)]
        self.state = GroupState.OPEN
        self.error: TandemError | None = None

    @property
    def live_ranks(self) -> list[int]:
        """Ranks that have not said their last word: a write may be under way there."""
        return [number for number, rank in enumerate(self._ranks) if not rank.has_ended]

    def widen(self, num_ranks: int) -> None:
        """There are more ranks than was known; none has said anything yet."""
        assert self.state is not GroupState.OVER, "a room that is over has no more ranks"
        self._ranks += [_Rank() for _ in range(num_ranks - len(self._ranks))]

    def granted(self, rank: int) -> list[GroupAction]:
        """A rank's pages were granted."""
        self._ranks[rank].is_granted = True
        return self._apply(_E.ALL_GRANTED) if all(r.is_granted for r in self._ranks) else []

    def ended(self, rank: int) -> list[GroupAction]:
        """A rank said its last word, and it is well."""
        assert not self._ranks[rank].has_ended, f"rank {rank} ended twice"
        self._ranks[rank].has_ended = True
        return [] if self.live_ranks else self._apply(_E.ALL_ENDED)

    def lost(self, error: TandemError | None) -> list[GroupAction]:
        """A rank failed; its last word is still to come."""
        if self.state is GroupState.OPEN:
            self.error = error
        return self._apply(_E.ONE_FAILED)

    def failed(self, rank: int, error: TandemError | None) -> list[GroupAction]:
        """A rank said its last word, and it is a bad one."""
        # Marked first: the rank needs no order to end.
        assert not self._ranks[rank].has_ended, f"rank {rank} ended twice"
        self._ranks[rank].has_ended = True
        actions = self.lost(error)
        return actions if self.live_ranks else actions + self._apply(_E.ALL_ENDED)

    def give_up(self) -> list[GroupAction]:
        """The role wants an end."""
        return self._apply(_E.GIVEN_UP)

    def _apply(self, event: GroupEvent) -> list[GroupAction]:
        arrow = TRANSITIONS[self.state].get(event)
        assert arrow is not None, f"{event.name} in state {self.state.name}"
        self.state, actions = arrow
        return list(actions)

    @override
    def __repr__(self) -> str:
        return f"RoomFanIn({self.state.name}, live={self.live_ranks}, error={self.error!r})"
