"""The parts of a room: one for each link that it goes over. Pure.

```
 prefill, --tp 1   room ─┬─ part 0 ── link ──▶ decode, rank 0      ┐ two ranks of decode: each
                         └─ part 1 ── link ──▶ decode, rank 1      ┘ has one part of its own
```

A rank has several where the other node's ranks hold other heads than it does. Each part is a hand-off
of its own (`session.py`); `RoomFanIn` makes one of them towards the role. Until the other node is
known there is one part, which stands for all.
"""

from typing import NamedTuple

from tandem.kvtransfer.fan_in import GroupState, RoomFanIn
from tandem.wire.ids import Room


class Part(NamedTuple):
    """One room over one link."""

    room: Room
    number: int


class RoomParts:
    """How many parts a room has, and what they have in common.

    Attributes:
        fan_in: What all of them said.
        is_spread: Whether it is known how many there are.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._num_parts = 1
        self.fan_in = RoomFanIn(1)
        self.is_spread = False

    @property
    def parts(self) -> list[Part]:
        """All of them, those that are over included."""
        return [Part(self._room, number) for number in range(self._num_parts)]

    @property
    def has_ended(self) -> bool:
        """Whether the role was told the last word."""
        return self.fan_in.state is GroupState.OVER

    def spread(self, num_parts: int) -> list[Part]:
        """The other node is known: return the parts beside the first, which are new."""
        assert not self.is_spread
        self._num_parts, self.is_spread = num_parts, True
        if not self.has_ended:
            self.fan_in.widen(num_parts)
        return self.parts[1:]

    def reopen(self) -> None:
        """The role begins again with a room that has ended; a part may still answer for it."""
        assert self.has_ended
        self.fan_in = RoomFanIn(self._num_parts)
