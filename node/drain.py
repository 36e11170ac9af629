"""What an engine's loop does with a drain: takes nothing new, hands over at the deadline, says when it is empty.

```
 off ──begin──▶ on: finishing ──deadline──▶ on: handed over
  ▲                └── nothing left, answers read ──┴──▶ told once
  └──end── from anywhere
```

Pure, with the time given. What parent and engine tell each other of it is in `engine_report.py`.
"""

from typing_extensions import override

from tandem.wire.errors import NodeDraining
from tandem.wire.messages import NodeLoad

# An edge worker that stands still may read its last answers later, or never: it starts those requests anew.
UNREAD_S = 2.0


def refusal() -> NodeDraining:
    """Return what a request is told that comes during a drain."""
    return NodeDraining("this node is draining and takes no requests: send it to another, or again")


def hand_over() -> NodeDraining:
    """Return what a request is told that is not finished in time."""
    return NodeDraining("this node is draining and hands its requests over: another goes on")


def num_left(load: NodeLoad) -> int:
    """Return how many requests a node still has to do with, the clients' or not."""
    return load.num_running + load.num_waiting + load.num_transferring


class Drain:
    """One engine's drain, over all that were asked for."""

    def __init__(self) -> None:
        self._number = 0
        self._deadline_s = 0.0
        self._is_handed_over = False
        self._is_told = False
        self._empty_since_s: float | None = None
        self.is_on = False

    @override
    def __repr__(self) -> str:
        return f"<Drain {self._number} {'on' if self.is_on else 'off'}>"

    def begin(self, number: int, timeout_s: float, now_s: float) -> None:
        """Take nothing new. One that is on already gets the new deadline.

        Args:
            number: Of the order, which `take_end` returns.
        """
        self._number, self._deadline_s = number, now_s + timeout_s
        self._is_handed_over = self._is_told = False
        self._empty_since_s = None
        self.is_on = True

    def end(self) -> None:
        """Take requests again."""
        self.is_on = False

    def take_hand_over(self, now_s: float) -> bool:
        """Tell, once, that the deadline has passed."""
        is_due = self.is_on and not self._is_handed_over and now_s >= self._deadline_s
        self._is_handed_over |= is_due
        return is_due

    def take_end(self, num_left: int, now_s: float, *, is_read: bool) -> int | None:
        """Return, once, the order's number when nothing is left.

        Args:
            is_read: Whether the last answers were. What is not when a link is closed, its far side drops.
        """
        if not self.is_on or self._is_told or num_left:
            return None
        if self._empty_since_s is None:
            self._empty_since_s = now_s
        if not is_read and now_s < self._empty_since_s + UNREAD_S:
            return None
        self._is_told = True
        return self._number
