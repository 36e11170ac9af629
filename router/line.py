"""Requests that wait for room, in the order in which they get it: pure, no clock.

Higher priorities go first. Within one, clients take turns, a request each, and a client's own requests
keep the order in which they came.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from typing_extensions import override


@dataclass(slots=True, eq=False)
class Waiting:
    """One request in line.

    Attributes:
        client: Whose it is; requests of nobody known are one client's.
        num_tokens: Of its prompt: what it holds of this process's memory.
        arrived: When it came, by the caller's clock.
        expires: When it is not worth waiting any more, by the same clock.
        has_deadline: Whether that is its client's own wish.
    """

    client: str
    priority: int
    num_tokens: int
    arrived: float
    expires: float
    has_deadline: bool = False


class _Turns:
    """The clients of one priority: whose turn it is comes first."""

    def __init__(self) -> None:
        # Dicts, since any request may leave at any time, and order is kept.
        self.clients: dict[str, dict[Waiting, None]] = {}
        self.num_requests = 0

    def add(self, waiting: Waiting) -> None:
        self.clients.setdefault(waiting.client, {})[waiting] = None
        self.num_requests += 1

    def remove(self, waiting: Waiting) -> bool:
        queue = self.clients.get(waiting.client, {})
        if waiting not in queue:
            return False
        del queue[waiting]
        if not queue:
            del self.clients[waiting.client]
        self.num_requests -= 1
        return True

    def take(self) -> Waiting:
        client, queue = next(iter(self.clients.items()))
        waiting = next(iter(queue))
        del self.clients[client]
        del queue[waiting]
        if queue:
            self.clients[client] = queue  # behind those who have not had their turn
        self.num_requests -= 1
        return waiting

    def longest(self) -> dict[Waiting, None]:
        return max(self.clients.values(), key=len)


class Line:
    """All that wait.

    Attributes:
        num_tokens: Of the prompts of all.
    """

    def __init__(self) -> None:
        self._turns: dict[int, _Turns] = {}
        self._priorities: list[int] = []  # of those in `_turns`, rising
        self._num_requests = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Waiting]:
        """Yield all, those of higher priorities first."""
        for priority in reversed(self._priorities):
            for queue in self._turns[priority].clients.values():
                yield from queue

    @override
    def __repr__(self) -> str:
        return f"Line({len(self)} waiting, {self.num_tokens} tokens)"

    def add(self, waiting: Waiting) -> None:
        """Put a request in line."""
        if waiting.priority not in self._turns:
            self._turns[waiting.priority] = _Turns()
            insort(self._priorities, waiting.priority)
        self._turns[waiting.priority].add(waiting)
        self._count(waiting, 1)

    def remove(self, waiting: Waiting) -> bool:
        """Take a request out, wherever it stands. False if it is not in line."""
        turns = self._turns.get(waiting.priority)
        if turns is None or not turns.remove(waiting):
            return False
        self._count(waiting, -1)
        return True

    def take(self) -> Waiting | None:
        """Take out the next one; None when nobody waits."""
        if not self._priorities:
            return None
        waiting = self._turns[self._priorities[-1]].take()
        self._count(waiting, -1)
        return waiting

    def least(self) -> Waiting | None:
        """Return whom to send away for another: the last of who has most in the lowest priority."""
        if not self._priorities:
            return None
        return next(reversed(self._turns[self._priorities[0]].longest()))

    def yields_to(self, least: Waiting, newcomer: Waiting) -> bool:
        """Tell whether `least` gives its place up: to a higher priority, or to who has less in line."""
        if least.priority != newcomer.priority:
            return newcomer.priority > least.priority
        clients = self._turns[least.priority].clients
        return len(clients.get(newcomer.client, ())) + 1 < len(clients[least.client])

    def _count(self, waiting: Waiting, sign: int) -> None:
        self._num_requests += sign
        self.num_tokens += sign * waiting.num_tokens
        if not self._turns[waiting.priority].num_requests:
            del self._turns[waiting.priority]
            self._priorities.remove(waiting.priority)
